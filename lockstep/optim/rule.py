"""What every update rule is: state arrays over the layout, and a step in place; step 9 of the walk.

A rule sees weights as a flat array with zeros between the slots, and gradients as flat arrays or slot by slot. On a GPU
one fused update of `kernels/flat_update.py` does all of it; the plain version here is its documentation and its oracle:
cast the gradients to FP32, unscale, clip, update slot by slot, and put everything back if they were not finite.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels import has_triton
from lockstep.layout import Layout
from lockstep.optim.loss_scale import LossScale

if TYPE_CHECKING:
    from lockstep.kernels.flat_update import FlatUpdate, Tiling

# On the CPU a norm adds up in FP32, element after element: over the 38 M of AlexNet's fc6 it is off by 2e-3, over
# pieces of this size by less than 1e-6.
PIECE = 1 << 16


# One array for each slot, all its elements in the order they lie in memory.
Slots = list[Tensor]


class Norms(NamedTuple):
    """What a step saw of every slot, on the device: norms, and the trust ratio where the rule has one."""

    weights: Tensor
    gradients: Tensor  # summed over ranks, without the loss scale, before they were clipped
    trust: Tensor | None
    inverse: Tensor  # 1 / the loss scale of that step


class Segments:
    """What rules do to all slots at once."""

    def __init__(self, layout: Layout, device: torch.device | str) -> None:
        self._bounds = [(slot.offset, slot.numel) for slot in layout.slots]
        self._decay = [slot.decay for slot in layout.slots]
        self.decay = torch.tensor(self._decay, device=device)
        self.adapt = torch.tensor([slot.adapt for slot in layout.slots], device=device)
        rates = [slot.rate for slot in layout.slots]
        self._rates = torch.tensor(rates, device=device) if set(rates) - {1.0} else None
        kinds = list(zip(self._decay, rates, strict=True))
        # Slots of the same decay and learning-rate factor, by number; those that decay first.
        self.groups = [
            (*kind, [number for number, own in enumerate(kinds) if own == kind])
            for kind in sorted(set(kinds), reverse=True)
        ]

    def split(self, flat: Tensor) -> Slots:
        """The slots of a flat array, without the padding between them."""
        return [flat.narrow(0, offset, numel) for offset, numel in self._bounds]

    def where_decay(self, slots: Slots, decay: bool) -> Slots:
        """The slots that get weight decay, or those that do not."""
        return [values for values, decays in zip(slots, self._decay, strict=True) if decays == decay]

    def rates(self, lr: Tensor) -> Tensor:
        """The learning rate, or that of every slot where they differ."""
        return lr if self._rates is None else lr * self._rates

    def norms(self, slots: Slots) -> Tensor:
        """The L2 norm of every slot."""
        pieces = [values.split(PIECE) for values in slots]
        all_pieces = [piece for parts in pieces for piece in parts]
        of_pieces = torch.stack(torch._foreach_norm(all_pieces, 2, dtype=torch.float32))
        return torch.stack(torch._foreach_norm(of_pieces.split_with_sizes([len(parts) for parts in pieces])))

    def add_decay(self, update: Slots, weights: Slots, weight_decay: float) -> None:
        """update ← update + weight_decay · weights, in the slots that decay."""
        if weight_decay and any(self._decay):
            torch._foreach_add_(self.where_decay(update, True), self.where_decay(weights, True), alpha=weight_decay)

    def scale(self, slots: Slots, factors: Tensor) -> None:
        """Multiply every slot by its factor, or all by one; factors stay on the device."""
        torch._foreach_mul_(slots, list(factors.unbind()) if factors.dim() else factors)

    def trust(self, ratios: Tensor, *norms: Tensor) -> Tensor:
        """The trust ratio where a slot adapts and none of its norms is zero; 1 elsewhere."""
        trusted = torch.stack([self.adapt, *(norm > 0 for norm in norms)]).all(dim=0)
        return torch.where(trusted, ratios, 1.0)


class Rule(ABC):
    """An update rule and its state."""

    has_anchor: ClassVar[bool] = False  # whether gradients are differences to those at an anchor: see `svrg.py`
    weight_decay: float

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str,
        state_names: tuple[str, ...],
        clip_norm: float,
        fused: bool | None,
    ) -> None:
        """`clip_norm`: what the norm of all gradients together is brought down to; 0 leaves them.

        `fused`: by the kernels or by the plain version; None lets the device decide.
        """
        device = torch.device(device)
        self.layout = layout
        self.segments = Segments(layout, device)
        self.clip_norm = clip_norm
        self.is_fused = device.type == "cuda" and has_triton() if fused is None else fused
        self._kernels: FlatUpdate | None = None
        # Steps taken without those skipped; on the device, because only there is known what was skipped.
        self.count = torch.zeros((), device=device)
        self._state = {name: torch.zeros(layout.numel, device=device) for name in state_names}
        self.measures = False  # whether steps keep their norms for `read_norms`
        self._seen: tuple[Tensor, Tensor] | None = None  # norms of weights and gradients
        self._trust: Tensor | None = None  # the last step's ratios, where the rule has them and the kernels do not
        self._inverse = torch.ones((), device=device)  # 1 / the loss scale of the last step

    @torch.no_grad()
    def step(
        self,
        weights: Tensor,
        gradients: tuple[Tensor, Tensor] | Slots,
        lr: Tensor,
        half_weights: Tensor | None = None,
        scale: LossScale | None = None,
    ) -> None:
        """Update the master weights and their half copy in place; the gradients are left as scratch.

        `gradients` are the half ones over [0, split) of the layout and the FP32 ones behind them, both times `scale`;
        or all of them in FP32, slot by slot. With a scale a step whose gradients are not finite changes nothing but it.
        """
        if isinstance(gradients, list):
            slots = gradients
        elif self.is_fused:
            self._step_fused(weights, gradients, lr, half_weights, scale)
            return
        else:
            slots = self.segments.split(self._to_fp32(*gradients))
        if scale is None:
            self._look(weights, slots)
            if self.clip_norm:
                self._clip(slots, self.segments.norms(slots))
            self._update(self.segments.split(weights), slots, lr)
            self.count += 1
        else:
            self._update_if_finite(weights, slots, lr, scale)
        if half_weights is not None and half_weights.numel():
            half_weights.copy_(weights[: self.layout.split])

    def _step_fused(
        self,
        weights: Tensor,
        gradients: tuple[Tensor, Tensor],
        lr: Tensor,
        half_weights: Tensor | None,
        scale: LossScale | None,
    ) -> None:
        """The whole step over the flat arrays, in few launches."""
        kernels = self._kernels or self.fuse()
        kernels.step(weights, half_weights, gradients, tuple(self._state.values()), lr, self.count, scale)

    def begin_anew(self, weight_decay: float) -> None:
        """Serve another run, whose decay may be another: the one number of a rule that kernels read from the device.

        What `state` and `count` hold is for the caller to put right.
        """
        self.weight_decay = weight_decay
        self.measures = False
        self._seen = self._trust = None
        if self._kernels:
            self._kernels.decay_by(weight_decay)

    @abstractmethod
    def _update(self, weights: Slots, gradients: Slots, lr: Tensor) -> None:
        """One step in FP32, the gradients used as scratch; `count` is that of the steps before."""

    @abstractmethod
    def constants(self) -> dict[str, Any]:
        """The numbers of the rule, by the names the fused kernels know them by."""

    def _update_if_finite(self, weights: Tensor, gradients: Slots, lr: Tensor, scale: LossScale) -> None:
        self._inverse = 1.0 / scale.factor
        torch._foreach_mul_(gradients, self._inverse)
        self._look(weights, gradients)
        norms = self.segments.norms(gradients)
        counts = scale.settle(norms.isfinite())
        if self.clip_norm:
            self._clip(gradients, norms)
        arrays = (weights, *self._state.values())
        before = [array.clone() for array in arrays]
        self._update(self.segments.split(weights), gradients, lr)
        for array, old in zip(arrays, before, strict=True):
            torch.where(counts, array, old, out=array)
        self.count += counts

    def _clip(self, gradients: Slots, norms: Tensor) -> None:
        """Scale gradients whose norm over all slots is above c to a norm of c (Pascanu et al. 2013, algorithm 1)."""
        c = self.clip_norm
        torch._foreach_mul_(gradients, c / norms.norm().clamp(min=c))

    def _look(self, weights: Tensor, gradients: Slots) -> None:
        """Keep the norms if asked to: an update leaves the gradients as scratch."""
        if self.measures:
            self._seen = self.segments.norms(self.segments.split(weights)), self.segments.norms(gradients)

    @torch.no_grad()
    def read_norms(self, weights: Tensor, gradients: tuple[Tensor, Tensor]) -> Norms | None:
        """What the last step saw of every slot, if it was taken with `measures`.

        The kernels leave the gradients as they were, and the sums that their rates came from.
        """
        if self._seen is not None:
            (w_norm, g_norm), self._seen = self._seen, None
            return Norms(w_norm, g_norm, self._trust, self._inverse)
        if self._kernels is None:
            return None
        half, full = gradients
        split = self.layout.split
        slots = [half.narrow(0, s.offset, s.numel) for s in self.layout.slots if s.half]
        rest = [full.narrow(0, s.offset - split, s.numel) for s in self.layout.slots if not s.half]
        g_norm = torch.cat([self.segments.norms(part) for part in (slots, rest) if part])
        inverse = self._kernels.read_inverse_scale()
        g_norm *= inverse
        sums = self._kernels.read_sums()
        if sums is None:
            return Norms(self.segments.norms(self.segments.split(weights)), g_norm, None, inverse)
        w_norm, second_norm = (square.sqrt() for square in sums)
        trust = self._read_trust(w_norm, g_norm * self._kernels.read_clip(), second_norm)
        return Norms(w_norm, g_norm, trust, inverse)

    def _read_trust(self, w_norm: Tensor, g_norm: Tensor, second_norm: Tensor) -> Tensor | None:
        """The trust ratios from the kernels' sums, whose second is of what the rule divides by; None: it has none."""
        return None

    def _to_fp32(self, half: Tensor, full: Tensor) -> Tensor:
        """All gradients in one FP32 array; the FP32 one itself where there are no others."""
        return torch.cat([half.float(), full]) if half.numel() else full

    def fuse(self, tiling: "Tiling | None" = None) -> "FlatUpdate":
        """Build the kernels' tables, for their own or another tiling."""
        from lockstep.kernels.flat_update import FlatUpdate

        name, device = type(self).__name__.lower(), self.count.device
        self._kernels = FlatUpdate(
            self.layout, device, name, clip_norm=self.clip_norm, tiling=tiling, **self.constants()
        )
        return self._kernels

    def begin(self, weights: Tensor) -> None:
        """Before any step, trials included; usually nothing."""
        return

    def refresh(self) -> None:
        """Bring what is derived up to date after the state arrays were changed from outside a step; usually nothing."""
        return

    def state(self) -> dict[str, Tensor]:
        """The flat state arrays by name, not copied: with `count`, all that a rule remembers."""
        return dict(self._state)
