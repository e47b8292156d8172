"""LAMB (You et al. 2020, algorithm 2): AdamW's direction at a rate ∝ ‖w‖; gradients → weights, step 9 of the walk.

r = m̂/(√v̂ + ε) + wd·w as in `adamw.py`;  w ← w − lr·(‖w‖/‖r‖)·r.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lockstep.optim.adamw import AdamW
from lockstep.optim.rule import Slots


class Lamb(AdamW):
    """Layer-wise adaptive moments; slots that do not adapt follow AdamW."""

    usual_epsilon: ClassVar[float] = 1e-6

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        slots, update = self.segments, self._direct(weights, gradients)
        w_norm, r_norm = slots.norms(weights), slots.norms(update)
        self._trust = trust = slots.trust(w_norm / r_norm, w_norm, r_norm)
        slots.scale(update, slots.rates(lr) * trust)
        torch._foreach_sub_(weights, update)

    def _read_trust(self, w_norm: Tensor, g_norm: Tensor, second_norm: Tensor) -> Tensor:
        return self.segments.trust(w_norm / second_norm, w_norm, second_norm)
