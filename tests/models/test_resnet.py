"""ResNet: torchvision's names and shapes, the strides of v1.5, the stems, ResNet-D under timm's names."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.models import set_fused
from lockstep.models.initialize import initialize
from lockstep.models.resnet import BasicBlock, Bottleneck, ResNet, build_resnet

STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
NUM_PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}

Table = list[tuple[str, tuple[int, ...]]]


def norm_rows(name: str, channels: int) -> Table:
    statistics = [(f"{name}.running_mean", (channels,)), (f"{name}.running_var", (channels,))]
    return [
        (f"{name}.weight", (channels,)),
        (f"{name}.bias", (channels,)),
        *statistics,
        (f"{name}.num_batches_tracked", ()),
    ]


def published_table(depth: int) -> Table:
    """Every entry of the published state_dict, written out from the rule: kernels 3-3 or 1-3-1, ×4 in bottlenecks."""
    bottleneck = depth >= 50
    rows: Table = [("conv1.weight", (64, 3, 7, 7)), *norm_rows("bn1", 64)]
    entering = 64
    for stage, num_blocks in enumerate(STAGES[depth]):
        inner = 64 << stage
        leaving = inner * 4 if bottleneck else inner
        for block in range(num_blocks):
            prefix = f"layer{stage + 1}.{block}"
            plan = [(inner, 1), (inner, 3), (leaving, 1)] if bottleneck else [(inner, 3), (inner, 3)]
            channels = entering
            for i, (out, kernel) in enumerate(plan, start=1):
                rows += [(f"{prefix}.conv{i}.weight", (out, channels, kernel, kernel))]
                rows += norm_rows(f"{prefix}.bn{i}", out)
                channels = out
            if block == 0 and (stage > 0 or bottleneck):
                rows += [(f"{prefix}.downsample.0.weight", (leaving, entering, 1, 1))]
                rows += norm_rows(f"{prefix}.downsample.1", leaving)
            entering = leaving
    return [*rows, ("fc.weight", (1000, entering)), ("fc.bias", (1000,))]


def small_resnet(depth: int = 18, **settings: Any) -> ResNet:
    model = build_resnet(depth, 10, width=8, **settings)
    initialize(model, seed=0)
    return model


def stride_2_modules(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.MaxPool2d) and module.stride in (2, (2, 2))
    }


@pytest.mark.parametrize("depth", STAGES)
def test_names_shapes_and_order_are_the_published_ones(depth: int) -> None:
    with torch.device("meta"):
        model = build_resnet(depth, 1000)
    assert [(name, tuple(value.shape)) for name, value in model.state_dict().items()] == published_table(depth)
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[depth]


def test_the_stride_is_in_the_3x3_convolution_of_a_bottleneck() -> None:
    strided = {f"layer{stage}.0.{name}" for stage in (2, 3, 4) for name in ("conv2", "downsample.0")}
    assert stride_2_modules(build_resnet(50, 10, width=8)) == strided | {"conv1"}


def test_the_cifar_stem_keeps_the_image_and_has_no_pool() -> None:
    model = small_resnet(stem="cifar")
    strided = {f"layer{stage}.0.{name}" for stage in (2, 3, 4) for name in ("conv1", "downsample.0")}
    assert stride_2_modules(model) == strided
    assert model.conv1(torch.zeros(1, 3, 32, 32)).shape == (1, 8, 32, 32)


@pytest.mark.parametrize(
    ("depth", "stem", "side", "last_side"),
    [(18, "imagenet", 64, 2), (50, "cifar", 32, 4), (18, "deep", 64, 2), (50, "fine", 64, 4)],
)
def test_every_later_stage_halves_the_image(depth: int, stem: str, side: int, last_side: int) -> None:
    model = small_resnet(depth, stem=stem)
    sides: list[int] = []
    model.layer4.register_forward_hook(lambda _module, _inputs, output: sides.append(output[0].shape[-1]))
    assert model(torch.randn(2, 3, side, side)).shape == (2, 10)
    assert sides == [last_side]


def test_resnet_d_has_three_small_convolutions_first_and_takes_no_stride_in_a_shortcuts_convolution() -> None:
    """Its table is the published one's but for the first convolution and for what pooling adds to a shortcut."""
    expected: Table = [("conv1.0.weight", (32, 3, 3, 3)), *norm_rows("conv1.1", 32)]
    expected += [("conv1.3.weight", (32, 32, 3, 3)), *norm_rows("conv1.4", 32), ("conv1.6.weight", (64, 32, 3, 3))]
    later = {"downsample.0": "downsample.1", "downsample.1": "downsample.2"}
    for name, shape in published_table(50)[1:]:
        place = ".".join(name.split(".")[2:4])
        expected.append((name.replace(place, later[place]) if place in later else name, shape))
    with torch.device("meta"):
        model = build_resnet(50, 1000, stem="deep", pooled_shortcuts=True)
    assert [(name, tuple(value.shape)) for name, value in model.state_dict().items()] == expected
    assert stride_2_modules(model) == {f"layer{stage}.0.conv2" for stage in (2, 3, 4)} | {"conv1.0"}


