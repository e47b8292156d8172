"""LARS (You et al. 2017, algorithm 1): every slot at its own rate, ∝ ‖w‖/‖g‖; gradients → weights, step 9 of the walk.

λ = η·‖w‖ / (‖g‖ + wd·‖w‖ + ε);  v ← m·v + lr·λ·(g + wd·w);  w ← w − v.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.layout import Layout
from lockstep.optim.rule import Rule, Slots


class Lars(Rule):
    """Layer-wise adaptive rate scaling; slots that do not adapt follow momentum SGD with the rate inside."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        clip_norm: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        super().__init__(layout, device, ("momentum",), clip_norm, fused)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon

    def constants(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
        }

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        slots = self.segments
        w_norm, g_norm = slots.norms(weights), slots.norms(gradients)
        self._trust = trust = self._ratios(w_norm, g_norm)
        slots.add_decay(gradients, weights, self.weight_decay)
        slots.scale(gradients, slots.rates(lr) * trust)
        momentum = slots.split(self._state["momentum"])
        for update, v in zip(gradients, momentum, strict=True):
            torch.add(update, v, alpha=self.momentum, out=v)
        torch._foreach_sub_(weights, momentum)

    def _ratios(self, w_norm: Tensor, g_norm: Tensor) -> Tensor:
        decayed_norm = g_norm + self.weight_decay * self.segments.decay * w_norm
        ratios = self.trust_coefficient * w_norm / (decayed_norm + self.epsilon)
        return self.segments.trust(ratios, w_norm, g_norm)

    def _read_trust(self, w_norm: Tensor, g_norm: Tensor, second_norm: Tensor) -> Tensor:
        return self._ratios(w_norm, g_norm)
