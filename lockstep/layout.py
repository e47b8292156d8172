"""Where each parameter lies in the flat arrays.

Weights, gradients, master weights and momentum are flat arrays over one `Layout`. Slots stand in backward order, so a
fused buffer is a contiguous range of them: no packing, and fusion is only the choice of cut points. What is computed in
half precision comes first, so that half and FP32 arrays over the two parts need no gaps. Torch-free.
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
    half: bool = False  # computed in half precision
    rate: float = 1.0  # its factor on the learning rate


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements [offset, offset + numel) of every flat array."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    decay: bool
    adapt: bool
    half: bool = False
    depth: int = 0  # how many parameters come after it in forward order: 0 is the nearest to the loss
    rate: float = 1.0

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """All slots and the length of the flat arrays over them, padding included.

    Elements [0, split) are computed in half precision, the rest in FP32; each part stands in backward order.
    """

    slots: tuple[Slot, ...]
    numel: int
    split: int = 0

    @property
    def head(self) -> "Layout":
        """The part whose gradients are cut into buffers: the half slots, or all where there are none."""
        slots = tuple(slot for slot in self.slots if slot.half)
        return Layout(slots, self.split, self.split) if slots else self

    @property
    def head_element_bytes(self) -> int:
        """Bytes of one gradient in the head."""
        return 2 if self.split else 4

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return 2 * self.split + 4 * (self.numel - self.split)


def align(offset: int) -> int:
    """The next offset at which a slot may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def plan_layout(parameters: Iterable[ParameterSpec]) -> Layout:
    """Lay out parameters given in forward order; the gaps left by alignment stay zero in every array."""
    backward = list(enumerate(reversed(list(parameters))))
    slots: list[Slot] = []
    offset = split = 0
    for depth, spec in sorted(backward, key=lambda entry: not entry[1].half):  # stable: backward order in each part
        size, (name, shape, decay, adapt, half, rate) = math.prod(spec.shape), spec
        slot = Slot(name, shape, offset, size, decay, adapt, half, depth, rate)
        slots.append(slot)
        offset = align(slot.end)
        split = offset if spec.half else split
    return Layout(tuple(slots), offset, split)
