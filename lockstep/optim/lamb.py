"""LAMB (You et al. 2020, algorithm 2): Adam's direction at a rate ∝ ‖w‖; gradients → weights, step 9 of the walk.

m ← β₁·m + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²;  m̂ = m/(1 − β₁ᵗ);  v̂ = v/(1 − β₂ᵗ);
r = m̂/(√v̂ + ε) + wd·w;  w ← w − lr·(‖w‖/‖r‖)·r.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.layout import Layout
from lockstep.optim.rule import Rule, Slots


class Lamb(Rule):
    """Layer-wise adaptive moments; slots that do not adapt follow AdamW."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 1e-4,
        fused: bool | None = None,
    ) -> None:
        super().__init__(layout, device, ("first_moment", "second_moment"), fused)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon  # above zero: between the slots r is 0/(0 + ε)
        self.weight_decay = weight_decay

    def constants(self) -> dict[str, Any]:
        return {
            "beta1": self.beta1,
            "beta2": self.beta2,
            "epsilon": self.epsilon,
            "weight_decay": self.weight_decay,
        }

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        slots = self.segments
        first, second = (slots.split(self._state[name]) for name in ("first_moment", "second_moment"))
        t = self.count.double() + 1  # in FP64: in FP32, 1 − β₂ᵗ would lose half its digits to cancellation
        m_correction = 1.0 - self.beta1**t
        v_correction = 1.0 - self.beta2**t
        for g, m, v in zip(gradients, first, second, strict=True):
            m.lerp_(g, 1.0 - self.beta1)
            v.mul_(self.beta2).addcmul_(g, g, value=1.0 - self.beta2)
            r = torch.sqrt(v, out=g).div_(v_correction.sqrt()).add_(self.epsilon)
            torch.div(m, r, out=r).div_(m_correction)
        update = gradients
        slots.add_decay(update, weights, self.weight_decay)

        w_norm, r_norm = slots.norms(weights), slots.norms(update)
        self._trust = trust = slots.trust(w_norm / r_norm, w_norm, r_norm)
        slots.scale(update, lr * trust)
        torch._foreach_sub_(weights, update)

    def _read_trust(self, w_norm: Tensor, g_norm: Tensor, second_norm: Tensor) -> Tensor:
        return self.segments.trust(w_norm / second_norm, w_norm, second_norm)
