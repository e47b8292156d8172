"""AlexNet in one ungrouped column with batch norm (Jia et al. 2018, section 3.2): images → logits, step 6 of the walk.

62,378,344 parameters without batch norm for 1000 classes. Batch norm follows every convolution, not only the two that
LRN followed: that is the usual AlexNet-BN, and with it the paper's cut after tensor 20 falls right behind conv5
(5 × weight, bias, γ, β). The paper's own change is one more batch norm after pool5, whose variance grows in training.
"""

from torch import Tensor, nn
from torch.nn import functional

from lockstep.errors import LockstepError
from lockstep.models.norm import BatchNorm, BatchNormRelu, BatchNormReluPool
from lockstep.models.registry import register

FULLY_CONNECTED = 4096


class AlexNet(nn.Module):
    """Five convolutions (`features`) and three fully connected layers (`classifier`)."""

    takes_half = True  # see `mixed.py`

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class Stem(nn.Conv2d):
    """The first convolution: 11 × 11 pixels at stride 4, of three channels.

    Tensor cores want more channels. Fused, blocks of 4 × 4 pixels become 48 channels, and the kernel, a row and column
    of zeros added, becomes one of 3 × 3 blocks at stride 1: the same sums, several times as fast.
    """

    fused = False

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        if not self.fused or (height + 4) % 4 or (width + 4) % 4:
            return super().forward(images)
        blocks = _to_blocks(functional.pad(images, (2, 2, 2, 2)))
        return functional.conv2d(blocks, _to_blocks(functional.pad(self.weight, (0, 1, 0, 1))), self.bias)


def _to_blocks(x: Tensor) -> Tensor:
    """N × C × H × W → N × 16·C × H/4 × W/4, channels-last."""
    count, channels, height, width = x.shape
    x = x.reshape(count, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1)
    return x.reshape(count, height // 4, width // 4, 16 * channels).permute(0, 3, 1, 2)


def _convolution(
    in_channels: int, out_channels: int, kernel: int, batch_norm: bool, *, padding: int, pool: bool = False
) -> list[nn.Module]:
    """Convolution, batch norm (which makes the bias needless) where asked, ReLU, pool where asked."""
    if kernel == 11:
        convolution: nn.Conv2d = Stem(in_channels, out_channels, kernel, 4, padding, bias=not batch_norm)
    else:
        convolution = nn.Conv2d(in_channels, out_channels, kernel, 1, padding, bias=not batch_norm)
    if batch_norm:
        return [convolution, (BatchNormReluPool if pool else BatchNormRelu)(out_channels)]
    return [convolution, nn.ReLU(inplace=True), *([nn.MaxPool2d(3, stride=2)] if pool else [])]


def pool5_side(image_size: int) -> int:
    """The side of pool5's output: 6 for images of 224 (or 227) pixels."""
    side = (image_size + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


def build_alexnet(
    num_classes: int,
    batch_norm: bool = True,
    pool5_batch_norm: bool = True,
    dropout: float = 0.5,
    image_size: int = 224,
) -> AlexNet:
    """Build the network for square images; without `batch_norm` it has none at all, after pool5 neither."""
    side = pool5_side(image_size)
    if side < 1:
        raise LockstepError(f"AlexNet needs images of at least 63 pixels, not {image_size}: enlarge data.image_size.")
    features = nn.Sequential(
        *_convolution(3, 96, 11, batch_norm, padding=2, pool=True),
        *_convolution(96, 256, 5, batch_norm, padding=2, pool=True),
        *_convolution(256, 384, 3, batch_norm, padding=1),
        *_convolution(384, 384, 3, batch_norm, padding=1),
        *_convolution(384, 256, 3, batch_norm, padding=1, pool=True),
        *([BatchNorm(256)] if batch_norm and pool5_batch_norm else []),
    )
    classifier = nn.Sequential(
        nn.Linear(256 * side * side, FULLY_CONNECTED),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(FULLY_CONNECTED, FULLY_CONNECTED),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(FULLY_CONNECTED, num_classes),
    )
    return AlexNet(features, classifier)


@register("alexnet", initialize=True)
def build_named(
    num_classes: int,
    *,
    image_size: int,
    batch_norm: bool = True,
    pool5_batch_norm: bool = True,
    dropout: float = 0.5,
) -> AlexNet:
    """`build_alexnet` with its settings by name."""
    return build_alexnet(num_classes, batch_norm, pool5_batch_norm, dropout, image_size)
