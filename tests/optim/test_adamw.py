"""AdamW against the equations of its paper in FP64, against torch.optim, and as the LAMB of slots that do not adapt."""

from typing import Any

import pytest
import torch

from lockstep.layout import ParameterSpec, plan_layout
from lockstep.optim.adamw import AdamW
from lockstep.optim.lamb import Lamb
from lockstep.optim.storage import named_arrays
from tests.optim.equations import run_adamw


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weight_decay", [0.05, 0.0])
def test_it_follows_the_equations(problem: Any, learning_rates: list[float], weight_decay: float, fused: bool) -> None:
    settings = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3, "weight_decay": weight_decay}

    def reference(w: Any, gradients: list[Any], spec: ParameterSpec) -> Any:
        return run_adamw(w, gradients, learning_rates, spec, **settings)

    problem.assert_follows(AdamW(problem.layout, fused=fused, **settings), reference)


@pytest.mark.parametrize("fused", [False, True])
def test_it_agrees_with_torch(problem: Any, learning_rates: list[float], fused: bool) -> None:
    parameters = {name: torch.nn.Parameter(torch.tensor(a).float()) for name, a in problem.weights.items()}
    decays = {slot.name: slot.decay for slot in problem.layout.slots}
    groups = [{"params": [p], "weight_decay": 0.05 if decays[name] else 0.0} for name, p in parameters.items()]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.95), foreach=False)
    for gradients, lr in zip(problem.gradients, learning_rates, strict=True):
        for group, (name, parameter) in zip(optimizer.param_groups, parameters.items(), strict=True):
            parameter.grad = torch.tensor(gradients[name]).float()
            group["lr"] = lr
        optimizer.step()

    rule = AdamW(problem.layout, beta1=0.8, beta2=0.95, weight_decay=0.05, fused=fused)
    found = named_arrays(problem.run(rule), problem.layout)
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_lamb_without_a_trust_ratio_is_adamw(problem: Any, fused: bool) -> None:
    specs = [ParameterSpec(slot.name, slot.shape, slot.decay, adapt=False) for slot in problem.layout.slots]
    layout = plan_layout(reversed(specs))
    assert layout.numel == problem.layout.numel
    weights = [problem.run(kind(layout, epsilon=1e-6, fused=fused)) for kind in (AdamW, Lamb)]
    assert torch.equal(*weights)
