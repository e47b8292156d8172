"""LARS against the equations of its paper, parameter by parameter in FP64."""

from typing import Any

import numpy as np
import pytest

from lockstep.layout import ParameterSpec
from lockstep.optim.lars import Lars


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("weight_decay", "epsilon"), [(0.05, 0.0), (0.0, 0.0), (0.05, 0.5)])
def test_it_follows_the_equations(
    problem: Any, learning_rates: list[float], weight_decay: float, epsilon: float, fused: bool
) -> None:
    eta, m = 0.02, 0.8

    def reference(w: Any, gradients: list[Any], spec: ParameterSpec) -> Any:
        wd = weight_decay if spec.decay else 0.0
        v = 0.0
        for g, lr in zip(gradients, learning_rates, strict=True):
            w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
            trust = 1.0
            if spec.adapt and w_norm > 0 and g_norm > 0:
                trust = eta * w_norm / (g_norm + wd * w_norm + epsilon)
            v = m * v + lr * trust * (g + wd * w)
            w = w - v
        return w

    rule = Lars(
        problem.layout, momentum=m, weight_decay=weight_decay, trust_coefficient=eta, epsilon=epsilon, fused=fused
    )
    problem.assert_follows(rule, reference)
