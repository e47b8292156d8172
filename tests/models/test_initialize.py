"""Starting weights: the right spread, from the seed alone."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.models import build_model, initialize


def small_model(name: str = "resnet18", **settings: Any) -> nn.Module:
    width = {"width": 16} if name != "alexnet" else {}
    return build_model(name, 100, image_size=64, **width, **settings)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


def test_the_seed_alone_decides_the_weights() -> None:
    a, b = small_model(), small_model()
    torch.manual_seed(1)
    initialize(a, seed=7)
    torch.manual_seed(2)
    initialize(b, seed=7)
    assert_same_weights(a, b)


def test_another_seed_gives_other_weights() -> None:
    a, b = small_model(), small_model()
    initialize(a, seed=7)
    initialize(b, seed=8)
    assert not torch.equal(a.get_parameter("conv1.weight"), b.get_parameter("conv1.weight"))


def test_memory_format_does_not_change_the_weights() -> None:
    a, b = small_model(), small_model().to(memory_format=torch.channels_last)
    initialize(a, seed=7)
    initialize(b, seed=7)
    assert_same_weights(a, b)


def test_initialising_again_forgets_everything() -> None:
    a, b = small_model(), small_model()
    b(torch.randn(2, 3, 64, 64))
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.add_(1.0)
    initialize(a, seed=7)
    initialize(b, seed=7)
    assert_same_weights(a, b)
    assert torch.equal(a.get_buffer("bn1.running_mean"), b.get_buffer("bn1.running_mean"))


def test_the_global_random_state_is_left_alone() -> None:
    model = small_model()
    before = torch.get_rng_state()
    initialize(model, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["resnet18", "alexnet"])
def test_weights_have_the_spread_of_their_rule(name: str) -> None:
    model = small_model(name)
    initialize(model, seed=0)
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            _, in_channels, height, width = module.weight.shape
            expected = math.sqrt(2 / (in_channels * height * width))
        elif isinstance(module, nn.Linear):
            expected = 0.01
        else:
            continue
        # Four standard errors of a sample's standard deviation.
        tolerance = 4 / math.sqrt(2 * module.weight.numel())
        assert module.weight.detach().std().item() == pytest.approx(expected, rel=tolerance), path
        assert module.bias is None or not module.bias.any(), path


@pytest.mark.parametrize("zero_init_residual", [True, False])
def test_batch_norm_starts_at_one_and_zero_but_for_the_last_of_a_block(zero_init_residual: bool) -> None:
    model = small_model(zero_init_residual=zero_init_residual)
    initialize(model, seed=0)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert len(norms) == 20
    for name, norm in norms.items():
        zero = zero_init_residual and name.endswith(".bn2")
        assert norm.weight.unique().tolist() == [0.0 if zero else 1.0], name
        assert norm.bias.unique().tolist() == [0.0], name
