"""A whole update of all slots in three launches: norms by tile, rates by slot, update by tile (step 9 of the walk).

The flat arrays are cut into tiles that never cross a slot; a table of them lies on the device. SGD and AdamW need no
norms, and without a loss scale no pass but the last. LARS moves 26 bytes a parameter with half gradients: 6 to read
weights and gradients for the norms, 20 to read and write them with momentum and the half copy.

Clipping needs the norm of all gradients: one launch more, of a single program, adds up what the tiles have. Where no
launch has their squares anyway it takes a pass over the gradients, 2 bytes a parameter: for SGD and AdamW without a
loss scale, and for LAMB, whose squares are those of an r that is made from clipped gradients.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from lockstep.kernels.norms import CLIP, INVERSE, NUM_CONTROLS, UNIT, settle_clip, settle_slots, sum_tiles
from lockstep.kernels.updates import update_tiles
from lockstep.layout import ALIGNMENT, Layout, align

# By rule: whether every slot has a rate of its own, from norms, and whether it keeps Adam's two moments.
RULES = {"sgd": (False, False), "lars": (True, False), "lamb": (True, True), "adamw": (False, True)}
SETTLE_BLOCK = 1024  # tile sums a slot's program adds at a time
CLIP_BLOCK = 4096  # and the one program that adds up all of them

assert UNIT.value == ALIGNMENT


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; a few others are measured by `lockstep bench optimizer --sweep`."""

    block: int = 4096  # elements of a tile at most
    num_warps: int = 8
    half_vector: int = 4  # neighbours in a half array that one thread takes: 64 bits, or 8 for 128
    reverse: bool = True  # the update starts where the norms ended
    evict_first: bool = True  # what the update is done with leaves the cache first


class Scale(Protocol):
    """What the kernels need of a loss scale: see `optim/loss_scale.py`."""

    growth_steps: int
    floor: float
    ceiling: float
    state: Tensor
    overflows: Tensor
    firsts: Tensor
    depths: Tensor


