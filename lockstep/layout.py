"""Where each parameter lies in the flat arrays.

Weights, gradients, master weights and momentum are flat arrays over one `Layout`. Slots stand in backward order, so a
fused buffer is a contiguous range of them: no packing, and fusion is only the choice of cut points. Torch-free.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# 32 elements are a cache line in half precision and two in FP32: every slot starts aligned for vector loads.
ALIGNMENT = 32


class ParameterSpec(NamedTuple):
    """What the layout needs to know of one parameter."""

    name: str
    shape: tuple[int, ...]
    decay: bool  # gets weight decay
    adapt: bool  # gets a trust ratio


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements [offset, offset + numel) of every flat array."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    decay: bool
    adapt: bool

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """All slots in backward order and the length of the flat arrays over them, padding included."""

    slots: tuple[Slot, ...]
    numel: int


def align(offset: int) -> int:
    """The next offset at which a slot may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def plan_layout(parameters: Iterable[ParameterSpec]) -> Layout:
    """Lay out parameters given in forward order; the gaps left by alignment stay zero in every array."""
    slots: list[Slot] = []
    offset = 0
    for spec in reversed(list(parameters)):
        slot = Slot(spec.name, spec.shape, offset, math.prod(spec.shape), spec.decay, spec.adapt)
        slots.append(slot)
        offset = align(slot.end)
    return Layout(tuple(slots), offset)
