"""SGD with momentum, the learning rate outside it (Goyal et al. 2017, eq. 9): gradients → weights, step 9 of the walk.

d = g + wd·w;  v ← m·v + d;  w ← w − lr·v, or with Nesterov's momentum w ← w − lr·(d + m·v).
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.layout import Layout
from lockstep.optim.rule import Rule, Slots


class Sgd(Rule):
    """Stochastic gradient descent with momentum."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 1e-4,
        clip_norm: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        super().__init__(layout, device, ("momentum",), clip_norm, fused)
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay

    def constants(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov, "weight_decay": self.weight_decay}

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        """In PyTorch's own one-pass kernel: half the time of three array operations."""
        momentum = self.segments.split(self._state["momentum"])
        for decay, rate, numbers in self.segments.groups:
            w, g, v = ([array[number] for number in numbers] for array in (weights, gradients, momentum))
            torch._fused_sgd_(
                w,
                g,
                v if self.momentum else [],  # without momentum PyTorch's kernel takes no place for it
                weight_decay=self.weight_decay if decay else 0.0,
                momentum=self.momentum,
                lr=lr if rate == 1.0 else lr * rate,
                dampening=0.0,
                nesterov=self.nesterov,
                maximize=False,
                is_first_step=False,  # v starts at zero, so the first step needs no rule of its own
            )
