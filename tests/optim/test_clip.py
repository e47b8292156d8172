"""Clipping by the norm of all gradients, under every rule, against torch.nn.utils and by what it promises."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernels.flat_update import Tiling
from lockstep.layout import Layout, ParameterSpec, plan_layout
from lockstep.optim.adamw import AdamW
from lockstep.optim.lamb import Lamb
from lockstep.optim.lars import Lars
from lockstep.optim.rule import Rule
from lockstep.optim.sgd import Sgd

KINDS: list[type[Any]] = [Sgd, Lars, Lamb, AdamW]
CLIP_NORM = 0.7
every_rule = pytest.mark.parametrize("kind", KINDS)
either_way = pytest.mark.parametrize("fused", [False, True])


def build_rule(kind: type[Any], layout: Layout, fused: bool, clip_norm: float = 0.0) -> Rule:
    rule: Rule = kind(layout, fused=fused, clip_norm=clip_norm)
    if fused:
        rule.fuse(Tiling(block=256))
    return rule


@every_rule
@either_way
def test_a_clipped_step_is_a_step_on_gradients_that_torch_has_clipped(
    problem: Any, kind: type[Any], fused: bool
) -> None:
    """Every rule, on gradients above the limit and below it."""
    rule, other = build_rule(kind, problem.layout, fused, CLIP_NORM), build_rule(kind, problem.layout, fused=False)
    weights, expected = problem.flat(problem.weights), problem.flat(problem.weights)
    for factor in (1.0, 0.1):
        gradients = factor * problem.flat(problem.gradients[0])
        assert (gradients.norm() > CLIP_NORM) == (factor == 1.0)
        holder = torch.nn.Parameter(torch.zeros(problem.layout.numel))
        holder.grad = gradients.clone()
        torch.nn.utils.clip_grad_norm_([holder], CLIP_NORM)
        other.step(expected, (torch.zeros(0), holder.grad), torch.tensor(0.5))
        rule.step(weights, (torch.zeros(0), gradients), torch.tensor(0.5))
    torch.testing.assert_close(weights, expected, rtol=2e-5, atol=2e-6)


@every_rule
@either_way
def test_a_limit_above_the_norm_changes_no_bit(problem: Any, kind: type[Any], fused: bool) -> None:
    gradients = problem.flat(problem.gradients[0])
    results = []
    for clip_norm in (1.001 * float(gradients.norm()), 0.0, 0.5 * float(gradients.norm())):
        weights = problem.flat(problem.weights)
        rule = build_rule(kind, problem.layout, fused, clip_norm)
        rule.step(weights, (torch.zeros(0), gradients.clone()), torch.tensor(0.5))
        results.append((weights, *rule.state().values()))
    above, never, below = results
    assert all(map(torch.equal, above, never))
    assert not all(map(torch.equal, below, never))


LAYOUT = plan_layout([ParameterSpec("a", (2, 3), True, True), ParameterSpec("b", (4,), False, False)])
FILLED = [slot for layer in LAYOUT.slots for slot in range(layer.offset, layer.end)]


@given(st.lists(st.floats(-100, 100, width=32), min_size=10, max_size=10), st.floats(0.0625, 1024, width=32))
def test_gradients_keep_their_direction_and_have_at_most_the_norm_asked_for(values: list[float], limit: float) -> None:
    """Without momentum and decay, a step of rate 1 from zero weights is the gradient itself."""
    gradients, weights = torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)
    gradients[FILLED] = torch.tensor(values)
    rule = Sgd(LAYOUT, momentum=0.0, weight_decay=0.0, clip_norm=limit)
    rule.step(weights, (torch.zeros(0), gradients.clone()), torch.tensor(1.0))
    norm = gradients.double().norm()
    expected = gradients.double() * min(1.0, limit / max(float(norm), 1e-30))
    torch.testing.assert_close(-weights.double(), expected, rtol=1e-5, atol=1e-7)
    assert float(weights.double().norm()) <= limit * (1 + 1e-6)


@either_way
def test_gradients_of_zero_stay_zero(fused: bool) -> None:
    weights = torch.zeros(LAYOUT.numel)
    rule = AdamW(LAYOUT, clip_norm=1.0, fused=fused)
    rule.step(weights, (torch.zeros(0), torch.zeros(LAYOUT.numel)), torch.tensor(1.0))
    assert not weights.any()
