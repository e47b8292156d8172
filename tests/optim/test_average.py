"""The moving average against its definition in FP64: by the plain version and by the kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.layout import ParameterSpec, plan_layout
from lockstep.optim.average import Average
from lockstep.optim.loss_scale import LossScale

LAYOUT = plan_layout([ParameterSpec("weight", (3, 5), decay=True, adapt=True)])
both_ways = pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def average_in_fp64(history: list[np.ndarray], good: list[bool], decay: float, every: int) -> np.ndarray:
    """The definition: after every `every` good steps, of which the first `t` updates were made before."""
    average, steps, updates = history[0].astype(np.float64), 0, 0
    for values, is_good in zip(history[1:], good, strict=True):
        steps += is_good
        if is_good and steps % every == 0:
            kept = min(decay, (1 + updates) / (10 + updates))
            average = kept * average + (1 - kept) * values
            updates += 1
    return average


def follow(
    history: list[np.ndarray], good: list[bool], decay: float, every: int, *, fused: bool, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """The averages of weights and of statistics that change alike, step by step."""
    weights = torch.tensor(history[0], dtype=torch.float32, device=device)
    statistics = [weights[:7].clone().view(7, 1), weights[7:].clone()]
    average = Average(weights, statistics, decay=decay, every=every, fused=fused)
    count = torch.zeros((), device=device)
    scale = LossScale(LAYOUT, device)
    for values, is_good in zip(history[1:], good, strict=True):
        scale.settle(torch.tensor([is_good], device=device))
        count += is_good
        weights.copy_(torch.tensor(values))
        statistics[0].view(-1).copy_(weights[:7])
        statistics[1].copy_(weights[7:])
        average.follow(count, scale)
    return average.weights, average.statistics


@both_ways
@every_device
@pytest.mark.parametrize(("decay", "every"), [(0.9, 1), (0.9999, 1), (0.5, 3), (0.0001, 2)])
def test_it_is_the_definition_in_fp64(decay: float, every: int, fused: bool, device: str) -> None:
    generator = np.random.default_rng(3)
    history = list(generator.normal(size=(61, 5000)))
    good = [True] * 60
    expected = average_in_fp64(history, good, decay, every)
    for found in follow(history, good, decay, every, fused=fused, device=device):
        np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=0, atol=2e-6)
    assert np.abs(expected - history[0]).max() > 0.1
    assert decay < 0.1 or np.abs(expected - history[-1]).max() > 0.1


@both_ways
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=30),
    st.floats(1e-3, 0.999),
    st.integers(1, 7),
)
def test_only_good_steps_move_it_and_only_every_few(
    fused: bool, steps: list[tuple[float, bool]], decay: float, every: int
) -> None:
    history = [np.full(9, value) for value, _ in [(1.0, True), *steps]]
    good = [is_good for _, is_good in steps]
    expected = average_in_fp64(history, good, decay, every)
    for found in follow(history, good, decay, every, fused=fused):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


@both_ways
def test_a_step_that_is_not_due_leaves_every_bit(fused: bool) -> None:
    weights = torch.randn(300, generator=torch.Generator().manual_seed(1))
    average = Average(weights, decay=0.99, every=4, fused=fused)
    before = weights.clone()
    weights.add_(1)
    for count in (0, 1, 2, 3, 5, 4095):
        average.follow(torch.tensor(float(count)))
        assert torch.equal(average.weights, before)
    average.follow(torch.tensor(4.0))
    assert not torch.equal(average.weights, before)


def test_the_first_updates_are_worked_by_hand() -> None:
    """9/10 of the first weights, then 9/11 of the second, never less than 1 - 0.25."""
    weights = torch.zeros(1)
    average = Average(weights, decay=0.25, fused=False)
    found = []
    for count in range(1, 5):
        weights.fill_(1.0)
        before = average.weights.clone()
        average.follow(torch.tensor(float(count)))
        found.append(float((average.weights - before) / (1 - before)))
    np.testing.assert_allclose(found, [9 / 10, 9 / 11, 9 / 12, 0.75], rtol=1e-5)
    average.weights.zero_()
    average.follow(torch.tensor(1e6))
    assert float(average.weights) == pytest.approx(0.75)


def test_it_begins_with_what_the_weights_are_now() -> None:
    weights, statistic = torch.ones(4), torch.zeros(2, 3)
    average = Average(weights, [statistic], decay=0.9)
    weights.fill_(5)
    statistic.fill_(7)
    assert torch.equal(average.weights, torch.ones(4))
    average.begin()
    assert torch.equal(average.weights, torch.full((4,), 5.0))
    assert torch.equal(average.statistics, torch.full((6,), 7.0))
