"""Do all ranks hold the same weights? Asked by numbers that ride along with the gradients (step 10 on the walk).

Every rank gets the same sums and adds them in the same order, so all weights stay equal to the last bit, unless memory
fails or the hardware of ranks differs. A checksum over the bits of the weights is an integer, so it is the same on any
device and in any order; six digits of it are summed as side numbers, exactly up to 65,000 ranks, and each rank compares
the sum with its own digits times the ranks. Only ranks that are not equal send each other weights, to see how far apart
they are.

What else a step keeps needs no look of its own: a wrong momentum or loss scale moves the weights at the next step, and
half weights are made anew from the masters by every step. The average moves nothing, so it is looked at too. Running
statistics are each rank's own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.engine.build import NUM_NOTES, Parts, share_array
from lockstep.engine.giving_up import SLOW
from lockstep.engine.state import list_changing, refresh
from lockstep.errors import SharedError
from lockstep.layout import ALIGNMENT
from lockstep.optim.rounding import MASK, mix32

DIGITS = slice(SLOW + 1, NUM_NOTES)
BITS = 8  # of a digit
# Weights that are nearer to each other than this are unlike hardware's rounding; such ranks are brought together again.
TOLERANCE = 1e-4
PIECE = 1 << 20  # elements that are looked at a time: a second array may not fit the device


class Gap(NamedTuple):
    """How far a rank's array is from rank 0's."""

    of_norm: float  # the norm of the difference, in norms of rank 0's array
    of_largest: float  # the largest difference, in the largest number there: one wrong weight hides in a norm

    @property
    def is_far(self) -> bool:
        return not (self.of_norm <= TOLERANCE and self.of_largest <= TOLERANCE)  # a NaN is far


def note_weights(parts: Parts) -> None:
    """Let the next step carry the checksum of this rank's weights as they are before it."""
    words = [torch.zeros((), dtype=torch.int64, device=parts.note.device)]
    for array in _list_compared(parts).values():
        total = _sum_bits(array)
        # Mixed, so that no rank's digits lie midway between those of others: it would find all equal, and they wait.
        for half in (total, total >> 32):
            words.append(mix32((half & MASK) ^ words[-1]))
    shifts = BITS * torch.arange((DIGITS.stop - DIGITS.start) // 2, device=parts.note.device)
    digits = (torch.stack(words[-2:])[:, None] >> shifts) & ((1 << BITS) - 1)
    parts.note[DIGITS] = digits.flatten().to(parts.note.dtype)


def _list_compared(parts: Parts) -> dict[str, Tensor]:
    return {"weights": parts.weights} | ({"averaged weights": parts.average.weights} if parts.average else {})


def _sum_bits(array: Tensor) -> Tensor:
    """A sum of all bits as integers. Neighbours count differently, so that two signs or places cannot be exchanged."""
    pieces = array.view(torch.int32).view(-1, ALIGNMENT).split(PIECE // ALIGNMENT)
    sums = torch.stack([piece.sum(dim=0, dtype=torch.int64) for piece in pieces]).sum(dim=0)
    return (sums * (2 * torch.arange(ALIGNMENT, device=array.device) + 1)).sum()


def find_drift(parts: Parts, side: Tensor, world: World) -> str:
    """After a step that carried the checksums: nothing if all ranks are equal, or a sentence once they are again.

    Every rank must call it, and a run whose ranks are far apart ends here.
    """
    if torch.equal(side[DIGITS], world.size * parts.note[DIGITS]):
        return ""
    compared = _list_compared(parts)
    found = world.gather_values([measure_gap(array, world) for array in compared.values()])
    gaps = {what: [Gap(*of_rank[place]) for of_rank in found] for place, what in enumerate(compared)}
    for what, of_ranks in gaps.items():
        _refuse_far(what, of_ranks)
    for array in list_changing(parts).over_layout.values():
        share_array(world, array)
    refresh(parts)
    of_norm, worst = max((gap.of_norm, rank) for of_ranks in gaps.values() for rank, gap in enumerate(of_ranks))
    return (
        f"The ranks' weights differed in their last digits (rank {worst}: {of_norm:.0e} of their norm), as they do on "
        "unlike hardware; all ranks went on with rank 0's."
    )


def measure_gap(array: Tensor, world: World) -> Gap:
    """How far this rank's array is from rank 0's; every rank must call it."""
    squares = torch.zeros(2, dtype=torch.float64, device=array.device)  # of the differences, and of rank 0's
    largest = torch.zeros_like(squares)
    for own in array.split(PIECE):
        first = own.clone()
        world.broadcast(first)
        both = torch.stack([own.double() - first, first.double()])
        squares += both.square().sum(dim=1)
        largest = torch.maximum(largest, both.abs().amax(dim=1))
    norm, norm_of_first = squares.sqrt().tolist()
    most, most_of_first = largest.tolist()
    return Gap(norm / max(norm_of_first, 1e-30), most / max(most_of_first, 1e-30))


def _refuse_far(what: str, gaps: list[Gap]) -> None:
    """End the run if a rank is far from rank 0, which may itself be the one that is wrong."""
    far = [rank for rank, gap in enumerate(gaps) if gap.is_far]
    if not far:
        return
    worst = max((rank for rank in far if rank), key=lambda rank: gaps[rank])
    # Most ranks have it right. Of two halves, as of two ranks, nobody can tell.
    if 2 * len(far) == len(gaps):
        who = f"Ranks 0 and {worst} no longer hold the same {what}"
    else:
        who = f"Rank {worst if 2 * len(far) < len(gaps) else 0} no longer holds the {what} of the others"
    of_norm, of_largest = gaps[worst]
    raise SharedError(
        f"{who} (those of ranks 0 and {worst} differ by {of_norm:.2g} of their norm, and in one place by "
        f"{of_largest:.2g} of the largest); check the memory of those machines and go on with --resume."
    )