class FlatUpdate:
    """SGD, LARS, LAMB or AdamW over flat arrays; deterministic, and the host waits for nothing."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        rule: str,
        *,
        weight_decay: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 1.0,
        epsilon: float = 0.0,
        beta1: float = 0.0,
        beta2: float = 0.0,
        clip_norm: float = 0.0,
        tiling: Tiling | None = None,
    ) -> None:
        self.tiling = tiling or Tiling()
        self._adapts, self._has_moments = RULES[rule]
        self._clip_norm = clip_norm
        self._split = layout.split
        self._num_slots = len(layout.slots)
        self._momentum, self._nesterov = momentum, nesterov
        self._trust_coefficient, self._epsilon = trust_coefficient, epsilon
        # As differences of Python's FP64 numbers: 1 − 0.999 in FP32 is off by 5e-5.
        self._moments = {"beta1": beta1, "rest1": 1.0 - beta1, "beta2": beta2, "rest2": 1.0 - beta2}
        self._logarithms = {"log_beta1": _log(beta1), "log_beta2": _log(beta2)}
        tiles, slots = cut_tiles(layout, self.tiling.block)
        self._num_tiles = len(tiles)
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self._is_decayed = torch.tensor([float(slot.decay) for slot in layout.slots], device=device)
        self._decays = torch.empty_like(self._is_decayed)
        self.decay_by(weight_decay)
        factors = [slot.rate for slot in layout.slots]
        self._is_layered = any(factor != 1.0 for factor in factors)
        self._factors = torch.tensor(factors, device=device)
        self._partials = torch.zeros(2 * self._num_tiles, device=device)
        self._rates = torch.zeros(self._num_slots, device=device)
        self._is_bad = torch.zeros(self._num_slots, dtype=torch.int32, device=device)
        self._control = torch.zeros(NUM_CONTROLS, device=device)
        self._is_scaled = False  # whether the last step had a loss scale

    def decay_by(self, weight_decay: float) -> None:
        """Use this weight decay from now on; in place, because a recorded step has its address."""
        torch.mul(self._is_decayed, weight_decay, out=self._decays)

    def step(
        self,
        weights: Tensor,
        half_weights: Tensor | None,
        gradients: tuple[Tensor, Tensor],
        moments: tuple[Tensor, ...],
        lr: Tensor,
        count: Tensor,
        scale: Scale | None = None,
    ) -> None:
        """Update weights, half weights, moments, count and scale in place."""
        if not self._num_tiles:
            return
        self._is_scaled = scale is not None
        first, second = moments if len(moments) == 2 else (moments[0], moments[0])
        half = weights if half_weights is None else half_weights  # never touched where nothing is half
        # Without a scale these are never touched either.
        state = count if scale is None else scale.state
        switches = {"SCALED": scale is not None, "CLIPPED": self._clip_norm > 0}
        rule = {"ADAPTS": self._adapts, "MOMENTS": self._has_moments, "LAYERED": self._is_layered}
        tiling = self.tiling
        shape = {"BLOCK": tiling.block, "HALF_VECTOR": tiling.half_vector, "num_warps": tiling.num_warps}

        def add_squares(*, of_weights: bool, of_direction: bool) -> None:
            sum_tiles[(self._num_tiles,)](
                self._tiles,
                weights,
                *gradients,
                first,
                second,
                self._decays,
                state,
                count,
                self._control,
                self._partials,
                self._split,
                self._num_tiles,
                **self._moments,
                **self._logarithms,
                epsilon=self._epsilon,
                WEIGHTS=of_weights,
                DIRECTION=of_direction,
                **switches,
                **shape,
            )

        is_lamb = self._adapts and self._has_moments
        if self._clip_norm:
            add_squares(of_weights=self._adapts and not is_lamb, of_direction=False)
            settle_clip[(1,)](
                self._partials,
                self._num_tiles,
                state,
                self._control,
                self._clip_norm,
                SCALED=scale is not None,
                BLOCK=CLIP_BLOCK,
                num_warps=8,
            )
        if is_lamb or (not self._clip_norm and (self._adapts or scale is not None)):
            add_squares(of_weights=self._adapts, of_direction=is_lamb)
        if self._adapts or self._has_moments or scale is not None:
            settle_slots[(self._num_slots,)](
                self._slots,
                self._decays,
                self._partials,
                self._num_tiles,
                lr,
                state,
                count,
                self._control,
                self._rates,
                self._is_bad,
                self._is_bad if scale is None else scale.overflows,
                self._factors,
                self._trust_coefficient,
                self._epsilon,
                **self._logarithms,
                **rule,
                **switches,
                BLOCK=SETTLE_BLOCK,
                num_warps=4,
            )
        update_tiles[(self._num_tiles,)](
            self._tiles,
            weights,
            half,
            *gradients,
            first,
            second,
            self._rates,
            self._decays,
            self._factors,
            lr,
            self._control,
            count,
            state,
            self._is_bad,
            self._is_bad if scale is None else scale.depths,
            self._is_bad if scale is None else scale.firsts,
            self._split,
            self._num_tiles,
            self._num_slots,
            self._momentum,
            **self._moments,
            epsilon=self._epsilon,
            **_limits(scale),
            **rule,
            **switches,
            NESTEROV=self._nesterov,
            REVERSE=tiling.reverse,
            EVICT="evict_first" if tiling.evict_first else "",
            SLOTS=triton.next_power_of_2(self._num_slots),
            **shape,
        )

    def read_sums(self) -> tuple[Tensor, Tensor] | None:
        """By slot, the two sums of squares that the last rates came from, as `sum_tiles` has them; None if none did."""
        if not self._adapts:
            return None
        sums = self._partials.new_zeros(2, self._num_slots)
        first, second = sums.index_add_(1, self._tiles[:, 0], self._partials.view(2, -1))
        return first, second

    def read_inverse_scale(self) -> Tensor:
        """1 / the loss scale of the last step; 1 without one."""
        return self._control[INVERSE.value] if self._is_scaled else torch.ones_like(self._control[0])

    def read_clip(self) -> Tensor:
        """What the last step's gradients were multiplied by to clip them; 1 if they are never clipped."""
        return self._control[CLIP.value] if self._clip_norm else torch.ones_like(self._control[0])


def cut_tiles(layout: Layout, block: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Tiles as (slot, start, length) and slots as (first tile, end of its tiles, adapts), in units of the alignment."""
    tiles: list[tuple[int, int, int]] = []
    slots: list[tuple[int, int, int]] = []
    for index, slot in enumerate(layout.slots):
        begin, end = len(tiles), align(slot.end)
        for start in range(slot.offset, end, block):
            tiles.append((index, start // ALIGNMENT, min(block, end - start) // ALIGNMENT))
        slots.append((begin, len(tiles), int(slot.adapt)))
    return tiles, slots


def _limits(scale: Scale | None) -> dict[str, Any]:
    if scale is None:
        return {"growth_steps": 1.0, "floor": 1.0, "ceiling": 1.0}
    return {"growth_steps": float(scale.growth_steps), "floor": scale.floor, "ceiling": scale.ceiling}


def _log(base: float) -> float:
    return math.log(base) if base > 0 else -1e30
