"""A run's records in order, as what pages draw: parts joined, each record with where it lies on every axis.

A run that was resumed repeats what came after its last checkpoint: of a step told twice the later part's record counts.
Nothing here is trusted: records may come from anyone, and what is no number becomes None.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from lockstep.events import (
    AnchorTaken,
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    InputChosen,
    LayersMeasured,
    MistakesFound,
    Notice,
    PlanChosen,
    RunEnded,
    RunStarted,
    StepDone,
    TimelineTaken,
)
from lockstep.report.summary import measure_wall_s, split_parts, summarize

MOST_POINTS = 2000  # of one curve: more than a screen has pixels
# Two parts of one step count as equal this close together.
SAME_EPOCH = 1e-9

Kind = TypeVar("Kind", bound=Event)


class Spot(NamedTuple):
    """Where something happened, on each of the axes that a reader may choose."""

    step: int
    epoch: float
    wall_s: float  # of running, since the very first start


@dataclass(frozen=True)
class Placed:
    """A record, and where it lies."""

    spot: Spot
    event: Event


@dataclass(frozen=True)
class Spent:
    """Where the seconds of one part went."""

    compute: float
    communication: float
    input: float
    evaluation: float
    checkpoint: float
    startup: float
    anchors: float
    other: float


class History:
    """All parts of a run as one."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = list(events)
        self.summary: dict[str, Any] = summarize(self.events)
        self.parts = split_parts(self.events)
        self.starts = [part[0] for part in self.parts if isinstance(part[0], RunStarted)]
        self.start = self.starts[-1]
        self.boundaries: list[Spot] = []  # where each part but the first began
        self._placed: list[Placed] = []
        before_s = 0.0
        for part, start in zip(self.parts, self.starts, strict=True):
            self._join(part, start, before_s)
            before_s += measure_wall_s(part)

    @cached_property
    def is_predicted(self) -> bool:
        """Whether the planner wrote the records (`plan/predicted.py`), and nothing was trained."""
        return any(plan.source == "predicted" for plan in self.all(PlanChosen))

    @property
    def ended(self) -> RunEnded | None:
        """How the last part ended; None where its log stops before that."""
        return next((event for event in self.parts[-1] if isinstance(event, RunEnded)), None)

    def placed(self, kind: type[Kind]) -> list[tuple[Spot, Kind]]:
        """The records of a kind that count, in order."""
        return [(placed.spot, placed.event) for placed in self._placed if isinstance(placed.event, kind)]

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Every record of a kind, those done again among them."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[Kind]) -> Kind | None:
        """The last record of a kind."""
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)

    @cached_property
    def steps(self) -> list[tuple[Spot, StepDone]]:
        return self.placed(StepDone)

    @cached_property
    def evaluations(self) -> list[tuple[Spot, Evaluated]]:
        return self.placed(Evaluated)

    @cached_property
    def epochs(self) -> list[EpochDone]:
        """One record for each epoch: the last that was told."""
        found = {event.epoch: event for event in self.all(EpochDone)}
        return [found[epoch] for epoch in sorted(found)]

    def _join(self, part: Sequence[Event], start: RunStarted, before_s: float) -> None:
        per_epoch = max(1, start.steps_per_epoch)
        begin = start.start_step / per_epoch
        # By epochs, as in the summary: a part with another global batch numbers its steps anew.
        self._placed = [placed for placed in self._placed if not placed.spot.epoch > begin + SAME_EPOCH]
        if start is not self.starts[0]:
            self.boundaries = [spot for spot in self.boundaries if not spot.epoch > begin + SAME_EPOCH]
            self.boundaries.append(Spot(start.start_step, begin, before_s))
        for event in part:
            wall_s = before_s + event.time_s - start.time_s
            match event:
                case StepDone() | Evaluated():
                    spot = Spot(event.step, event.epoch, wall_s)
                case AnchorTaken() | CheckpointSaved() | LayersMeasured() | MistakesFound():
                    spot = Spot(event.step, event.step / per_epoch, wall_s)
                case _:
                    continue
            self._placed.append(Placed(spot, event))


