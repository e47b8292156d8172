"""What every update rule promises: exact resume, repeatability, clean padding; and norms that can be trusted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.layout import Layout, ParameterSpec, plan_layout
from lockstep.optim.adamw import AdamW
from lockstep.optim.lamb import Lamb
from lockstep.optim.lars import Lars
from lockstep.optim.muon import Muon
from lockstep.optim.rule import PIECE, Rule, Segments
from lockstep.optim.sgd import Sgd

BuildRule = Callable[[Layout], Rule]
RULES: dict[str, BuildRule] = {
    "sgd": Sgd,
    "nesterov": partial(Sgd, nesterov=True),
    "lars": Lars,
    "lamb": Lamb,
    "adamw": AdamW,
    "muon": Muon,
    "clipped": partial(Lars, clip_norm=0.5),
}
every_rule = pytest.mark.parametrize("build_rule", RULES.values(), ids=RULES)


@every_rule
def test_a_reloaded_rule_goes_on_bit_for_bit(problem: Any, build_rule: BuildRule) -> None:
    first = build_rule(problem.layout)
    weights = problem.flat(problem.weights)
    problem.advance(first, weights, range(3))
    resumed = build_rule(problem.layout)
    for name, array in resumed.state().items():
        array.copy_(first.state()[name])
    resumed.count.copy_(first.count)
    problem.advance(resumed, weights, range(3, 5))
    assert torch.equal(weights, problem.run(build_rule(problem.layout)))


@every_rule
def test_forgetting_the_state_changes_the_weights(problem: Any, build_rule: BuildRule) -> None:
    weights = problem.flat(problem.weights)
    problem.advance(build_rule(problem.layout), weights, range(3))
    problem.advance(build_rule(problem.layout), weights, range(3, 5))
    assert not torch.equal(weights, problem.run(build_rule(problem.layout)))


@every_rule
def test_the_same_steps_give_the_same_bits(problem: Any, build_rule: BuildRule) -> None:
    assert torch.equal(problem.run(build_rule(problem.layout)), problem.run(build_rule(problem.layout)))


@every_rule
def test_padding_stays_zero(problem: Any, build_rule: BuildRule) -> None:
    rule = build_rule(problem.layout)
    padding = torch.ones(problem.layout.numel, dtype=torch.bool)
    for slot in problem.layout.slots:
        padding[slot.offset : slot.end] = False
    assert padding.any()
    for array in (problem.run(rule), *rule.state().values()):
        assert not array[padding].any()
        assert array.isfinite().all()


@every_rule
def test_a_rate_of_zero_leaves_the_weights(problem: Any, build_rule: BuildRule) -> None:
    weights = problem.flat(problem.weights)
    build_rule(problem.layout).step(weights, (torch.zeros(0), problem.flat(problem.gradients[0])), torch.tensor(0.0))
    assert torch.equal(weights, problem.flat(problem.weights))


@every_rule
@pytest.mark.parametrize("decay", [True, False])
def test_a_layout_may_decay_everywhere_or_nowhere(build_rule: BuildRule, decay: bool) -> None:
    layout = plan_layout([ParameterSpec("w", (3, 3), decay, adapt=True)])
    weights = torch.ones(layout.numel)
    build_rule(layout).step(weights, (torch.zeros(0), torch.ones(layout.numel)), torch.tensor(1.0))
    assert (weights[:9] < 1).all()


@every_rule
def test_gradients_slot_by_slot_give_the_same_bits_as_flat_ones(
    problem: Any, learning_rates: list[float], build_rule: BuildRule
) -> None:
    rule = build_rule(problem.layout)
    weights = problem.flat(problem.weights)
    for gradients, lr in zip(problem.gradients, learning_rates, strict=True):
        flat = problem.flat(gradients)
        apart = [flat[slot.offset : slot.end].clone() for slot in problem.layout.slots]
        rule.step(weights, apart, torch.tensor(lr))
    assert torch.equal(weights, problem.run(build_rule(problem.layout)))
    assert rule.count == len(learning_rates)


def test_norms_are_exact_to_fp32_even_for_millions_of_elements() -> None:
    sizes = [3, 64, PIECE - 1, PIECE, PIECE + 1, 80 * PIECE]
    layout = plan_layout(ParameterSpec(f"p{size}", (size,), True, True) for size in sizes)
    drawn = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)).mul_(0.01)
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        flat[slot.offset : slot.end] = drawn[slot.offset : slot.end]
    segments = Segments(layout, "cpu")
    expected = [np.linalg.norm(flat[slot.offset : slot.end].double().numpy()) for slot in layout.slots]
    np.testing.assert_allclose(segments.norms(segments.split(flat)).numpy(), expected, rtol=2e-6)
