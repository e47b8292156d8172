"""What happens to runs: which fault, to whom, when; a pure function of a seed. Torch-free."""

import random
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
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
    "lost store",
    "full disk",
    "read-only disk",
    "slow disk",
    "blocked read",
    "late read",
    "cut network",
    "cut network, mended",
]
# How a run goes on: its command is started again, its launcher starts the ranks again, torchrun's agents on two nodes
# are started again, or they start the ranks again.
Way = Literal["resume", "restarts", "two nodes", "two nodes, restarts"]
TWO_NODES: frozenset[Way] = frozenset({"two nodes", "two nodes, restarts"})
RESTARTING: frozenset[Way] = frozenset({"restarts", "two nodes, restarts"})
# What a fault waits for: the run's start, the begin of what has a record at its end (`hook.py` tells), or the first
# record of a kind in the part of the run that is going on.
Moment = Literal[
    "start",
    "evaluation",
    "checkpoint",
    "RunStarted",
    "PlanChosen",
    "StepDone",
    "Evaluated",
    "CheckpointSaved",
    "RunEnded",
]
# The moments by the phase that follows them.
PHASES: dict[str, Moment] = {
    "start-up": "start",
    "tuning": "RunStarted",
    "first steps": "PlanChosen",
    "step": "StepDone",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "after an evaluation": "Evaluated",
    "after a checkpoint": "CheckpointSaved",
    "teardown": "RunEnded",
}
# Faults by how often they are drawn: most of what happens to clusters is a process that is gone.
ON_ONE_MACHINE: dict[Kind, int] = {
    "SIGKILL": 6,
    "SIGSEGV": 3,
    "SIGSTOP": 1,
    "SIGSTOP, SIGCONT": 2,
    "SIGTERM": 2,
    "SIGINT": 2,
    "SIGINT twice": 1,
    "SIGUSR1": 1,
    "held interpreter": 1,
    "lost store": 1,
    "full disk": 1,
    "read-only disk": 1,
    "slow disk": 1,
    "blocked read": 1,
    "late read": 1,
}
ON_TWO_NODES: dict[Kind, int] = {"cut network": 2, "cut network, mended": 2, "lost store": 1, "SIGKILL": 1}
# Without the network that is cut for good: two agents that need each other can only give up.
RESTARTED_ON_TWO_NODES: dict[Kind, int] = {
    "SIGKILL": 3,
    "SIGSEGV": 1,
    "SIGSTOP": 1,
    "cut network, mended": 1,
    "lost store": 1,
}
KINDS: dict[Way, Mapping[Kind, int]] = {
    "resume": ON_ONE_MACHINE,
    "restarts": ON_ONE_MACHINE,
    "two nodes": ON_TWO_NODES,
    "two nodes, restarts": RESTARTED_ON_TWO_NODES,
}
# The order in which ways take turns, and how many faults a run of each meets: starting on two nodes takes longest.
TURNS: tuple[Way, ...] = ("resume", "restarts", "two nodes", "resume", "restarts", "two nodes, restarts")
FAULTS_A_RUN: dict[Way, int] = {"resume": 5, "restarts": 5, "two nodes": 2, "two nodes, restarts": 3}

LAUNCHER = -1  # a target; on two nodes: the agent that holds the store
# What only ranks can meet: the launcher's interpreter holds nobody up.
OF_RANKS: frozenset[Kind] = frozenset({"held interpreter", "cut network", "cut network, mended"})
OF_LAUNCHER: frozenset[Kind] = frozenset({"lost store"})
OF_ALL: frozenset[Kind] = frozenset({"full disk", "read-only disk", "slow disk", "blocked read", "late read"})
# What a run takes without a part of it ending.
SURVIVED: frozenset[Kind] = frozenset(
    {"SIGSTOP, SIGCONT", "held interpreter", "slow disk", "blocked read", "late read", "cut network, mended"}
)
# What a launcher with restarts left heals by itself, when it happens to a rank.
HEALED: frozenset[Kind] = frozenset({"SIGKILL", "SIGSEGV", "SIGSTOP"})


@dataclass(frozen=True)
class Fault:
    """One fault: `delay_s` after a moment, to a rank or the launcher; a disk's or a file's is everybody's."""

    kind: Kind
    target: int  # a rank, or LAUNCHER
    phase: str
    delay_s: float
    choice: float = 0.0  # in [0, 1): which of many, where a fault has to choose, such as a file

    @property
    def moment(self) -> Moment:
        return PHASES[self.phase]

    @property
    def victim(self) -> str:
        if self.kind in OF_ALL:
            return "all"
        return "launcher" if self.target == LAUNCHER else f"rank {self.target}"

    @property
    def is_survived(self) -> bool:
        # The launcher holds no training state: one that is stopped holds nobody up, and is woken in the end.
        return self.kind in SURVIVED or (self.kind == "SIGSTOP" and self.target == LAUNCHER)

    @property
    def is_healed(self) -> bool:
        return self.kind in HEALED and self.target != LAUNCHER


@dataclass(frozen=True)
class RunPlan:
    """One run: how it goes on, and what it meets."""

    number: int  # from 1
    way: Way
    faults: tuple[Fault, ...]


def plan_runs(seed: int, num_ranks: int, left_out: Container[str] = ()) -> Iterator[RunPlan]:
    """Runs without end, and without the ways and kinds left out; the same for the same seed."""
    phases = _list_phases(seed)
    for number, way in enumerate(cycle(way for way in TURNS if way not in left_out), 1):
        generator = random.Random(f"{seed} {number}")
        faults = [_draw(generator, way, phase, num_ranks, left_out) for phase in islice(phases, FAULTS_A_RUN[way])]
        yield RunPlan(number, way, tuple(sorted(faults, key=_outlast)))


def _outlast(fault: Fault) -> int:
    """What comes first in a run: while a fault is survived the run goes on, and after its end nobody meets anything."""
    if fault.phase == "teardown":
        return 3
    return fault.is_survived + (fault.kind == "SIGSTOP" and fault.target == LAUNCHER)


def _draw(generator: random.Random, way: Way, phase: str, num_ranks: int, left_out: Container[str]) -> Fault:
    weights = {kind: weight for kind, weight in KINDS[way].items() if kind not in left_out}
    (kind,) = generator.choices(list(weights), list(weights.values()))
    targets: Sequence[int] = range(LAUNCHER, num_ranks)
    if kind in OF_LAUNCHER:
        targets = (LAUNCHER,)
    elif kind in OF_RANKS:
        targets = range(num_ranks)
    return Fault(kind, generator.choice(targets), phase, generator.uniform(0.0, 0.3), generator.random())


def _list_phases(seed: int) -> Iterator[str]:
    """The phases of faults: all of them in turn, in an order that changes, so that few faults meet them all."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(sorted(PHASES), len(PHASES))
