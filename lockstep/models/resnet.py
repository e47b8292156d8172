"""ResNet v1.5 (He et al. 2016, with the stride in the 3×3 convolution): images → logits, step 6 of the walk.

Parameter names, shapes and order are torchvision's, so that weights move both ways. With the deep stem and pooled
shortcuts it is ResNet-D (He et al. 2018, arXiv 1812.01187), under timm's names.
"""

from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from lockstep.errors import LockstepError
from lockstep.models.chain import Pointwise, Tail, convolve
from lockstep.models.norm import BatchNorm, BatchNormRelu, Pair, Summed
from lockstep.models.registry import register

StemName = Literal["imagenet", "deep", "fine", "cifar"]

# Pixels of the image to one pixel of the last stage.
STRIDE: dict[StemName, int] = {"imagenet": 32, "deep": 32, "fine": 16, "cifar": 8}
POOLED_STEMS = ("imagenet", "deep")


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size at stride 1, without the bias that batch norm would cancel."""
    kind = Pointwise if kernel == stride == 1 else nn.Conv2d
    return kind(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


class Stem(nn.Conv2d):
    """The first convolution; it also takes images with empty channels added, which tensor cores read faster."""

    def forward(self, images: Tensor) -> Tensor:
        extra = images.shape[1] - self.in_channels
        weight = functional.pad(self.weight, (0, 0, 0, 0, 0, extra)) if extra else self.weight
        return functional.conv2d(images, weight, None, self.stride, self.padding)


class DeepStem(nn.Sequential):
    """Three 3×3 convolutions in the place of one 7×7, the first at stride 2; numbered as timm's, which count ReLUs."""

    def __init__(self, width: int) -> None:
        half = max(1, width // 2)
        super().__init__(
            Stem(3, half, 3, 2, padding=1, bias=False),
            BatchNormRelu(half),
            nn.Identity(),
            _convolution(half, half, 3),
            BatchNormRelu(half),
            nn.Identity(),
            _convolution(half, width, 3),
        )


def _stem(name: StemName, width: int) -> nn.Module:
    if name in ("deep", "fine"):
        return DeepStem(width)
    kernel, stride = (7, 2) if name == "imagenet" else (3, 1)
    return Stem(3, width, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int, pooled: bool) -> nn.Sequential | None:
    """The projection of a block that changes the shape; None where the shortcut is the identity.

    `pooled`: a stride is taken by a mean over 2×2 pixels, where the 1×1 convolution would leave three of four unread.
    """
    if stride == 1 and in_channels == out_channels:
        return None
    if not pooled:
        return nn.Sequential(_convolution(in_channels, out_channels, 1, stride), BatchNorm(out_channels))
    pool = nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
    return nn.Sequential(pool, _convolution(in_channels, out_channels, 1), BatchNorm(out_channels))


def _project(downsample: nn.Sequential | None, x: Tensor) -> tuple[Tensor, BatchNorm | None]:
    """The shortcut before its norm, and that norm; x itself where there is no projection."""
    if downsample is None:
        return x, None
    pooled, convolution, norm = _take_apart(downsample, x)
    return convolution(pooled), norm


def _take_apart(downsample: nn.Sequential, x: Tensor) -> tuple[Tensor, nn.Conv2d, BatchNorm]:
    """What goes into a shortcut's convolution, the convolution, its norm."""
    *pool, convolution, norm = downsample
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, BatchNorm)
    return (pool[0](x) if pool else x), convolution, norm


class BasicBlock(nn.Module):
    """Two 3×3 convolutions: the block of ResNet-18 and 34."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int, pooled: bool = False) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, channels, 3, stride)
        self.bn1 = BatchNorm(channels)
        self.conv2 = _convolution(channels, channels, 3)
        self.bn2 = BatchNorm(channels)
        self.downsample = _shortcut(in_channels, channels, stride, pooled)

    @property
    def last_norm(self) -> BatchNorm:
        return self.bn2

    def forward(self, pair: Pair) -> Pair:
        x, shortcut = pair
        x = self.bn1.relu(self.conv1(x))
        return self.bn2.add_relu(self.conv2(x), *_project(self.downsample, shortcut))


class Bottleneck(nn.Module):
    """1×1, 3×3 with the stride, 1×1 to four times the channels: the block of ResNet-50 and deeper."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, pooled: bool = False) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = _convolution(in_channels, channels, 1)
        self.bn1 = BatchNorm(channels)
        self.conv2 = _convolution(channels, channels, 3, stride)
        self.bn2 = BatchNorm(channels)
        self.conv3 = _convolution(channels, out_channels, 1)
        self.bn3 = BatchNorm(out_channels)
        self.downsample = _shortcut(in_channels, out_channels, stride, pooled)

    @property
    def last_norm(self) -> BatchNorm:
        return self.bn3

    def forward(self, pair: Pair) -> Pair:
        x, shortcut = pair
        x = self.bn1.relu(self.conv1(x))
        x = self.bn2.relu(self.conv2(x))
        return self.bn3.add_relu(self.conv3(x), *_project(self.downsample, shortcut))

    def chain(self, z: Summed, shortcut: Tensor, following: "Bottleneck | None") -> tuple[Summed, Tensor]:
        """`forward` from behind the first convolution to behind that of the block that follows, fused across both."""
        x = self.conv2(self.bn1.relu(*z))
        way, norm = Summed(shortcut), None
        if self.downsample is not None:
            pooled, convolution, norm = _take_apart(self.downsample, shortcut)
            way = convolve(convolution, pooled, norm)
        following_parts = (following.conv1, following.bn1) if following else (None, None)
        return Tail(self.bn2, self.conv3, self.bn3, norm, *following_parts).run(x, way)


