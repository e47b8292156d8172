"""Muon (Jordan et al. 2024): momentum with all its singular values made equal; gradients → weights, step 9 of the walk.

v ← m·v + g;  d = g + m·v;  O = U·Vᵀ where d = U·S·Vᵀ;  r = 0.2·√max(rows, columns)·O + wd·w;  w ← w − lr·r.

LARS gives a layer's update a length, whatever its gradient's was. Muon gives one to every direction of it: a few strong
directions, which most samples agree on, no longer keep the weak ones waiting. That is of use where steps are few and
gradients have little noise, at large batch. A slot is the matrix of its first dimension and all others; a vector has
one direction, so its update is its momentum brought to one length. 0.2·√max(…) makes a weight's update as large as
AdamW's usually is, in layers of any shape (Liu et al. 2025, arXiv 2502.16982).

O is found without singular values, by five steps of X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ, which bring all but the
smallest into 0.7 to 1.2 and leave U and V as they are. Products alone, so a GPU does them in BF16. Slots of one shape
go together.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.layout import Layout, Slot
from lockstep.optim.rule import Rule, Slots

A, B, C = 3.4445, -4.7750, 2.0315  # the steepest at zero that stay near one
STEPS = 5
USUAL_SIZE = 0.2  # of AdamW's update, in learning rates
LEAST_NORM = 1e-30  # of a matrix that is divided by it: zeros stay zeros


class Muon(Rule):
    """Orthogonalised momentum."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        clip_norm: float = 0.0,
    ) -> None:
        # What takes the time are products of matrices, which no kernel of ours would do better.
        super().__init__(layout, device, ("momentum",), clip_norm, fused=False)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._decay = torch.full((), weight_decay, device=device)  # where a recorded step reads it
        shapes = [find_shape(slot) for slot in layout.slots]
        self._alike = {
            shape: [number for number, own in enumerate(shapes) if own == shape] for shape in dict.fromkeys(shapes)
        }

    def constants(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "weight_decay": self.weight_decay}

    def begin_anew(self, weight_decay: float) -> None:
        super().begin_anew(weight_decay)
        self._decay.fill_(weight_decay)

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        momentum = self.segments.split(self._state["momentum"])
        torch._foreach_mul_(momentum, self.momentum)
        torch._foreach_add_(momentum, gradients)
        torch._foreach_add_(gradients, momentum, alpha=self.momentum)  # d in place of the gradients
        for (rows, columns), numbers in self._alike.items():
            found = orthogonalize(torch.stack([gradients[number].view(rows, columns) for number in numbers]))
            found *= USUAL_SIZE * math.sqrt(max(rows, columns))
            for number, direction in zip(numbers, found, strict=True):
                gradients[number].view(rows, columns).copy_(direction)
        decaying = self.segments.where_decay(weights, True)
        if decaying:
            decays = torch._foreach_mul(decaying, self._decay)
            torch._foreach_add_(self.segments.where_decay(gradients, True), decays)
        self.segments.scale(gradients, self.segments.rates(lr))
        torch._foreach_sub_(weights, gradients)


def find_shape(slot: Slot) -> tuple[int, int]:
    """A slot as a matrix: outputs × whatever each is a sum over; a vector is a single row."""
    return (slot.shape[0], slot.numel // slot.shape[0]) if len(slot.shape) > 1 and slot.shape[0] else (1, slot.numel)


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest matrices whose singular values are all about one, N × rows × columns; of zeros, zeros."""
    found: Tensor = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    rows, columns = matrices.shape[1:]
    if min(rows, columns) == 1:  # a single direction, whose singular value is its length
        return found
    if matrices.is_cuda:
        found = found.bfloat16()
    if rows > columns:
        found = found.mT
    for _ in range(STEPS):
        square = found @ found.mT
        found = A * found + (B * square + C * square @ square) @ found
    return (found.mT if rows > columns else found).to(matrices.dtype)