def list_warnings(history: History) -> list[str]:
    """What the run warned of, each sentence once, with how often it came."""
    counts: dict[str, int] = {}
    for notice in history.all(Notice):
        if notice.level == "warning":
            text = f"rank {notice.rank}: {notice.text}" if notice.rank else notice.text
            counts[text] = counts.get(text, 0) + 1
    return [text if times == 1 else f"{text} ({times} times)" for text, times in counts.items()]


def list_notes(history: History) -> list[tuple[Spot, str]]:
    """What the run let its reader know, each sentence once, and where it first came."""
    found: dict[str, Spot] = {}
    before_s = 0.0
    for part, start in zip(history.parts, history.starts, strict=True):
        step = start.start_step
        for event in part:
            if isinstance(event, StepDone):
                step = event.step
            elif isinstance(event, Notice) and event.level == "info":
                text = f"rank {event.rank}: {event.text}" if event.rank else event.text
                wall_s = before_s + event.time_s - start.time_s
                found.setdefault(text, Spot(step, step / max(1, start.steps_per_epoch), max(0.0, wall_s)))
        before_s += measure_wall_s(part)
    return [(spot, text) for text, spot in found.items()]


def find_timelines(history: History) -> list[TimelineTaken]:
    """The last timeline of each rank, of the last steps that any were taken of."""
    taken = history.all(TimelineTaken)
    last = {timeline.rank: timeline for timeline in taken if timeline.first_step == taken[-1].first_step}
    return [last[rank] for rank in sorted(last)]


def find_plan(history: History) -> PlanChosen | None:
    """How the last part takes its steps."""
    return next((event for event in history.parts[-1] if isinstance(event, PlanChosen)), None)


def find_input(history: History) -> InputChosen | None:
    return next((event for event in reversed(history.parts[-1]) if isinstance(event, InputChosen)), None)


def measure_spent(part: Sequence[Event]) -> Spent:
    """The seconds of a part by what they went to; those of a killed one as its step records tell them."""
    ended = next((event for event in part if isinstance(event, RunEnded)), None)
    wall_s = measure_wall_s(list(part))
    evaluation = sum(event.seconds for event in part if isinstance(event, Evaluated))
    checkpoint = sum(event.seconds for event in part if isinstance(event, CheckpointSaved))
    anchors = sum(event.seconds for event in part if isinstance(event, AnchorTaken))
    startup = _measure_startup(part)
    if ended:
        compute, communication, waited = (
            share * ended.train_s for share in (ended.share_compute, ended.share_comm, ended.share_input)
        )
        # Runs of earlier versions did not tell these; their records of each still do.
        evaluation, checkpoint = ended.evaluate_s or evaluation, ended.checkpoint_s or checkpoint
        startup = ended.startup_s or startup
    else:
        compute = communication = waited = 0.0
        assert isinstance(part[0], RunStarted)
        before = part[0].start_step
        for event in part:
            if isinstance(event, StepDone):
                steps, before = max(0, event.step - before), event.step
                compute += steps * event.compute_s
                communication += steps * event.comm_s
                waited += steps * event.input_s
    told = (compute, communication, waited, evaluation, checkpoint, startup, anchors)
    known = [max(0.0, number(value) or 0.0) for value in told]
    other = max(0.0, (number(wall_s) or 0.0) - sum(known))
    return Spent(*[*known, other])


def _measure_startup(part: Sequence[Event]) -> float:
    """From a part's start to its first step, by the first record of steps."""
    start, first = part[0], next((event for event in part if isinstance(event, StepDone)), None)
    if first is None or not isinstance(start, RunStarted):
        return 0.0
    return first.time_s - start.time_s - max(0, first.step - start.start_step) * first.step_s


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def thin(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Which of many points to draw: both ends, and of each stretch the lowest and the highest."""
    if len(values) <= most:
        return list(range(len(values)))
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(values) - 1}
    for stretch in range(stretches):
        first, last = (len(values) * bound // stretches for bound in (stretch, stretch + 1))
        known = [(value, index) for index in range(first, last) if (value := number(values[index])) is not None]
        if known:
            kept |= {min(known)[1], max(known)[1]}
    return sorted(kept)
