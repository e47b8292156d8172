"""What each update rule keeps, moves and sends: the bytes that its time follows from. Torch-free.

With half-precision gradients an update reads and writes FP32 masters, FP32 moments and a half copy of the weights; LARS
and LAMB pass over them twice, for norms first (`kernels/flat_update.py`). All rules send the same gradients: what sets
them apart is what they keep, and how much memory an update moves. Sharded over the devices of a node, each device keeps
and moves a part, and the new weights are gathered.
"""

from dataclasses import dataclass

from lockstep.errors import LockstepError


@dataclass(frozen=True)
class RuleCosts:
    """Bytes for each parameter; gradients and the weights that the network computes with take `width` bytes each."""

    name: str
    num_moments: int
    norm_reads: int  # FP32 arrays that the pass for norms reads beside the gradient; 0: there is no such pass
    has_ratios: bool

    def state_bytes(self, width: int) -> int:
        """Kept beside weights and gradients: moments, and masters where weights are half."""
        return 4 * self.num_moments + (4 if width < 4 else 0)

    def moved_bytes(self, width: int) -> int:
        """Read and written by one update."""
        # Masters (which are the weights where nothing is half) and moments both ways, the gradient, the half copy.
        update = 2 * 4 * (1 + self.num_moments) + width + (width if width < 4 else 0)
        return update + (4 * self.norm_reads + width if self.norm_reads else 0)


RULES = {
    "sgd": RuleCosts("sgd", 1, 0, False),
    "lars": RuleCosts("lars", 1, 1, True),
    "lamb": RuleCosts("lamb", 2, 3, True),
    "adamw": RuleCosts("adamw", 2, 0, False),
}


# Rules of a run whose steps these costs do not describe, and why.
UNPLANNED = {
    "muon": "its update takes products of matrices, for which no profile has a time",
    "svrg": "it takes every sample of a step twice, and all of them again for an anchor",
    "halp": "it takes every sample of a step twice, and all of them again for an anchor",
}


def find_rule(name: str) -> RuleCosts:
    if name in UNPLANNED:
        raise LockstepError(
            f"Steps of optim.name = {name} cannot be planned for yet: {UNPLANNED[name]}; plan with one of "
            f"{', '.join(RULES)}."
        )
    if name not in RULES:
        raise LockstepError(f"There is no update rule {name[:40]}; there are {', '.join([*RULES, *UNPLANNED])}.")
    return RULES[name]
