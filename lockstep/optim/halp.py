"""HALP (De Sa et al. 2018, algorithm 3): SVRG whose offset is a few bits wide; gradients → weights, step 9 of the walk.

*Bit centring*: z is whole numbers of b bits times a scale that shrinks with the norm of the full gradient, so that the
few bits lie where the optimum can still be, as f with ‖∇f(w̃)‖ = ‖g̃‖ and strong convexity μ has it within ‖g̃‖/μ.

g̃ = ∇f(w̃);  s = ‖g̃‖ / (μ·(2^(b−1) − 1));  z ← 0;
then at every step  v = ∇fᵢ(w̃ + z) − ∇fᵢ(w̃) + g̃;  z ← Q(z − lr·v);  at the next anchor  w̃ ← w̃ + z.

Q rounds to the multiples of s from −2^(b−1)·s to (2^(b−1) − 1)·s, unbiased within and saturating beyond. The last z is
taken over, not a random one of the inner loop as in the proof.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.layout import Layout, Slot
from lockstep.optim.rounding import FORMATS, count_levels, draw_uniform, round_sum, split_seed
from lockstep.optim.svrg import Svrg

TINY = torch.finfo(torch.float32).tiny  # the least scale: where g̃ is zero there is nothing to divide by


class Halp(Svrg):
    """High-accuracy low-precision: z in 8 or 16 bits."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        bits: int = 8,
        mu: float = 1e-4,
        seed: int = 0,
        weight_decay: float = 1e-4,
        fused: bool | None = None,
    ) -> None:
        super().__init__(layout, device, weight_decay=weight_decay, fused=fused)
        self.bits = bits
        self.mu = mu
        self._state["offset"] = torch.zeros(layout.numel, dtype=FORMATS[bits], device=device)
        self.scale = torch.full((), TINY, device=device)  # s, which follows from g̃
        self.seed = split_seed(seed, device)

    @torch.no_grad()
    def refresh(self) -> None:
        """s from g̃. In FP64, so that it is the same on any device."""
        norm = self.full_gradient.double().norm()
        self.scale.copy_((norm / (self.mu * count_levels(self.bits))).clamp(min=TINY))

    @torch.no_grad()
    def measure_reach(self) -> Tensor:
        """The shares of offsets that are at an end of their grid and at zero, on the device."""
        most, numel = count_levels(self.bits), sum(slot.numel for slot in self.layout.slots)
        at_end = ((self.offset == most) | (self.offset == -most - 1)).sum()
        moved = torch.count_nonzero(self.offset)  # padding between slots is none of them
        return torch.stack([at_end, numel - moved]).double() / max(1, numel)

    def _read(self, offset: Tensor) -> Tensor:
        return self.scale * offset

    def _move(self, offset: Tensor, z: Tensor, v: Tensor, lr: Tensor, slot: Slot) -> None:
        """In units of s, in which z is whole. No product and sum in one: the kernel rounds each, too."""
        positions = torch.arange(slot.offset, slot.end, device=offset.device)
        uniform = draw_uniform(self.seed, self.count, positions)
        offset.copy_(round_sum(offset, -(lr * v) / self.scale, uniform, self.bits))

    def constants(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay, "bits": self.bits, "scale": self.scale, "seed": self.seed}
