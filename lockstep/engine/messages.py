"""What each all-reduce costs at each size on these ranks: measured in turns, within a budget (before step 0).

All ranks measure together and rank 0 says what goes on, so that all ranks agree. Times are the device's own, and the
slowest rank's counts. Memory is taken before any rank sends: what one rank has none for is left out on all.
"""

import math
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import torch

from lockstep.comm.cost import FLAT, Choice, Timing
from lockstep.comm.hybrid import Hybrid, PlannedSum
from lockstep.comm.moment import seconds_between, take_moment, wait_for
from lockstep.comm.world import World

MAX_ROUNDS = 9
# Times the best at a size: a choice that was slower than that is not measured there again.
WORTH_REPEATING = 2.0

Pair = tuple[int, Choice]
Times = dict[Pair, list[float]]


class Budget:
    """Seconds that are left, by rank 0's clock."""

    def __init__(self, world: World, seconds: float) -> None:
        self._world = world
        self._end = time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.perf_counter()

    def fits(self, seconds: float = 0.0) -> bool:
        """Rank 0's word on whether there is so much; every rank must ask."""
        return bool(self._world.broadcast_value(self.left_s > seconds))

    def excuse(self, seconds: float) -> None:
        """So much was spent on what the budget is not for."""
        self._end += max(0.0, seconds)


def measure_messages(
    hybrid: Hybrid, world: World, array: torch.Tensor, choices: Sequence[Choice], sizes: Sequence[int], budget_s: float
) -> list[Timing]:
    """The median seconds of each choice at each size on the wire, measured in turns until the budget is spent.

    Messages are parts of `array`, which is left zero. The backend's own is measured at one size at least. A rank's
    first message to another opens a connection, so every other choice is begun only while there is time. After each
    round rank 0 says which pairs go on: none that is hopeless, none at all when the time is up; larger sizes are left
    out when even one round of them would not fit.
    """
    budget = Budget(world, budget_s)
    hybrid.prepare(choices)
    array.zero_()  # and stays so, however often it is summed
    times: Times = {}
    small = [(sizes[0], choice) for choice in choices]
    for _, choice in [small[0], *_find_room(hybrid, world, array, small[1:])]:
        if times and not budget.fits():
            break
        _measure_round(hybrid, world, array, [(sizes[0], choice)], times, repeats=2)
    for last, size in pairwise(sizes):  # up in size, so that a budget runs out on the largest
        names = world.broadcast_value([str(choice) for choice in _shortlist(times, last, size, budget.left_s)])
        alive = _find_room(hybrid, world, array, [(size, Choice.parse(name)) for name in names])
        if not alive:
            break
        _measure_round(hybrid, world, array, alive, times, repeats=2)
    for _ in range(MAX_ROUNDS - 1):
        rows = world.broadcast_value([(size, str(choice)) for size, choice in _prune(times, budget.left_s)])
        pairs = [(int(size), Choice.parse(name)) for size, name in rows]
        if not pairs:
            break
        _measure_round(hybrid, world, array, pairs, times)
    return [Timing(choice, size, median(values)) for (size, choice), values in sorted(times.items())]


def _shortlist(times: Times, last: int, size: int, left_s: float) -> list[Choice]:
    """What to measure at the next size: all, or the best two of the last size when time is short."""
    before = {choice: min(values) for (at, choice), values in times.items() if at == last}
    growth = size / last
    if 2 * growth * sum(before.values()) < 0.3 * left_s:
        return list(before)
    ranked = sorted(before, key=before.__getitem__)
    keep = sorted({*ranked[:2], *({FLAT} & before.keys())})
    return keep if 2 * growth * sum(before[choice] for choice in keep) < left_s else []


def _prune(times: Times, left_s: float) -> list[Pair]:
    """The pairs of the next round; none when it would not fit."""
    best: dict[int, float] = {}
    for (size, _), values in times.items():
        best[size] = min(best.get(size, math.inf), min(values))
    pairs = [(size, choice) for (size, choice), values in times.items() if min(values) <= WORTH_REPEATING * best[size]]
    while pairs and sum(median(times[pair]) for pair in pairs) > left_s:
        largest = max(size for size, _ in pairs)
        pairs = [pair for pair in pairs if pair[0] < largest]
    return pairs


def _find_room(hybrid: Hybrid, world: World, array: torch.Tensor, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs that every rank has the memory for."""
    lacks = torch.zeros(len(pairs))
    for row, (size, choice) in enumerate(pairs):
        try:
            hybrid.reserve([PlannedSum(_cut(array, size, hybrid), choice)])
        except RuntimeError:  # out of memory is one
            lacks[row] = 1
    if pairs:
        world.maximum(lacks)
    return [pair for pair, is_lacking in zip(pairs, lacks.tolist(), strict=True) if not is_lacking]


def _cut(array: torch.Tensor, size: int, hybrid: Hybrid) -> torch.Tensor:
    """The part of an array that has `size` bytes on the wire."""
    return array[: size // min(array.element_size(), hybrid.bytes_per_element)]


def _measure_round(
    hybrid: Hybrid, world: World, array: torch.Tensor, pairs: Iterable[Pair], times: Times, repeats: int = 1
) -> None:
    """Run each pair; the time that counts is the slowest rank's, exchanged once at the end of the round."""
    pairs = list(pairs)
    seconds = torch.zeros(len(pairs), repeats, dtype=torch.float64)
    for row, (size, choice) in enumerate(pairs):
        for repeat in range(repeats):
            begun = take_moment(on_gpu=array.is_cuda)
            hybrid.run(_cut(array, size, hybrid), choice)
            done = take_moment(on_gpu=array.is_cuda)
            wait_for(done)
            seconds[row, repeat] = max(seconds_between(begun, done), 1e-9)
    world.maximum(seconds)
    for pair, values in zip(pairs, seconds.tolist(), strict=True):
        times.setdefault(pair, []).extend(values[-1:] if repeats > 1 else values)  # the first repeat warms up