def run_chain(blocks: list[Bottleneck], pair: Pair) -> Tensor:
    """All blocks of a network in turn, as `Bottleneck.chain`."""
    x, shortcut = pair
    z = convolve(blocks[0].conv1, x, blocks[0].bn1)
    for block, following in pairwise([*blocks, None]):
        assert block is not None
        z, shortcut = block.chain(z, shortcut, following)
    return shortcut


Block = type[BasicBlock] | type[Bottleneck]

# Depth → the block and how many of them each of the four stages has.
PLANS: dict[int, tuple[Block, tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """A stem, four stages, the mean over the image, a classifier; later stages halve the side, double the channels."""

    fused = False  # as in the modules below, by `set_fused`
    takes_half = True  # see `mixed.py`
    has_frozen_norm = False  # set by `freeze.py`: the chain takes every norm's statistics from the batch

    def __init__(
        self,
        block: Block,
        stage_blocks: tuple[int, int, int, int],
        num_classes: int,
        stem: StemName,
        width: int,
        zero_init_residual: bool,
        pooled_shortcuts: bool = False,
    ) -> None:
        super().__init__()
        self.zero_init_residual = zero_init_residual  # read by `initialize`
        self.conv1 = _stem(stem, width)
        self.bn1 = BatchNorm(width)
        self.pools = stem in POOLED_STEMS
        out = width * block.expansion  # channels out of the first stage
        self.layer1 = _stage(block, stage_blocks[0], width, width, 1, pooled_shortcuts)
        self.layer2 = _stage(block, stage_blocks[1], out, 2 * width, 2, pooled_shortcuts)
        self.layer3 = _stage(block, stage_blocks[2], 2 * out, 4 * width, 2, pooled_shortcuts)
        self.layer4 = _stage(block, stage_blocks[3], 4 * out, 8 * width, 2, pooled_shortcuts)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * out, num_classes)

    @property
    def input_channels(self) -> int:
        """How many channels images best have: four with the fused kernels, the last of them empty."""
        return 4 if self.fused else 3

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images)
        pair = self.bn1.relu_pool(x) if self.pools else (y := self.bn1.relu(x), y)
        x = self._run_blocks(pair)
        # The mean over pixels; taken over rows of channels, its gradient comes back dense.
        mean = x.permute(0, 2, 3, 1).flatten(1, 2).mean(1) if self.fused else self.avgpool(x).flatten(1)
        logits: Tensor = self.fc(mean)
        return logits

    def _run_blocks(self, pair: Pair) -> Tensor:
        stages = (self.layer1, self.layer2, self.layer3, self.layer4)
        chains = self.fused and self.training and not self.has_frozen_norm
        if chains and isinstance(self.layer1[0], Bottleneck):
            return run_chain([block for stage in stages for block in stage], pair)  # type: ignore[misc]
        for stage in stages:
            pair = stage(pair)
        return pair[0]


def _stage(block: Block, num_blocks: int, in_channels: int, channels: int, stride: int, pooled: bool) -> nn.Sequential:
    """Blocks of one size; the first takes the stride and the change of channels."""
    first = block(in_channels, channels, stride, pooled)
    return nn.Sequential(first, *(block(channels * block.expansion, channels, 1) for _ in range(num_blocks - 1)))


def build_resnet(
    depth: int,
    num_classes: int,
    stem: StemName = "imagenet",
    width: int = 64,
    zero_init_residual: bool = True,
    pooled_shortcuts: bool = False,
) -> ResNet:
    """Build a ResNet; `width` scales every stage, 64 being the published network."""
    block, stage_blocks = PLANS[depth]
    return ResNet(block, stage_blocks, num_classes, stem, width, zero_init_residual, pooled_shortcuts)


RESNET_DEPTHS = {f"resnet{depth}": depth for depth in PLANS}


def build_sized(
    num_classes: int,
    *,
    depth: int,
    image_size: int,
    stem: StemName = "imagenet",
    width: int = 64,
    zero_init_residual: bool = True,
    pooled_shortcuts: bool = False,
) -> ResNet:
    """Build a ResNet for square images of `image_size`; too small ones would vanish on the way."""
    if image_size < STRIDE[stem]:
        raise LockstepError(
            f"resnet{depth} with the {stem} stem needs images of at least {STRIDE[stem]} pixels, not {image_size}: "
            "enlarge data.image_size" + (" or set model.stem = 'cifar'." if stem != "cifar" else ".")
        )
    return build_resnet(depth, num_classes, stem, width, zero_init_residual, pooled_shortcuts)


for _name, _depth in RESNET_DEPTHS.items():
    register(_name, initialize=True, depth=_depth)(build_sized)
