"""AdamW (Loshchilov & Hutter 2019, algorithm 2): decay apart from the moments; gradients → weights, step 9 of the walk.

m ← β₁·m + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²;  m̂ = m/(1 − β₁ᵗ);  v̂ = v/(1 − β₂ᵗ);
r = m̂/(√v̂ + ε) + wd·w;  w ← w − lr·r.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.layout import Layout
from lockstep.optim.rule import Rule, Slots


class AdamW(Rule):
    """Adaptive moments with decoupled weight decay."""

    usual_epsilon: ClassVar[float] = 1e-8

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float | None = None,
        weight_decay: float = 1e-4,
        clip_norm: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        super().__init__(layout, device, ("first_moment", "second_moment"), clip_norm, fused)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = (
            self.usual_epsilon if epsilon is None else epsilon
        )  # above zero: between the slots r is 0/(0 + ε)
        self.weight_decay = weight_decay

    def constants(self) -> dict[str, Any]:
        return {
            "beta1": self.beta1,
            "beta2": self.beta2,
            "epsilon": self.epsilon,
            "weight_decay": self.weight_decay,
        }

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        update = self._direct(weights, gradients)
        self.segments.scale(update, self.segments.rates(lr))
        torch._foreach_sub_(weights, update)

    def _direct(self, weights: Slots, gradients: Slots) -> Slots:
        """Move the moments on; r in place of the gradients."""
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
        slots.add_decay(gradients, weights, self.weight_decay)
        return gradients
