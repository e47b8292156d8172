"""LARS against the equations of its paper, parameter by parameter in FP64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.layout import ParameterSpec, plan_layout
from lockstep.optim.lars import Lars
from lockstep.optim.naive_lars import NaiveLars
from tests.optim.equations import run_lars


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("weight_decay", "epsilon"), [(0.05, 0.0), (0.0, 0.0), (0.05, 0.5)])
def test_it_follows_the_equations(
    problem: Any, learning_rates: list[float], weight_decay: float, epsilon: float, fused: bool
) -> None:
    settings = {"momentum": 0.8, "weight_decay": weight_decay, "trust_coefficient": 0.02, "epsilon": epsilon}

    def reference(w: Any, gradients: list[Any], spec: ParameterSpec) -> Any:
        return run_lars(w, gradients, learning_rates, spec, **settings)

    problem.assert_follows(Lars(problem.layout, fused=fused, **settings), reference)


SIDE, RATE, STEPS = 300, 0.01, 60  # Σw² = 90,000 is beyond FP16; the rate is that of a warm-up
TARGET = 1.5


def take_naive_step(w: Tensor, v: Tensor, norms_in: torch.dtype) -> Tensor:
    """LARS as it would be written without masters: everything in half, the norms in `norms_in`."""
    g = w - TARGET
    w_norm, g_norm = ((x.to(norms_in) ** 2).sum(dtype=norms_in).sqrt() for x in (w, g))
    v.mul_(0.9).add_((RATE * 0.001 * w_norm / g_norm).half() * g)
    return w - v


def test_naive_fp16_norms_overflow_and_give_no_rate() -> None:
    w = take_naive_step(torch.ones(SIDE, SIDE).half(), torch.zeros(SIDE, SIDE).half(), torch.float16)
    assert not w.isfinite().any()


def test_a_naive_fp16_update_stands_still_where_masters_move() -> None:
    """The paper's reason for FP32 masters: a step is smaller than half the distance between FP16 numbers near 1."""
    naive, v = torch.ones(SIDE, SIDE).half(), torch.zeros(SIDE, SIDE).half()
    layout = plan_layout([ParameterSpec("w", (SIDE, SIDE), decay=False, adapt=True, half=True)])
    master = torch.zeros(layout.numel)
    master[: SIDE * SIDE] = 1.0
    half = master.half()
    rule = Lars(layout, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001)
    for _ in range(STEPS):
        naive = take_naive_step(naive, v, torch.float32)
        gradient = half - TARGET
        gradient[SIDE * SIDE :] = 0
        rule.step(master, (gradient, torch.zeros(0)), torch.tensor(RATE), half)
    assert (naive == 1).all()
    # Momentum makes every step ten times λ·g, where λ‖g‖ = 1e-5 ‖w‖: 0.006 in 60 steps, less the first few.
    assert 1.004 < float(half[0]) < 1.006


def test_a_rule_that_is_naive_on_purpose_loses_what_masters_keep() -> None:
    """Steps of a five-thousandth of a weight are below FP16's last digit: masters gather them, FP16 weights stay."""
    moved = []
    for kind in (Lars, NaiveLars):
        layout = plan_layout([ParameterSpec("w", (100, 100), decay=False, adapt=True, half=True)])
        rule, w = kind(layout, weight_decay=0.0, momentum=0.0, trust_coefficient=1.0, fused=False), torch.ones(10_000)
        for _ in range(STEPS):
            rule.step(w, [w - TARGET], torch.tensor(2e-4))
        moved.append((w - 1).mean().item())
    assert moved == [pytest.approx(STEPS * 2e-4, rel=0.01), 0.0]


def test_a_rule_that_is_naive_on_purpose_follows_the_formulas_where_digits_suffice() -> None:
    results = []
    for kind in (Lars, NaiveLars):
        layout = plan_layout([ParameterSpec("w", (8, 8), decay=True, adapt=True, half=True)])
        rule, w = kind(layout, weight_decay=0.05, momentum=0.5, trust_coefficient=0.1, fused=False), torch.ones(64)
        for _ in range(3):
            rule.step(w, [w - TARGET], torch.tensor(0.5))
        results.append(w)
    torch.testing.assert_close(results[1], results[0], rtol=5e-3, atol=0)
    assert torch.equal(results[1], results[1].half().float())
