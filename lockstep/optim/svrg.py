"""SVRG (Johnson & Zhang 2013), in the form that HALP extends: gradients → weights, step 9 of the walk.

At an anchor w̃ the full gradient is taken, and the steps that follow move only an offset z from it:

g̃ = ∇f(w̃);  z ← 0;  then at every step  v = ∇fᵢ(w̃ + z) − ∇fᵢ(w̃) + g̃;  z ← z − lr·v;  at the next anchor  w̃ ← w̃ + z.

Weight decay is a term of f, wd/2·‖w‖², so that g̃ has wd·w̃ and the difference wd·z; its own part of v is exact. What the
reducer sums is the difference over the samples (`engine/anchored.py`), and what an anchor adds up comes from
`full_gradient.py`.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lockstep.layout import Layout, Slot
from lockstep.optim.loss_scale import LossScale
from lockstep.optim.rule import Norms, Rule, Slots

if TYPE_CHECKING:
    from lockstep.kernels.offset_update import OffsetUpdate


class Svrg(Rule):
    """Stochastic gradients less their noise at an anchor; z in FP32."""

    has_anchor: ClassVar[bool] = True

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        weight_decay: float = 1e-4,
        fused: bool | None = None,
    ) -> None:
        super().__init__(layout, device, ("anchor", "full_gradient", "offset"), clip_norm=0.0, fused=fused)
        self.weight_decay = weight_decay
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # chance is drawn by it: exact in any run
        self._offset_kernel: OffsetUpdate | None = None

    @property
    def anchor(self) -> Tensor:
        """w̃."""
        return self._state["anchor"]

    @property
    def full_gradient(self) -> Tensor:
        """g̃, its weight decay included."""
        return self._state["full_gradient"]

    @property
    def offset(self) -> Tensor:
        """z as it is stored."""
        return self._state["offset"]

    @torch.no_grad()
    def begin(self, weights: Tensor) -> None:
        """Trials come before the first anchor, and all zeros would run faster than a network."""
        self.anchor.copy_(weights)

    @torch.no_grad()
    def recentre(self, weights: Tensor, mean_gradient: Tensor) -> None:
        """w̃ ← w̃ + z, which the weights are; z ← 0; g̃ ← the mean over all samples at w̃, in FP64, and its decay."""
        self.anchor.copy_(weights)
        self.offset.zero_()
        full = mean_gradient.clone()
        self.segments.add_decay(self.segments.split(full), self.segments.split(weights.double()), self.weight_decay)
        self.full_gradient.copy_(full)
        self.refresh()

    @torch.no_grad()
    def show_anchor(self, weights: Tensor) -> None:
        """Let the weights be w̃."""
        weights.copy_(self.anchor)

    @torch.no_grad()
    def show_iterate(self, weights: Tensor) -> None:
        """Let the weights be w̃ + z."""
        torch.add(self.anchor, self._read(self.offset), out=weights)

    def _step_fused(
        self,
        weights: Tensor,
        gradients: tuple[Tensor, Tensor],
        lr: Tensor,
        half_weights: Tensor | None,
        scale: LossScale | None,
    ) -> None:
        """One move of z; `gradients` are the summed differences ∇fᵢ(w̃ + z) − ∇fᵢ(w̃) without decay, all FP32."""
        kernel = self._offset_kernel or self._fuse_offset()
        kernel.step(weights, gradients[1], self.anchor, self.full_gradient, self.offset, lr, self.count)
        self.count += 1

    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        split = self.segments.split
        arrays = zip(
            self.layout.slots,
            weights,
            gradients,
            split(self.anchor),
            split(self.full_gradient),
            split(self.offset),
            strict=True,
        )
        for slot, w, g, anchor, full, offset in arrays:
            z = self._read(offset)
            g += (self.weight_decay if slot.decay else 0.0) * z
            g += full  # which makes it v
            self._move(offset, z, g, lr, slot)
            torch.add(anchor, self._read(offset), out=w)
        if self.measures:
            self._seen = self.segments.norms(weights), self.segments.norms(gradients)

    def _read(self, offset: Tensor) -> Tensor:
        """z in FP32."""
        return offset

    def _move(self, offset: Tensor, z: Tensor, v: Tensor, lr: Tensor, slot: Slot) -> None:
        offset.copy_(z - lr * v)

    def _look(self, weights: Tensor, gradients: Slots) -> None:
        """Nothing yet: the gradients of this rule are v, which the update makes."""

    @torch.no_grad()
    def read_norms(self, weights: Tensor, gradients: tuple[Tensor, Tensor]) -> Norms | None:
        """The norms of w and v. The kernel keeps no v: that is made again, with the decay of the z that it led to."""
        if self._offset_kernel is not None and self._seen is None:
            v = gradients[1] + self.full_gradient
            self.segments.add_decay(
                self.segments.split(v), self.segments.split(self._read(self.offset)), self.weight_decay
            )
            self._seen = tuple(self.segments.norms(self.segments.split(array)) for array in (weights, v))  # type: ignore[assignment]
        return super().read_norms(weights, gradients)

    def constants(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay}

    def _fuse_offset(self) -> "OffsetUpdate":
        from lockstep.kernels.offset_update import OffsetUpdate

        self._offset_kernel = OffsetUpdate(self.layout, self.count.device, **self.constants())
        return self._offset_kernel
