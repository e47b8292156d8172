"""SGD with momentum against its equations and against torch.optim."""

from typing import Any

import pytest
import torch

from lockstep.layout import ParameterSpec
from lockstep.optim.sgd import Sgd
from lockstep.optim.storage import named_arrays
from tests.optim.equations import run_sgd

SETTINGS: dict[str, Any] = {"momentum": 0.8, "weight_decay": 0.05}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_it_follows_the_equations(problem: Any, learning_rates: list[float], nesterov: bool, fused: bool) -> None:
    def reference(w: Any, gradients: list[Any], spec: ParameterSpec) -> Any:
        return run_sgd(w, gradients, learning_rates, spec, nesterov=nesterov, **SETTINGS)

    problem.assert_follows(Sgd(problem.layout, nesterov=nesterov, fused=fused, **SETTINGS), reference)


@pytest.mark.parametrize("fused", [False, True])
def test_it_needs_no_momentum(problem: Any, learning_rates: list[float], fused: bool) -> None:
    def reference(w: Any, gradients: list[Any], spec: ParameterSpec) -> Any:
        return run_sgd(w, gradients, learning_rates, spec, momentum=0.0, weight_decay=0.05)

    problem.assert_follows(Sgd(problem.layout, momentum=0.0, weight_decay=0.05, fused=fused), reference)


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_agrees_with_torch(problem: Any, learning_rates: list[float], nesterov: bool) -> None:
    parameters = {name: torch.nn.Parameter(torch.tensor(a).float()) for name, a in problem.weights.items()}
    decays = {slot.name: slot.decay for slot in problem.layout.slots}
    groups = [{"params": [p], "weight_decay": 0.05 if decays[name] else 0.0} for name, p in parameters.items()]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.8, nesterov=nesterov, foreach=False)
    for gradients, lr in zip(problem.gradients, learning_rates, strict=True):
        for group, (name, parameter) in zip(optimizer.param_groups, parameters.items(), strict=True):
            parameter.grad = torch.tensor(gradients[name]).float()
            group["lr"] = lr
        optimizer.step()

    found = named_arrays(problem.run(Sgd(problem.layout, nesterov=nesterov, **SETTINGS)), problem.layout)
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_rule_that_begins_anew_decays_by_the_new_number(
    problem: Any, learning_rates: list[float], fused: bool
) -> None:
    def reference(w: Any, gradients: list[Any], spec: ParameterSpec) -> Any:
        return run_sgd(w, gradients, learning_rates, spec, momentum=0.8, weight_decay=0.3)

    rule = Sgd(problem.layout, momentum=0.8, weight_decay=0.05, fused=fused)
    problem.run(rule)
    for array in (*rule.state().values(), rule.count):
        array.zero_()
    rule.begin_anew(0.3)
    problem.assert_follows(rule, reference)
