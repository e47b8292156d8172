"""Gradient sizes and times -> cut points (step 7 on the walk): which slots travel together. Torch-free and pure.

Three rules: the paper's threshold (pack slots in backward order until a size is reached), the paper's two segments
(one cut), and the merge of MG-WFBP (Shi, Chu and Li 2019) taken to its optimum. The last two weigh when gradients are
ready in the backward pass against what a buffer costs to send; the planner asks the same functions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from lockstep.comm.cost import Choice
from lockstep.errors import LockstepError
from lockstep.layout import Layout

Array = np.ndarray[Any, np.dtype[np.float64]]
Predict = Callable[[int], float]  # bytes of a buffer -> seconds to sum it over all ranks


@dataclass(frozen=True)
class Buffer:
    """A contiguous run of slots sent together: elements [start, end) of the flat gradients, slots [first, last)."""

    start: int
    end: int
    first: int
    last: int
    element_bytes: int = 4

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * self.element_bytes


@dataclass(frozen=True)
class ReductionPlan:
    """What the reducer runs and a simulator predicts: the buffers, the all-reduce of each, and when they are sent."""

    buffers: tuple[Buffer, ...]
    choices: tuple[Choice, ...]
    overlap: bool  # while backward still runs, or after it


def add_tail(layout: Layout, buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """The buffers of a layout's head, and one for all that stays FP32 behind it.

    Batch norm's gradients are few, and the last of them is ready last: together with the side numbers they are one
    short message. A buffer never holds two formats.
    """
    if not layout.split:
        return tuple(buffers)
    head = [replace(buffer, element_bytes=layout.head_element_bytes) for buffer in buffers]
    return (*head, Buffer(layout.split, layout.numel, len(layout.head.slots), len(layout.slots)))


def plan_buffers(layout: Layout, threshold_bytes: float, bytes_per_element: int = 4) -> tuple[Buffer, ...]:
    """Cut the layout into buffers of at most `threshold_bytes`, in the order backward fills them.

    A slot larger than the threshold travels alone.
    """
    slots = layout.slots
    cuts = [0]
    for index, slot in enumerate(slots):
        size = (slot.end - slots[cuts[-1]].offset) * bytes_per_element
        if size > threshold_bytes and index > cuts[-1]:
            cuts.append(index)
    return _cut(layout, cuts)


def plan_two_segments(
    layout: Layout, ready_s: Sequence[float], predict: Predict, bytes_per_element: int = 4
) -> tuple[Buffer, ...]:
    """Cut the layout once, where the second of the two buffers is done soonest; a single slot stays whole."""
    ready, costs = _running_max(layout, ready_s), _cost_table(layout, predict, bytes_per_element)
    *_, (_, cuts) = islice(_plans(ready, costs), 2)
    return _cut(layout, cuts)


def plan_merged(
    layout: Layout, ready_s: Sequence[float], predict: Predict, bytes_per_element: int = 4
) -> tuple[Buffer, ...]:
    """The fewest buffers among those plans whose last buffer is done soonest.

    `ready_s[i]` is when slot i's gradient is ready, in seconds from the start of backward. MG-WFBP walks the layers
    once and merges two neighbours if the second is ready before the start-up cost it saves is spent, which supposes a
    cost of a + b · bytes. Here every set of cuts is weighed (dynamic programming over the last cut, O(L²)), so any
    cost will do, such as the cheapest of several algorithms, and the plan is never slower than the greedy one.
    """
    ready, costs = _running_max(layout, ready_s), _cost_table(layout, predict, bytes_per_element)
    # Of all plans for the first j slots only the one done soonest matters: what follows can but start earlier.
    done = np.zeros(len(layout.slots) + 1)
    for j in range(1, len(done)):
        done[j] = np.min(np.maximum(done[:j], ready[j - 1]) + costs[:j, j])
    soonest = done[-1] * (1 + 1e-9)  # up to rounding
    return _cut(layout, next(cuts for end, cuts in _plans(ready, costs) if end <= soonest))


def _cut(layout: Layout, firsts: Sequence[int]) -> tuple[Buffer, ...]:
    """Buffers that begin at these slots."""
    # A buffer ends where the next begins, so that the padding between slots belongs to exactly one of them.
    edges = [*(layout.slots[first].offset for first in firsts), layout.numel]
    lasts = [*firsts[1:], len(layout.slots)]
    return tuple(
        Buffer(start, end, first, last)
        for start, end, first, last in zip(edges[:-1], edges[1:], firsts, lasts, strict=True)
    )


def _running_max(layout: Layout, ready_s: Sequence[float]) -> Array:
    """When each slot may go: buffers leave in order, so none before those in front of it are ready."""
    if len(ready_s) != len(layout.slots):
        raise LockstepError(f"There are {len(ready_s)} ready times for {len(layout.slots)} gradients; measure again.")
    if not all(0 <= ready < math.inf for ready in ready_s):
        raise LockstepError("A gradient's ready time is negative or no number; measure again.")
    return np.maximum.accumulate(np.array(ready_s, float))


def _cost_table(layout: Layout, predict: Predict, bytes_per_element: int) -> Array:
    """Seconds of a buffer of slots [i, j) at row i, column j; infinite where there is none."""
    edges = [*(slot.offset for slot in layout.slots), layout.numel]
    costs = np.full((len(edges), len(edges)), math.inf)
    for i, start in enumerate(edges):
        for j in range(i + 1, len(edges)):
            costs[i, j] = predict((edges[j] - start) * bytes_per_element)
    return costs


def _plans(ready: Array, costs: Array) -> Iterator[tuple[float, list[int]]]:
    """For 1, 2, … buffers: when the best plan with that many is done, and the slots at which its buffers begin."""
    go = np.concatenate([[0.0], ready])  # go[j]: the first j slots are ready
    done = np.full(len(go), math.inf)
    done[0] = 0.0
    origins: list[np.ndarray[Any, np.dtype[np.intp]]] = []
    for _ in ready:
        ends = np.maximum(done[:, None], go[None, :]) + costs
        origins.append(ends.argmin(axis=0))
        done = ends.min(axis=0)
        firsts = [len(ready)]
        for origin in reversed(origins):
            firsts.append(int(origin[firsts[-1]]))
        yield float(done[-1]), firsts[:0:-1]
