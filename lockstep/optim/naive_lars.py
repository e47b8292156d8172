"""LARS in FP16 throughout, to show what FP32 masters are for (Jia et al. 2018, section 3.1); nobody should train by it.

Weights, momentum, norms and the update itself are FP16: small gradients vanish when the loss scale is taken off, norms
lose digits or overflow, and what a step adds to a weight is lost where it is less than the weight's last digit.
"""

import torch
from torch import Tensor

from lockstep.optim.lars import Lars
from lockstep.optim.rule import Slots


class NaiveLars(Lars):
    """The formulas of `Lars`, every number between them rounded to FP16; the arrays stay FP32 and hold FP16 numbers."""

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        slots = self.segments
        w, g = ([values.half() for values in each] for each in (weights, gradients))
        w_norm, g_norm = (torch.stack([(values * values).sum().sqrt() for values in each]) for each in (w, g))
        self._trust = self._ratios(w_norm, g_norm).float()
        rates = (slots.rates(lr).half() * self._trust.half()).unbind()
        momentum = slots.split(self._state["momentum"])
        for number, (slot, rate) in enumerate(zip(self.layout.slots, rates, strict=True)):
            update = g[number] + self.weight_decay * w[number] if slot.decay else g[number]
            v = self.momentum * momentum[number].half() + rate * update
            momentum[number].copy_(v)
            weights[number].copy_(w[number] - v)
