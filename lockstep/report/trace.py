"""A run as a trace for Perfetto or Chrome (chrome://tracing): ranks are processes, their lanes are threads. Torch-free.

The steps that a run drew (`TimelineTaken`) stand where they were taken; evaluations and checkpoints are spans of a
process of their own, and loss, rate and speed are its counters. Times are microseconds since the run began. Records may
come from anyone: what is no span, or no number, is left out.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.errors import LockstepError
from lockstep.events import CheckpointSaved, Evaluated, Event, RunStarted, StepDone, TimelineTaken
from lockstep.report.history import number

RUN = 0  # the process that holds what all ranks do together; rank r is process r + 1
LANES = ("step", "all-reduce", "input")  # in this order, others behind them

Entry = dict[str, Any]


def build_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The whole trace, as its JSON has it; a run that is resumed goes on behind its first part."""
    start = next((event for event in events if isinstance(event, RunStarted)), None)
    if start is None:
        raise LockstepError("The event log holds no run, so there is nothing to trace; name a run's folder.")
    entries = [_name("process_name", RUN, 0, start.run)]
    entries += _place_timelines([event for event in events if isinstance(event, TimelineTaken)], start.time_s)
    entries += [entry for event in events for entry in _place_event(event, start.time_s)]
    meta = [entry for entry in entries if entry["ph"] == "M"]
    timed = [entry for entry in entries if entry["ph"] != "M" and number(entry["ts"] + entry.get("dur", 0)) is not None]
    rest = sorted(timed, key=lambda entry: entry["ts"])
    about = {"run": start.run, "recipe": start.recipe}
    return {"traceEvents": meta + rest, "displayTimeUnit": "ms", "otherData": about}


def _place_timelines(timelines: Sequence[TimelineTaken], start_s: float) -> list[Entry]:
    entries: list[Entry] = []
    # Ranks have no clock in common: they begin a step together, or nearly so.
    begun_s: dict[int, float] = {}
    threads: dict[tuple[int, str], int] = {}
    for timeline in timelines:
        process = timeline.rank + 1
        begin_s = begun_s.setdefault(timeline.first_step, timeline.time_s - timeline.seconds - start_s)
        if (process, "") not in threads:
            threads[process, ""] = 0
            entries.append(_name("process_name", process, 0, f"rank {timeline.rank}"))
        for lane, row, span in _spread(timeline.spans):
            name = lane if row == 0 else f"{lane} {row + 1}"
            if (process, name) not in threads:
                order = LANES.index(lane) if lane in LANES else len(LANES)
                threads[process, name] = 1 + 10 * order + row
                entries.append(_name("thread_name", process, threads[process, name], name))
            length_s = span["end_s"] - span["start_s"]
            entries.append(
                _span(
                    str(span["name"]),
                    process,
                    threads[process, name],
                    begin_s + span["start_s"],
                    length_s,
                    {"step": span["step"]} if type(span.get("step")) is int else {},
                )
            )
    return entries


def _is_span(span: object) -> bool:
    if not isinstance(span, dict) or "lane" not in span or "name" not in span:
        return False
    start, end = number(span.get("start_s")), number(span.get("end_s"))
    return start is not None and end is not None and end >= start


def _spread(spans: Iterable[dict[str, Any]]) -> list[tuple[str, int, dict[str, Any]]]:
    """Each span with its lane and a row of it: spans of one thread must not overlap."""
    ends: dict[str, list[float]] = {}
    placed = []
    for span in sorted(filter(_is_span, spans), key=lambda span: (str(span["lane"]), float(span["start_s"]))):
        lane, rows = str(span["lane"]), ends.setdefault(str(span["lane"]), [])
        row = next((number for number, end in enumerate(rows) if end <= span["start_s"]), len(rows))
        rows[row:] = [float(span["end_s"]), *rows[row + 1 :]]
        placed.append((lane, row, span))
    return placed


def _place_event(event: Event, start_s: float) -> list[Entry]:
    match event:
        case Evaluated():
            about = {"step": event.step, "top1": number(event.top1)}
            return [_span("evaluate", RUN, 1, event.time_s - event.seconds - start_s, event.seconds, about)]
        case CheckpointSaved():  # a thread of its own, as it is written beside whatever else goes on
            about = {"step": event.step, "waited_s": number(event.seconds)}
            return [_span("checkpoint", RUN, 2, event.time_s - event.took_s - start_s, event.took_s, about)]
        case StepDone():
            numbers = {"loss": event.loss, "lr": event.lr, "images/s": event.images_per_second}
            return [
                {"ph": "C", "name": name, "pid": RUN, "ts": _micro(event.time_s - start_s), "args": {name: value}}
                for name, value in numbers.items()
                if number(value) is not None  # JSON has neither NaN nor infinity
            ]
    return []


def _span(name: str, process: int, thread: int, begin_s: float, length_s: float, about: dict[str, Any]) -> Entry:
    place = {"pid": process, "tid": thread, "ts": _micro(begin_s), "dur": _micro(length_s)}
    return {"ph": "X", "name": name, "cat": "lockstep", **place, "args": about}


def _name(what: str, process: int, thread: int, name: str) -> Entry:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _micro(seconds: float) -> float:
    return max(0.0, round(1e6 * seconds, 1))
