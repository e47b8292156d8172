"""The update rules of their papers in FP64, one parameter at a time: an oracle that shares no code with Lockstep."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.layout import ParameterSpec

Array = npt.NDArray[np.float64]


def run_sgd(
    w: Any,
    gradients: Sequence[Any],
    rates: Sequence[float],
    spec: ParameterSpec,
    *,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
) -> Any:
    v = 0.0
    for g, lr in zip(gradients, rates, strict=True):
        d = g + weight_decay * w if spec.decay else g
        v = momentum * v + d
        w = w - lr * (d + momentum * v if nesterov else v)
    return w


def run_lars(
    w: Any,
    gradients: Sequence[Any],
    rates: Sequence[float],
    spec: ParameterSpec,
    *,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    epsilon: float = 0.0,
) -> Any:
    wd = weight_decay if spec.decay else 0.0
    v = 0.0
    for g, lr in zip(gradients, rates, strict=True):
        w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
        trust = 1.0
        if spec.adapt and w_norm > 0 and g_norm > 0:
            trust = trust_coefficient * w_norm / (g_norm + wd * w_norm + epsilon)
        v = momentum * v + lr * trust * (g + wd * w)
        w = w - v
    return w


def clip(gradients: Sequence[Any], norm: float) -> list[Any]:
    """One step's gradients, of all parameters, scaled together to a norm of at most `norm`."""
    total = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    return [gradient * (norm / total if total > norm else 1.0) for gradient in gradients]


def run_adamw(
    w: Any,
    gradients: Sequence[Any],
    rates: Sequence[float],
    spec: ParameterSpec,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> Any:
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        w = w - lr * (m_hat / (np.sqrt(v_hat) + epsilon) + (weight_decay * w if spec.decay else 0.0))
    return w


def run_lamb(
    w: Any,
    gradients: Sequence[Any],
    rates: Sequence[float],
    spec: ParameterSpec,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> Any:
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        r = m_hat / (np.sqrt(v_hat) + epsilon) + (weight_decay * w if spec.decay else 0.0)
        w_norm, r_norm = np.linalg.norm(w), np.linalg.norm(r)
        trust = w_norm / r_norm if spec.adapt and w_norm > 0 and r_norm > 0 else 1.0
        w = w - lr * trust * r
    return w
