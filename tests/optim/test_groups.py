"""Which parameters decay, which adapt, which are half."""

import pytest
from torch import nn

from lockstep.optim.groups import describe_parameters


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_parameters_come_in_forward_order_with_their_shapes() -> None:
    specs = describe_parameters(small_model())
    shapes = {"0.weight": (4, 3, 3, 3), "0.bias": (4,), "1.weight": (4,), "1.bias": (4,)}
    assert [(s.name, s.shape) for s in specs] == list((shapes | {"3.weight": (2, 4), "3.bias": (2,)}).items())


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("adapt", [False, True])
def test_decay_and_trust_ratio_of_norms_and_biases_are_separate_choices(decay: bool, adapt: bool) -> None:
    for spec in describe_parameters(small_model(), decay_norm_and_bias=decay, adapt_norm_and_bias=adapt):
        matrix = spec.name in ("0.weight", "3.weight")
        assert (spec.decay, spec.adapt) == (matrix or decay, matrix or adapt), spec.name


def test_frozen_parameters_are_left_out() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    assert [s.name for s in describe_parameters(model)] == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_all_but_batch_norm_may_be_half() -> None:
    assert not any(spec.half for spec in describe_parameters(small_model()))
    halves = {spec.name for spec in describe_parameters(small_model(), half=True) if spec.half}
    assert halves == {"0.weight", "0.bias", "3.weight", "3.bias"}
