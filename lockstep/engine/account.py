"""Where a run's time went: windows of steps, T = S · N · e, and who held the others up (step 10 on the walk).

What memory it took, too, where a device counts it.
"""

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from lockstep.comm.links import measure_links
from lockstep.comm.straggler import NOTABLE_SHARE, RankTimes, find_straggler, typical_times
from lockstep.comm.topology import Topology
from lockstep.comm.world import World
from lockstep.engine.timing import Kind
from lockstep.events import AnchorTaken, CheckpointSaved, Evaluated, Event

TRAINING: tuple[Kind, ...] = ("input", "compute", "communicate")


@dataclass
class Window:
    """Some steps: how many, what they trained, and where this rank's time went meanwhile."""

    steps: int = 0
    images: int = 0
    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(TRAINING, 0.0))

    def add(self, other: "Window") -> None:
        self.steps += other.steps
        self.images += other.images
        for kind in TRAINING:
            self.seconds[kind] += other.seconds[kind]

    @property
    def total_s(self) -> float:
        return sum(self.seconds[kind] for kind in TRAINING)

    @property
    def rank_times(self) -> RankTimes:
        """What a step cost this rank alone."""
        return RankTimes(self.seconds["input"] / self.steps, self.seconds["compute"] / self.steps)

    def mean_s(self, kind: Kind) -> float:
        """Seconds a step spent on one kind."""
        return self.seconds[kind] / self.steps


class Balance(NamedTuple):
    """The whole run: T, S, N, e, and the shares of the time that training took."""

    images: int
    train_s: float  # of steps
    images_per_second: float  # T, over steps and passes for anchors
    speed_one_rank: float | None  # S: what one rank would do if it never waited, likewise
    efficiency: float | None  # e: the share of the time it did not
    share_compute: float
    share_comm: float
    share_input: float


@dataclass
class Beside:
    """Seconds of a run that were no steps."""

    startup_s: float = 0.0  # from the start to the first step
    evaluate_s: float = 0.0
    checkpoint_s: float = 0.0
    anchor_s: float = 0.0


class Startup:
    """What a rank does until its first step is done, part by part, by the host's clock."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self.seconds: dict[str, float] = {}

    def mark(self, what: str) -> None:
        """The time since the last mark was spent on this."""
        now_s = time.monotonic()
        self.seconds[what] = self.seconds.get(what, 0.0) + now_s - self._last_s
        self._last_s = now_s


class Account:
    """Counts steps into the window since the last record, and windows into the run."""

    def __init__(self) -> None:
        self._first = Window()  # the first step, which pays for memory, threads and kernels that no later step pays for
        self._later = Window()  # all later ones
        self._rank_times: list[RankTimes] = []  # of every window
        self.window = Window()  # since the last record
        self._beside = Beside()

    def hear(self, event: Event) -> None:
        """What a run says of itself also tells what took time beside the steps."""
        match event:
            case Evaluated():
                self._beside.evaluate_s += event.seconds
            case CheckpointSaved():
                self._beside.checkpoint_s += event.seconds
            case AnchorTaken():
                self._beside.anchor_s += event.seconds

    def note_startup(self, seconds: float) -> None:
        """The first step is about to begin."""
        self._beside.startup_s = seconds

    def beside(self) -> Beside:
        """What was no step; the first one, which the balance leaves out unless it was the only one, is start-up."""
        first_s = self._first.total_s if self._later.images else 0.0
        return replace(self._beside, startup_s=self._beside.startup_s + first_s)

    @property
    def is_empty(self) -> bool:
        """Whether no window has been closed yet."""
        return not self._first.steps

    def count(self, num_images: int) -> None:
        """A step over all ranks' images was taken."""
        self.window.steps += 1
        self.window.images += num_images

    def close_window(self, seconds: dict[Kind, float]) -> Window:
        """End the window, of which the clock says where the time went, and begin another."""
        window, self.window = self.window, Window()
        window.seconds = seconds
        (self._first if self.is_empty else self._later).add(window)
        self._rank_times.append(window.rank_times)
        return window

    @property
    def _spent(self) -> Window:
        return self._later if self._later.images else self._first

    def balance(self, world: World, *, alone: bool) -> Balance:
        """T = S · N · e, averaged over the ranks; `alone` asks no other, which may be gone.

        Passes for anchors are part of what these images took, so T is over their seconds, too. They are taken to wait
        as much as steps do: e is that of the steps, and S is lower by as much as T.
        """
        spent = self._spent
        seconds = torch.tensor([spent.seconds[kind] for kind in TRAINING], dtype=torch.float64)
        if not alone:
            seconds = world.sum(seconds) / world.size
        waited, computed, communicated = seconds.tolist()
        total = max(waited + computed + communicated, 1e-9)
        trained = total / (total + self._beside.anchor_s)  # the share of the time in which images are trained on
        throughput = trained * spent.images / total
        speed = trained * spent.images / world.size / computed if computed else None
        return Balance(
            images=spent.images,
            train_s=total,
            images_per_second=throughput,
            speed_one_rank=speed,
            efficiency=throughput / (speed * world.size) if speed else None,
            share_compute=computed / total,
            share_comm=communicated / total,
            share_input=waited / total,
        )

    def gather_times(self, world: World) -> list[RankTimes]:
        """What a step cost each rank before it waited for others; every rank must call it."""
        if not self._rank_times:
            return []
        rows = world.gather_values(typical_times(self._rank_times[1:] or self._rank_times))
        return [RankTimes(*map(float, row)) for row in rows]

    def name_straggler(self, times: list[RankTimes], world: World, topology: Topology, gradient_bytes: int) -> str:
        """The sentence on who held the others up, if anyone did; every rank must call it."""
        if not times:
            return ""
        spent = self._spent
        waited = world.broadcast_value(spent.seconds["communicate"] / max(spent.total_s, 1e-9))
        links = measure_links(world, topology) if waited > NOTABLE_SHARE else []
        nodes = [topology.node_of(rank) for rank in range(world.size)]
        straggler = find_straggler(times, spent.total_s / spent.steps, links, gradient_bytes, nodes)
        return straggler.text if straggler else ""


def forget_peak(device: torch.device) -> None:
    """From here on memory counts: what trials took is no part of the run."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read_peak(device: torch.device) -> int | None:
    """The most bytes that were reserved at once, by recordings and batches ahead too; None where nobody counts."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
