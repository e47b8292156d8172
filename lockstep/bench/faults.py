"""What `chaos.py` does to runs: which fault, to whom, when; a pure function of a seed. Torch-free."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "SIGKILL",
    "SIGSEGV",
    "SIGSTOP",
    "SIGSTOP, SIGCONT",
    "SIGTERM",
    "SIGINT",
    "SIGINT twice",
    "SIGUSR1",
    "held interpreter",
    "full disk",
    "read-only disk",
]
# What a fault waits for: the run's start, or the first record of a kind in the part of the run that is going on.
Moment = Literal["start", "RunStarted", "PlanChosen", "StepDone", "Evaluated", "CheckpointSaved", "RunEnded"]
# The moments by the phase that follows them.
PHASES: dict[str, Moment] = {
    "start-up": "start",
    "tuning": "RunStarted",
    "first steps": "PlanChosen",
    "step": "StepDone",
    "after an evaluation": "Evaluated",
    "after a checkpoint": "CheckpointSaved",
    "teardown": "RunEnded",
}
# Faults by how often they are drawn: most of what happens to clusters is a process that is gone.
SIGNALS: dict[Kind, int] = {
    "SIGKILL": 6,
    "SIGSEGV": 3,
    "SIGSTOP": 1,
    "SIGSTOP, SIGCONT": 2,
    "SIGTERM": 2,
    "SIGINT": 2,
    "SIGINT twice": 1,
    "SIGUSR1": 1,
    "held interpreter": 1,
}
DISKS: dict[Kind, int] = {"full disk": 1, "read-only disk": 1}
LAUNCHER = -1


@dataclass(frozen=True)
class Fault:
    """One fault: `delay_s` after a moment, to a rank or the launcher; a disk's is everybody's."""

    number: int
    kind: Kind
    target: int  # a rank, or LAUNCHER
    phase: str
    delay_s: float

    @property
    def moment(self) -> Moment:
        return PHASES[self.phase]

    @property
    def victim(self) -> str:
        return "launcher" if self.target == LAUNCHER else f"rank {self.target}"


def plan_faults(count: int, seed: int, num_ranks: int, *, with_disks: bool) -> list[Fault]:
    """So many faults, the same for the same seed; phases in turn, so that few faults meet them all."""
    generator = random.Random(seed)
    weights = SIGNALS | (DISKS if with_disks else {})
    phases: list[str] = []
    faults = []
    for number in range(count):
        if not phases:
            phases = generator.sample(sorted(PHASES), len(PHASES))
        (kind,) = generator.choices(list(weights), list(weights.values()))
        # The launcher holds no training state: a stopped one holds nobody up, and its signals are passed on.
        targets: Sequence[int] = range(num_ranks) if kind in ("SIGSTOP", "held interpreter") else range(-1, num_ranks)
        faults.append(Fault(number, kind, generator.choice(targets), phases.pop(), generator.uniform(0.0, 0.3)))
    return faults
