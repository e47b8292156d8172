"""Do all ranks hold the same weights? Asked by numbers that ride along with the gradients (step 10 on the walk).

Every rank gets the same sums and adds them in the same order, so all weights stay equal to the last bit, unless memory
fails or the hardware of ranks differs. A checksum over the bits of the weights is an integer, so it is the same on any
device and in any order; six digits of it are summed as side numbers, exactly up to 65,000 ranks, and each rank compares
the sum with its own digits times the ranks.
"""

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.engine.build import NUM_NOTES, Parts, share_array
from lockstep.engine.giving_up import SLOW
from lockstep.engine.state import list_changing, refresh
from lockstep.errors import SharedError

DIGITS = slice(SLOW + 1, NUM_NOTES)
BITS = 8  # of a digit
# Norms of the weights that differ by less are unlike hardware's rounding; such ranks are brought together again.
TOLERANCE = 1e-4


def note_weights(parts: Parts) -> None:
    """Let the next step carry the checksum of this rank's weights as they are before it."""
    total = parts.weights.view(torch.int32).sum(dtype=torch.int64)
    shifts = BITS * torch.arange(DIGITS.stop - DIGITS.start, device=total.device)
    parts.note[DIGITS] = ((total >> shifts) & ((1 << BITS) - 1)).to(parts.note.dtype)


def find_drift(parts: Parts, side: Tensor, world: World) -> str:
    """After a step that carried the checksums: nothing if all ranks are equal, or a sentence once they are again.

    Every rank must call it, and a run whose ranks are far apart ends here.
    """
    if torch.equal(side[DIGITS], world.size * parts.note[DIGITS]):
        return ""
    norms = [float(norm) for norm in world.gather_values(parts.weights.double().norm().item())]
    usual = sorted(norms)[len(norms) // 2]
    worst = max(range(len(norms)), key=lambda rank: abs(norms[rank] - usual))
    spread = abs(norms[worst] - usual) / max(usual, 1e-30)
    if not spread <= TOLERANCE:
        # Of two ranks nobody can tell which is the one that is wrong.
        who = (
            "Ranks 0 and 1 no longer hold the same weights"
            if len(norms) == 2
            else (f"Rank {worst} no longer holds the weights of the others")
        )
        raise SharedError(
            f"{who} (their norm is {norms[worst]:.6g} on rank {worst} and {usual:.6g} elsewhere); check the memory of "
            "those machines and go on with --resume."
        )
    for array in list_changing(parts).over_layout.values():
        share_array(world, array)
    refresh(parts)
    return (
        f"The ranks' weights differed in their last digits (rank {worst}: {spread:.0e} of their norm), as they do on "
        "unlike hardware; all ranks went on with rank 0's."
    )
