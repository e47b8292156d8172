"""Learning-rate factors of slots, in every rule, fused and plain, against the equations at each slot's own rates."""

import numpy as np
import pytest
import torch

from lockstep.kernels.flat_update import Tiling
from lockstep.layout import Layout, plan_layout
from lockstep.optim.loss_scale import LossScale
from lockstep.optim.storage import load_named, named_arrays
from tests.kernels.test_flat_update import (
    BLOCK,
    RATES,
    RULES,
    SPECS,
    Run,
    draw_gradients,
    draw_weights,
    every_device,
    every_rule,
)

FACTORS = {spec.name: 0.75**place for place, spec in enumerate(SPECS)} | {"gamma": 1.0}
DTYPE = torch.float16


def take_steps(name: str, layout: Layout, *, fused: bool, scaled: bool, device: str) -> Run:
    kind, _, settings = RULES[name]
    rule = kind(layout, device, fused=fused, **settings)  # type: ignore[call-arg]
    if fused:
        rule.fuse(Tiling(block=BLOCK))
    weights = torch.zeros(layout.numel)
    load_named(weights, layout, draw_weights())
    weights = weights.to(device)
    scale = LossScale(layout, device, initial=1024.0) if scaled else None
    run = Run(layout, rule, weights, weights[: layout.split].to(DTYPE), scale)
    for step, lr in enumerate(RATES):
        run.step(draw_gradients(step, DTYPE), lr)
    return run


@every_device
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@every_rule
def test_every_slot_moves_at_its_own_rate(name: str, fused: bool, device: str) -> None:
    layout = plan_layout([spec._replace(rate=FACTORS[spec.name]) for spec in SPECS])
    run = take_steps(name, layout, fused=fused, scaled=name in ("sgd", "lars"), device=device)
    found, start = named_arrays(run.weights.cpu(), layout), draw_weights()
    _, reference, settings = RULES[name]
    for spec in SPECS:
        own = [draw_gradients(step, DTYPE)[spec.name].double().numpy() for step in range(len(RATES))]
        rates = [rate * FACTORS[spec.name] for rate in RATES]
        expected = reference(start[spec.name].double().numpy(), own, rates, spec, **settings)
        loose = 5 if device == "cuda" else 1
        np.testing.assert_allclose(
            found[spec.name].numpy(), expected, rtol=loose * 2e-5, atol=loose * 1e-6, err_msg=spec.name
        )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_factors_of_one_change_no_bit(name: str) -> None:
    """The only slot with a factor is one whose weights stay where they are."""
    plain = take_steps(name, plan_layout(SPECS), fused=True, scaled=False, device="cpu")
    specs = [spec._replace(decay=False, rate=0.5 if spec.name == "zero_gradient" else 1.0) for spec in SPECS]
    same = [spec._replace(decay=False) for spec in SPECS]
    factors, none = (
        take_steps(name, plan_layout(each), fused=True, scaled=False, device="cpu") for each in (specs, same)
    )
    assert torch.equal(factors.weights, none.weights)
    assert not torch.equal(plain.weights, none.weights)  # which decays
