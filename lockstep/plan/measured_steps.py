"""A run's records -> what a step of it took, on average, for whoever compares it with a prediction. Torch-free.

Computing, waiting for input and for others are those of all steps but the first, on all ranks. How computing divides
into passes, how much longer the slowest rank takes and how long messages last is read off the timelines, a few steps of
every rank. A message lasts from when the last rank joins in: as long as on the rank that waited least. Whoever waits
longer than all messages last waits for a rank. Nothing in a record is trusted.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, TypeVar

from lockstep.events import Event, RunEnded, RunPredicted, RunStarted, TimelineTaken

FEWEST_STEPS = 10  # after the first: fewer say nothing of the others
SAME_IMAGES = 0.05  # a step's images may differ by this share from those it was predicted for
LONGEST = 1e15  # of any number of seconds, or of images a second, that is one
PASSES = ("forward", "backward", "update")

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Measured:
    """A step as it turned out, on average, and the run."""

    step_s: float
    input_s: float
    compute_s: float
    wait_s: float  # for messages and for the slowest rank
    passes: dict[str, float]  # of computing; empty where no timeline tells
    slowest_s: float | None
    messages_s: float | None
    on_cpu: bool  # where whoever decodes takes cores from computing
    ended: RunEnded


class Span(NamedTuple):
    lane: str
    name: str
    step: int
    seconds: float


def find_last(part: Iterable[Event], kind: type[Kind]) -> Kind | None:
    found = None
    for event in part:
        if isinstance(event, kind):
            found = event
    return found


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def is_time(seconds: float) -> bool:
    return 0 < seconds < LONGEST  # which a NaN is not


def measure_steps(part: Sequence[Event], predicted: RunPredicted) -> Measured | str:
    """What a step of the part took, and why that cannot be said."""
    start, ended = find_last(part, RunStarted), find_last(part, RunEnded)
    if start is None or ended is None:
        return "The run has not ended, so that nothing is compared yet."
    if ended.status not in ("finished", "interrupted"):
        return "The run failed, so that its steps are not compared with the prediction."
    if ended.world_size != predicted.world_size:
        return f"The prediction is for {predicted.world_size:,} ranks, not for {ended.world_size:,}."
    num_steps = ended.step - start.start_step - 1  # the first step pays for what no later one pays for
    if num_steps < FEWEST_STEPS:
        return f"Only {max(0, num_steps + 1)} steps were taken, too few to be compared with the prediction."
    if not abs(ended.images / num_steps / predicted.images - 1) <= SAME_IMAGES:
        return "The steps were of other batches than the prediction, so that they are not compared."
    shares = ended.share_input, ended.share_compute, ended.share_comm
    if not is_time(ended.train_s) or not all(0 <= share <= 1 for share in shares) or not ended.share_compute:
        return "The run does not say where its time went, so that nothing can be compared."
    step_s = ended.train_s / num_steps
    input_s, compute_s, wait_s = (share * step_s for share in shares)
    timelines = [event for event in part if isinstance(event, TimelineTaken) and event.num_steps > 0]
    messages_s = _time_messages(timelines, predicted.world_size)
    slowest_s = _find_slowest(timelines, predicted.world_size, wait_s)
    if slowest_s is not None and messages_s is not None:
        # Timelines are of a few steps alone: what all steps waited beyond messages they waited for a rank.
        slowest_s = max(slowest_s, wait_s - messages_s)
    return Measured(
        step_s=step_s,
        input_s=input_s,
        compute_s=compute_s,
        wait_s=wait_s,
        passes=_divide(timelines, compute_s),
        slowest_s=slowest_s,
        messages_s=messages_s,
        on_cpu=start.device.endswith("CPU"),
        ended=ended,
    )


def waits_for_ranks(timelines: Sequence[TimelineTaken], world_size: int) -> bool:
    """Whether ranks wait for each other more than for messages; no where timelines do not tell."""
    messages_s = _time_messages(timelines, world_size)
    waits: dict[tuple[int, int], float] = {}
    for timeline in timelines:
        for span in _read_spans(timeline):
            waited_s = span.seconds if (span.lane, span.name) == ("step", "communicate") else 0.0
            waits[timeline.rank, span.step] = waits.get((timeline.rank, span.step), 0.0) + waited_s
    return messages_s is not None and messages_s < fmean(waits.values()) / 2


def _read_spans(timeline: TimelineTaken) -> list[Span]:
    """The spans that are ones, of the steps that the timeline is of."""
    found = []
    told: list[object] = list(timeline.spans)
    for span in told:
        if not isinstance(span, dict):
            continue
        start, end, step = (span.get(name) for name in ("start_s", "end_s", "step"))
        if not isinstance(start, int | float) or not isinstance(end, int | float) or type(step) is not int:
            continue
        if 0 <= step - timeline.first_step < timeline.num_steps and 0 <= start <= end < LONGEST:
            found.append(Span(str(span.get("lane")), str(span.get("name")), step, float(end - start)))
    return found


def _divide(timelines: Sequence[TimelineTaken], compute_s: float) -> dict[str, float]:
    """Seconds of all computing by pass, in the shares of the timelines."""
    sums = dict.fromkeys(PASSES, 0.0)
    for timeline in timelines:
        for span in _read_spans(timeline):
            if span.lane == "step" and span.name in sums:
                sums[span.name] += span.seconds
    total = sum(sums.values())
    return {name: seconds / total * compute_s for name, seconds in sums.items()} if total > 0 else {}


def _group(timelines: Sequence[TimelineTaken], world_size: int) -> list[dict[int, list[Span]]]:
    """Timelines of the same steps by all ranks, each as spans by rank; those that a rank is missing from are left out.

    One rank waits for nobody, and many ranks send no timeline.
    """
    groups: dict[int, dict[int, list[Span]]] = {}
    for timeline in timelines:
        groups.setdefault(timeline.first_step, {})[timeline.rank] = _read_spans(timeline)
    return [group for group in groups.values() if world_size > 1 and len(group) == world_size]


def _find_slowest(timelines: Sequence[TimelineTaken], world_size: int, wait_s: float) -> float | None:
    """By how much the slowest rank gets to its last gradient later than the mean one, of what ranks waited."""
    waits = []
    for group in _group(timelines, world_size):
        by_step: dict[int, list[float]] = {}
        for spans in group.values():
            own: dict[int, float] = {}
            for span in spans:
                if span.lane == "step" and span.name in ("input", "forward", "backward"):
                    own[span.step] = own.get(span.step, 0.0) + span.seconds
            for step, seconds in own.items():
                by_step.setdefault(step, []).append(seconds)
        waits += [max(times) - fmean(times) for times in by_step.values() if len(times) == world_size]
    return min(fmean(waits), wait_s) if waits else None


def _time_messages(timelines: Sequence[TimelineTaken], world_size: int) -> float | None:
    """Seconds of all messages of a step, each from when the last rank joined in."""
    steps = []
    for group in _group(timelines, world_size):
        lasted: dict[tuple[int, str], list[float]] = {}
        for spans in group.values():
            for span in spans:
                if span.lane == "all-reduce":
                    lasted.setdefault((span.step, span.name), []).append(span.seconds)
        by_step: dict[int, float] = {}
        for (step, _), times in lasted.items():
            by_step[step] = by_step.get(step, 0.0) + min(times)
        steps += list(by_step.values())
    return fmean(steps) if steps else None
