"""A few steps as spans: what a rank did when, by its clock's trace and its sums' moments (step 10 on the walk).

The lane "step" is cut by the marks of `timing.py`, so that its spans touch each other and add up to the whole. A
recording's cuts are events that every replay passes anew, so that only those of the last replay can still be read; the
replays before it, which launch the same kernels, are cut in the same proportion.

Threads make batches beside the steps. They go by the host's clock, which is set against the device's at the moment for
which the host waits anyway, at the end: to some ten microseconds.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from lockstep.comm.moment import Moment, seconds_between
from lockstep.data.pipeline import Made
from lockstep.engine.build import Parts
from lockstep.engine.timing import Clock, Trace

NUM_STEPS = 3
DIGITS = 7  # a tenth of a microsecond


class Span(NamedTuple):
    """Something that went on for a while; the fields are those of `events.TimelineTaken`."""

    lane: str
    name: str
    step: int
    start_s: float
    end_s: float


class Passes(NamedTuple):
    """Seconds of a step and its parts, by the device; the rest of the step is the update."""

    step_s: float
    forward_s: float
    backward_s: float

    @property
    def update_s(self) -> float:
        return max(0.0, self.step_s - self.forward_s - self.backward_s)


Timed = TypeVar("Timed")


def pick_middle(found: Sequence[Timed], step_s: Callable[[Timed], float]) -> Timed:
    """That of the median step, whole: medians of its parts, each by itself, would not add up to any step."""
    return sorted(found, key=step_s)[(len(found) - 1) // 2]


def time_steps(clock: Clock, take_step: Callable[[], object], count: int) -> list[Passes]:
    """So many steps, launched one behind the other as a run does, each in its parts."""
    clock.take()
    clock.begin_trace()
    try:
        for _ in range(count):
            clock.mark("input")
            take_step()
        clock.take()
    finally:
        trace = clock.end_trace()
    parts: list[dict[str, float]] = [{} for _ in range(count)]
    for span in cut_steps(trace, 0):
        parts[span.step][span.name] = parts[span.step].get(span.name, 0.0) + span.end_s - span.start_s
    return [Passes(sum(part.values()), part.get("forward", 0.0), part.get("backward", 0.0)) for part in parts]


class Timeline:
    """Watches some steps of one rank; `list_made` tells when batches were made."""

    def __init__(self, parts: Parts, first_step: int, list_made: Callable[[], Sequence[Made]] = tuple) -> None:
        self._parts = parts
        self._list_made = list_made
        self.first_step = first_step
        parts.clock.begin_trace()
        if parts.hybrid:
            parts.hybrid.timed, parts.hybrid.channel.times = [], True

    def end(self, last_step: int) -> dict[str, Any]:
        """All that was seen, as a record has it; the clock must have been taken after the last step."""
        trace = self._parts.clock.end_trace()
        spans = cut_steps(trace, self.first_step)
        seconds = spans[-1].end_s if spans else 0.0
        num_steps = last_step - self.first_step + 1
        spans += place_batches(trace.start_s, seconds, self._list_made(), last_step)
        if hybrid := self._parts.hybrid:
            timed, hybrid.timed, hybrid.channel.times = hybrid.timed or [], None, False
            moments = [(work.begun, work.done) for work in timed]
            spans += place_sums(trace.start, moments, name_buffers(self._parts), self.first_step, num_steps)
        return {
            "first_step": self.first_step,
            "num_steps": num_steps,
            "seconds": seconds,
            "spans": [span._asdict() for span in spans],
        }


def cut_steps(trace: Trace, first_step: int) -> list[Span]:
    """The lane of steps, without gaps; what a step ends with belongs to it, up to the input of the next."""
    times = [0.0, *(seconds_between(trace.start, moment) for _, moment in trace.points)]
    shares = _read_shares(trace, times)
    names = [name for name, _ in trace.points]
    spans: list[Span] = []
    step, has_computed, has_waited = first_step, False, False
    for index, (name, (start, end)) in enumerate(zip(names, pairwise(times), strict=True)):
        if name == "input" and has_computed:
            step, has_computed, has_waited = step + 1, False, False
        if name == "compute" and has_waited:
            name = "update"
        elif name == "compute":
            # A rank alone has its update in the recording; otherwise only what is left of the backward pass.
            is_alone = index in trace.replays and names[index + 1 : index + 2] != ["communicate"]
            for what, share in shares if index in trace.replays else []:
                cut = start + share * (end - start)
                _add(spans, what, step, cut)
            name = "update" if is_alone else "backward"
        has_computed = has_computed or name not in ("input", "other")
        has_waited = has_waited or name == "communicate"
        _add(spans, name, step, end)
    return spans


def _add(spans: list[Span], name: str, step: int, end_s: float) -> None:
    """A span from the end of the last one; it is joined with one of the same kind, and left out if it is empty."""
    start_s = spans[-1].end_s if spans else 0.0
    end_s = max(start_s, round(end_s, DIGITS))
    if spans and (spans[-1].name, spans[-1].step) == (name, step):
        spans[-1] = spans[-1]._replace(end_s=end_s)
    elif end_s > start_s:
        spans.append(Span("step", name, step, start_s, end_s))


def _read_shares(trace: Trace, times: Sequence[float]) -> list[tuple[str, float]]:
    """Where in the last replay each pass ended, as shares of its length."""
    if not trace.replays:
        return []
    last = max(trace.replays)
    start, length = times[last], times[last + 1] - times[last]
    if length <= 0:
        return []
    cuts = [(what, seconds_between(trace.start, moment) - start) for what, moment in trace.replays[last]]
    return [(what, min(1.0, max(0.0, seconds / length))) for what, seconds in cuts]


def place_sums(
    start: Moment,
    moments: Sequence[tuple[Moment | None, Moment | None]],
    buffers: Sequence[str],
    first_step: int,
    num_steps: int,
) -> list[Span]:
    """The lane of all-reduces: sums in the order they were started, those of a step one for each buffer."""
    if len(moments) != len(buffers) * num_steps:
        return []
    spans = []
    for number, (begun, done) in enumerate(moments):
        step, index = divmod(number, len(buffers))
        if begun is not None and done is not None:
            since = [round(max(0.0, seconds_between(start, moment)), DIGITS) for moment in (begun, done)]
            spans.append(Span("all-reduce", buffers[index], first_step + step, *since))
    return spans


def place_batches(start_s: float, seconds: float, made: Sequence[Made], last_step: int) -> list[Span]:
    """The lane of the input: batches that were made meanwhile, each named by its step; the last taken is the last's."""
    spans = []
    for ahead, begun_s, done_s in made:
        begin = round(max(0.0, begun_s - start_s), DIGITS)
        end = round(seconds if done_s is None else min(seconds, done_s - start_s), DIGITS)
        if end > begin:
            step = last_step + ahead
            spans.append(Span("input", f"batch of step {step}", step, begin, end))
    return spans


def name_buffers(parts: Parts) -> list[str]:
    """Each buffer by its number and what it weighs."""
    split = parts.layout.split
    sizes = [(b.end - b.start) * (2 if b.start < split else 4) for b in parts.reducer.plan.buffers]
    return [f"buffer {number} ({size / 1e6:.3g} MB)" for number, size in enumerate(sizes, start=1)]
