"""Parameters as views of flat arrays, and arrays by name."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lockstep.errors import LockstepError
from lockstep.layout import Layout, plan_layout
from lockstep.optim.groups import describe_parameters
from lockstep.optim.storage import build_weights, load_named, mixed_views, named_arrays, views

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 7, 1), nn.Flatten(), nn.Linear(7 * 4, 2)
    )


class Stored(NamedTuple):
    model: nn.Module
    layout: Layout
    weights: torch.Tensor


def stored_model() -> Stored:
    model = small_model()
    layout = plan_layout(describe_parameters(model))
    return Stored(model, layout, build_weights(model, layout, "cpu")[0])


def test_values_and_outputs_are_kept() -> None:
    model = stored_model().model
    reference = small_model()
    for name, parameter in reference.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    images = torch.randn(4, 3, 4, 4)
    torch.testing.assert_close(model(images), reference(images))


def test_parameters_are_views_of_their_slots() -> None:
    model, layout, weights = stored_model()
    weights.copy_(torch.arange(layout.numel))
    for slot in layout.slots:
        numbers = set(range(slot.offset, slot.end))
        assert set(model.get_parameter(slot.name).detach().flatten().int().tolist()) == numbers


def test_convolution_weights_lie_channels_last() -> None:
    model = stored_model().model
    for name in ("0.weight", "3.weight"):
        parameter = model.get_parameter(name)
        assert parameter.is_contiguous(memory_format=torch.channels_last)
        assert parameter.stride() == parameter.detach().to(memory_format=torch.channels_last).stride()


def test_a_state_dict_loads_into_the_flat_array() -> None:
    model, layout, weights = stored_model()
    other = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    filled = sum(slot.numel for slot in layout.slots)
    assert weights.sum().item() == 3 * filled


def test_frozen_parameters_and_statistics_stay_ordinary() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    build_weights(model, plan_layout(describe_parameters(model)), "cpu")[0].zero_()
    assert torch.equal(model[0].weight, frozen)
    assert model[1].running_var.unique().tolist() == [1.0]


def test_named_arrays_are_contiguous_copies_in_forward_order() -> None:
    model, layout, weights = stored_model()
    arrays = named_arrays(weights, layout)
    assert list(arrays) == [name for name, _ in model.named_parameters()]
    before = copy.deepcopy(arrays)
    weights.add_(1.0)
    for name, array in arrays.items():
        assert array.is_contiguous(), name
        assert torch.equal(array, before[name]), name


def test_named_arrays_fill_a_layout_of_another_order() -> None:
    _, layout, weights = stored_model()
    specs = describe_parameters(small_model())
    other = plan_layout(reversed(specs))
    assert other != layout
    arrays = named_arrays(weights, layout)
    moved = torch.zeros(other.numel)
    load_named(moved, other, arrays)
    back = torch.zeros_like(weights)
    load_named(back, layout, named_arrays(moved, other))
    assert torch.equal(back, weights)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: {k: v for k, v in a.items() if k != "1.bias"}, "parameter '1.bias' is missing: use"),
        (lambda a: {"5.bias": a["5.bias"]}, r"parameter '0.bias' is missing \(and 6 more\)"),
        (lambda a: a | {"9.bias": torch.zeros(1)}, "no parameter '9.bias'"),
        (lambda a: a | {"1.bias": torch.zeros(6)}, r"'1.bias' has shape \(5,\), its array \(6,\)"),
        (lambda a: a | {"0.weight": torch.zeros(3, 5, 3, 3)}, "'0.weight' has shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_nothing_is_written(change: Change, sentence: str) -> None:
    _, layout, weights = stored_model()
    before = weights.clone()
    arrays = named_arrays(torch.zeros_like(weights), layout)
    with pytest.raises(LockstepError, match=sentence):
        load_named(weights, layout, change(arrays))
    assert torch.equal(weights, before)


def test_an_empty_layout_has_no_views() -> None:
    assert views(torch.zeros(0), Layout((), 0)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_half_model_has_fp32_masters_and_batch_norm_lies_in_them(dtype: torch.dtype) -> None:
    model, reference = small_model(), small_model()
    layout = plan_layout(describe_parameters(model, half=True))
    master, half = build_weights(model, layout, "cpu", dtype)
    for name, parameter in reference.named_parameters():
        kept = parameter if name.startswith("1.") else parameter.to(dtype)
        assert torch.equal(model.get_parameter(name), kept), name
    named = named_arrays(master, layout)
    assert list(named) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(named[name], parameter) for name, parameter in reference.named_parameters())
    half.zero_()
    master.fill_(7.0)
    assert {name for name, p in model.named_parameters() if (p == 7).all()} == {"1.weight", "1.bias"}
    assert {name for name, p in model.named_parameters() if (p == 0).all()} == set(named) - {"1.weight", "1.bias"}


def test_mixed_views_divide_a_layout_between_two_arrays() -> None:
    layout = plan_layout(describe_parameters(small_model(), half=True))
    flat = torch.arange(layout.numel, dtype=torch.float64)
    mixed = mixed_views(flat[: layout.split], flat[layout.split :], layout)
    assert all(torch.equal(a, b) for a, b in zip(mixed, views(flat, layout), strict=True))


def test_a_parameter_of_an_endless_name_is_a_short_sentence() -> None:
    layout = plan_layout(describe_parameters(small_model()))
    flat = torch.zeros(layout.numel)
    arrays = named_arrays(flat, layout) | {"a" * 5000: torch.zeros(1)}
    with pytest.raises(LockstepError, match="has no parameter 'aaa") as caught:
        load_named(flat, layout, arrays)
    assert len(str(caught.value)) < 500
