"""The full gradient as a rule: every "step" adds its gradients up and moves no weight; an anchor's pass, as steps.

So a pass for an anchor is taken by the step itself, launched or recorded, alone or among others, and differs from one
in nothing but this. The sum is in FP64: near an optimum the gradients of batches nearly cancel, and what is left of
them is what SVRG corrects by. `lr` is the number of samples that a step's mean is over.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.layout import Layout
from lockstep.optim.loss_scale import LossScale
from lockstep.optim.rule import Rule, Slots


class FullGradient(Rule):
    """Σ over steps of samples × mean gradient."""

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        super().__init__(layout, device, (), clip_norm=0.0, fused=True)
        self.total = torch.zeros(layout.numel, dtype=torch.float64, device=device)

    def _step_fused(
        self,
        weights: Tensor,
        gradients: tuple[Tensor, Tensor],
        lr: Tensor,
        half_weights: Tensor | None,
        scale: LossScale | None,
    ) -> None:
        """Add the gradients of a step, all FP32 and one array: a launch or two without a kernel of its own."""
        self.total += gradients[1].double() * lr

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        for total, gradient in zip(self.segments.split(self.total), gradients, strict=True):
            total += gradient.double() * lr

    def constants(self) -> dict[str, Any]:
        return {}
