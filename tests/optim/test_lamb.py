"""LAMB against the equations of its paper, parameter by parameter in FP64."""

from typing import Any

import numpy as np
import pytest

from lockstep.layout import ParameterSpec
from lockstep.optim.lamb import Lamb


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weight_decay", [0.05, 0.0])
def test_it_follows_the_equations(problem: Any, learning_rates: list[float], weight_decay: float, fused: bool) -> None:
    beta1, beta2, epsilon = 0.8, 0.95, 1e-3

    def reference(w: Any, gradients: list[Any], spec: ParameterSpec) -> Any:
        m = v = 0.0
        for t, (g, lr) in enumerate(zip(gradients, learning_rates, strict=True), start=1):
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
            r = m_hat / (np.sqrt(v_hat) + epsilon) + (weight_decay * w if spec.decay else 0.0)
            w_norm, r_norm = np.linalg.norm(w), np.linalg.norm(r)
            trust = w_norm / r_norm if spec.adapt and w_norm > 0 and r_norm > 0 else 1.0
            w = w - lr * trust * r
        return w

    rule = Lamb(problem.layout, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay, fused=fused)
    problem.assert_follows(rule, reference)
