"""LAMB against the equations of its paper, parameter by parameter in FP64."""

from typing import Any

import pytest

from lockstep.layout import ParameterSpec
from lockstep.optim.lamb import Lamb
from tests.optim.equations import run_lamb


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weight_decay", [0.05, 0.0])
def test_it_follows_the_equations(problem: Any, learning_rates: list[float], weight_decay: float, fused: bool) -> None:
    settings = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3, "weight_decay": weight_decay}

    def reference(w: Any, gradients: list[Any], spec: ParameterSpec) -> Any:
        return run_lamb(w, gradients, learning_rates, spec, **settings)

    problem.assert_follows(Lamb(problem.layout, fused=fused, **settings), reference)