@pytest.mark.parametrize("side", [6, 7])
def test_a_pooled_shortcut_is_the_projected_mean_of_the_pixels_there_are(side: int) -> None:
    """The last block of an odd side has one or two pixels in the place of four."""
    block = small_resnet(pooled_shortcuts=True).layer2[0].eval()
    x = torch.rand(2, 8, side, side)
    sums, counts = torch.zeros(2, 8, (side + 1) // 2, (side + 1) // 2), torch.zeros((side + 1) // 2, (side + 1) // 2)
    for row in range(side):
        for column in range(side):
            sums[:, :, row // 2, column // 2] += x[:, :, row, column]
            counts[row // 2, column // 2] += 1
    projected = torch.einsum("nchw,oc->nohw", sums / counts, block.downsample[1].weight[:, :, 0, 0])
    expected = (projected / (1 + 1e-5) ** 0.5).relu()  # a fresh norm, and a branch that starts at zero
    torch.testing.assert_close(block((x, x))[0], expected)


@pytest.mark.parametrize("depth", [18, 50])
def test_weights_of_timms_resnet_d_fit(depth: int) -> None:
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(f"resnet{depth}d").eval()
    ours = build_resnet(depth, 1000, stem="deep", pooled_shortcuts=True).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 65, 65)
    torch.testing.assert_close(ours(images), theirs(images))


def test_width_scales_every_stage() -> None:
    narrow = dict(small_resnet().named_parameters())
    for name, published in build_resnet(18, 10).named_parameters():
        expected = [n if n in (3, 7, 1, 10) else n // 8 for n in published.shape]
        assert list(narrow[name].shape) == expected, name


@pytest.mark.parametrize("depth", [18, 50])
def test_a_block_starts_as_its_shortcut(depth: int) -> None:
    block = small_resnet(depth).layer1[1]
    x = torch.rand(2, block.conv1.in_channels, 6, 6)
    torch.testing.assert_close(block((x, x))[0], x, rtol=0, atol=0)


def test_a_block_does_not_start_as_its_shortcut_unless_asked() -> None:
    block = small_resnet(zero_init_residual=False).layer1[1]
    x = torch.rand(2, 8, 6, 6)
    assert (block((x, x))[0] - x).abs().max() > 0.1


def test_every_weight_gets_a_gradient_once_residuals_are_open() -> None:
    model = small_resnet(50, zero_init_residual=False)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_activations_stay_channels_last() -> None:
    model = small_resnet(50).to(memory_format=torch.channels_last)
    layouts: list[bool] = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        stage.register_forward_hook(
            lambda _module, _inputs, output: layouts.append(output[0].is_contiguous(memory_format=torch.channels_last))
        )
    model(torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last))
    assert layouts == [True] * 4


@pytest.mark.parametrize("depth", [18, 50])
def test_weights_move_to_torchvision_and_back(depth: int) -> None:
    torchvision = pytest.importorskip("torchvision")
    theirs = getattr(torchvision.models, f"resnet{depth}")().eval()
    ours = build_resnet(depth, 1000).eval()
    images = torch.randn(2, 3, 64, 64)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(images), theirs(images))
    initialize(ours, seed=1)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs(images), ours(images))


@pytest.mark.parametrize(
    ("block", "stem", "pooled"),
    [(BasicBlock, "imagenet", False), (Bottleneck, "cifar", False), (Bottleneck, "fine", True)],
)
def test_fused_it_trains_alike(block: Any, stem: Any, pooled: bool) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    plain = ResNet(block, (2, 1, 1, 1), 10, stem, 8, zero_init_residual=False, pooled_shortcuts=pooled)
    plain = plain.to(memory_format=torch.channels_last)
    size = 8 if stem == "cifar" else 32
    fused = copy.deepcopy(plain)
    set_fused(fused, True)
    images = torch.randn(3, 3, size, size).to(memory_format=torch.channels_last)
    plain(images).square().sum().backward()
    assert fused.input_channels == 4
    with_an_empty_channel = torch.cat([images, torch.zeros(3, 1, size, size)], dim=1)
    fused(with_an_empty_channel.to(memory_format=torch.channels_last)).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        difference = (fused.get_parameter(name).grad - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 0.1, f"{name} is off by {difference:.1e}"  # one ReLU that rounding flips makes 0.03
