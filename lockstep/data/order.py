"""Which samples this rank takes at this step, and the ledger that certifies it (step 1 on the walk).

The order is a pure function of (seed, epoch, position): whatever the number of ranks, threads or restarts, position p
of an epoch holds the same sample. Nothing is shuffled in memory, so a run resumes anywhere at no cost. Torch-free.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import LockstepError

Samples = NDArray[np.int64]

# An odd number near 2**64 / golden ratio: adding it before scrambling keeps runs of small words apart.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Half-rounds of the permutation network; six already pass the uniformity tests.
ROUNDS = 8
# Words that keep one use of a hash apart from another.
HELD_OUT, PACK_ORDER = 0x7661_6C69, 0x7061_636B


def _word(value: int | NDArray[Any]) -> Any:
    """A value as 64-bit words, negative numbers by two's complement."""
    return np.uint64(value & 0xFFFFFFFFFFFFFFFF) if isinstance(value, int) else value.astype(np.uint64)


@np.errstate(over="ignore")
def mix(*words: int | NDArray[Any]) -> Any:
    """Hash the words to 64 well-mixed bits, elementwise over arrays: the one source of chance in `data`."""
    state = np.uint64(0)
    for word in words:
        # Shift-multiply avalanche with the constants of splitmix64: every input bit reaches every output bit.
        state = (state ^ _word(word)) + GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permute(positions: Samples, num_samples: int, seed: int, epoch: int) -> Samples:
    """The samples at these positions of an epoch: a keyed bijection of range(num_samples).

    A Feistel network on the grid rows × columns ≥ num_samples; the few results beyond num_samples are sent through
    again until they land inside (cycle walking), which keeps the map a bijection.
    """
    rows = math.isqrt(num_samples - 1) + 1
    columns = -(-num_samples // rows)
    keys = mix(seed, epoch, num_samples, np.arange(ROUNDS))

    def walk(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row, column = np.divmod(values, np.uint64(columns))
        for turn, key in enumerate(keys):
            if turn % 2:
                row = (row + mix(key ^ column) % np.uint64(rows)) % np.uint64(rows)
            else:
                column = (column + mix(key ^ row) % np.uint64(columns)) % np.uint64(columns)
        return row * np.uint64(columns) + column

    samples = walk(positions.astype(np.uint64))
    while (outside := samples >= num_samples).any():
        samples[outside] = walk(samples[outside])
    return samples.astype(np.int64)


def share(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """This rank's contiguous slice [start, stop) of `count` items; sizes differ by at most one."""
    return count * rank // world_size, count * (rank + 1) // world_size


def split_batch(count: int, size: int | Fraction) -> Iterator[tuple[slice, bool]]:
    """`count` samples in ⌈count / size⌉ passes that differ by at most one; nothing for an empty batch."""
    num_passes = -(-count // size)
    for index in range(num_passes):
        yield slice(count * index // num_passes, count * (index + 1) // num_passes), index == num_passes - 1


@dataclass(frozen=True)
class Cursor:
    """Where a run stands in the data: samples of this epoch already taken by the whole world."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class StepPlan:
    """What one rank does at one step: its samples, the whole step's size, and where the next step starts."""

    epoch: int
    samples: Samples
    global_size: int
    next: Cursor
    made: Samples  # the samples, and the other halves of pairs that the share cuts
    own: slice  # where the samples lie among those


def steps_per_epoch(num_samples: int, global_batch: int) -> int:
    """Steps that take every sample once; the last may be smaller, nothing is dropped or padded."""
    return -(-num_samples // global_batch)


def step_at(cursor: Cursor, num_samples: int, global_batch: int) -> int:
    """The number of the step that starts at the cursor, in a run of such batches whose epochs end where epochs end.

    A run that goes on with another global batch keeps its place in the data and is numbered by this: duration, warm-up
    and milestones follow from epochs, so whoever doubles the batch has half the steps behind as well as ahead.
    """
    left = steps_per_epoch(num_samples - cursor.position, global_batch)
    return (cursor.epoch + 1) * steps_per_epoch(num_samples, global_batch) - left


def plan_step(
    cursor: Cursor,
    num_samples: int,
    global_batch: int,
    rank: int,
    world_size: int,
    seed: int,
    paired: bool = False,
) -> StepPlan:
    """The samples this rank takes at the step that starts at the cursor.

    `paired`, the positions 2i and 2i + 1 of a global batch belong together, and a rank that has one makes both.
    """
    global_size = min(global_batch, num_samples - cursor.position)
    start, stop = share(global_size, rank, world_size)
    first, last = start, stop
    if paired and start < stop:
        first, last = start - start % 2, min(stop + stop % 2, global_size)
    positions = cursor.position + np.arange(first, last, dtype=np.int64)
    end = cursor.position + global_size
    following = Cursor(cursor.epoch, end) if end < num_samples else Cursor(cursor.epoch + 1, 0)
    made = permute(positions, num_samples, seed, cursor.epoch)
    own = slice(start - first, stop - first)
    return StepPlan(cursor.epoch, made[own], global_size, following, made, own)


def choose_held_out(names: NDArray[np.uint64], val_share: float) -> NDArray[np.bool_]:
    """Which samples are for validation, by a hash of each name alone: a file more or less moves no other."""
    uniform = (mix(HELD_OUT, names) >> np.uint64(11)) * 2.0**-53
    if not len(names) or not 0 < (is_held_out := uniform < val_share).sum() < len(names):
        raise LockstepError(
            f"data.val_share = {val_share:g} of {len(names)} samples leaves nothing to train on or to validate with; "
            "change it, or give a val/ folder."
        )
    return np.asarray(is_held_out)


class Ledger:
    """A rolling hash of the (epoch, sample) pairs seen, whatever their order; a rank's ledgers add up to the world's.

    Sums of hashes modulo 2**64 and a count: a sample lost, doubled or swapped for another changes the value.
    """

    def __init__(self, value: int = 0, count: int = 0) -> None:
        self.value = value
        self.count = count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and (self.value, self.count) == (other.value, other.count)

    def __repr__(self) -> str:
        return f"Ledger({self.value:#018x}, count={self.count})"

    def add(self, epoch: int, samples: Samples) -> None:
        """Count these samples of one epoch as seen."""
        self.merge(Ledger(int(mix(epoch, samples).sum(dtype=np.uint64)), len(samples)))

    def merge(self, other: "Ledger") -> None:
        """Add what another rank, or another part of the run, has seen."""
        self.value = (self.value + other.value) % 2**64
        self.count += other.count


def expected_ledger(num_samples: int, epoch: int) -> Ledger:
    """The ledger of an epoch in which every sample was seen exactly once."""
    ledger = Ledger()
    for start in range(0, num_samples, 1 << 16):
        ledger.add(epoch, np.arange(start, min(start + (1 << 16), num_samples), dtype=np.int64))
    return ledger
