"""The trace against what Chrome's format asks for."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.events import Event, EventLog, TimelineTaken
from lockstep.report.export_commands import trace_command
from lockstep.report.trace import RUN, build_trace
from tests.report.records import ended, evaluated, saved, started, stepped


def span(lane: str, name: str, step: int, start_s: float, end_s: float) -> dict[str, Any]:
    return {"lane": lane, "name": name, "step": step, "start_s": start_s, "end_s": end_s}


def timeline(rank: int, time_s: float) -> TimelineTaken:
    spans = [
        span("step", "forward", 7, 0.0, 0.1),
        span("step", "backward", 7, 0.1, 0.3),
        span("all-reduce", "buffer 1", 7, 0.15, 0.25),
        span("all-reduce", "buffer 2", 7, 0.2, 0.28),  # beside the first
        span("all-reduce", "buffer 3", 7, 0.28, 0.29),
    ]
    return TimelineTaken(time_s=time_s, rank=rank, first_step=7, num_steps=1, seconds=0.3, spans=spans)


def story() -> list[Event]:
    return [
        started(run='<script>"', time_s=1000.0),
        stepped(10, 1005.0),
        timeline(0, 1005.5),
        timeline(1, 1005.6),
        evaluated(10, 1008.0, 0.5),
        saved(10, 1012.0),
        ended(10, 1013.0, 13.0),
    ]


def test_every_entry_is_as_chromes_format_has_it() -> None:
    trace = json.loads(json.dumps(build_trace(story()), allow_nan=False))
    assert trace["displayTimeUnit"] == "ms"
    for entry in trace["traceEvents"]:
        assert entry["ph"] in ("X", "M", "C")
        assert isinstance(entry["pid"], int)
        if entry["ph"] == "X":
            assert entry["ts"] >= 0
            assert entry["dur"] >= 0
            assert isinstance(entry["tid"], int)
        if entry["ph"] == "M":
            assert entry["name"] in ("process_name", "thread_name")
            assert isinstance(entry["args"]["name"], str)
    times = [entry["ts"] for entry in trace["traceEvents"] if "ts" in entry]
    assert times == sorted(times)


def test_what_is_no_span_or_no_number_is_left_out() -> None:
    """A log may come from anyone, and Perfetto refuses a file with an infinity in it."""
    whole = span("step", "forward", 7, 0.0, 0.1)
    forged: list[Any] = [None, 7, {"lane": "step"}, {**whole, "start_s": "0"}, {**whole, "end_s": math.inf}, whole]
    strange = [
        replace(stepped(10, 1005.0), loss=math.inf),
        evaluated(10, math.inf, 0.5),
        replace(timeline(0, 1005.5), spans=[*forged, {**whole, "step": [math.nan]}]),
    ]
    trace = json.loads(json.dumps(build_trace([started(time_s=1000.0), *strange]), allow_nan=False))
    told = [(entry["name"], entry["args"]) for entry in trace["traceEvents"] if entry["ph"] != "M"]
    assert [name for name, _ in told] == ["lr", "images/s", "forward", "forward"]
    assert [args for name, args in told if name == "forward"] == [{"step": 7}, {}]


def test_ranks_are_processes_and_lanes_are_threads() -> None:
    entries = build_trace(story())["traceEvents"]
    processes = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert processes == {RUN: '<script>"', 1: "rank 0", 2: "rank 1"}
    threads = {entry["args"]["name"]: entry["tid"] for entry in entries if entry["name"] == "thread_name"}
    assert sorted(threads, key=threads.__getitem__) == ["step", "all-reduce", "all-reduce 2"]


def test_spans_of_one_thread_never_overlap_and_ranks_begin_together() -> None:
    spans = [entry for entry in build_trace(story())["traceEvents"] if entry["ph"] == "X"]
    for thread in {(entry["pid"], entry["tid"]) for entry in spans}:
        own = sorted((entry["ts"], entry["dur"]) for entry in spans if (entry["pid"], entry["tid"]) == thread)
        assert all(ts + dur <= later + 0.2 for (ts, dur), (later, _) in pairwise(own))
    begins = [entry["ts"] for entry in spans if entry["name"] == "forward"]
    assert begins == [5_200_000.0, 5_200_000.0]
    (evaluation,) = (entry for entry in spans if entry["name"] == "evaluate")
    assert (evaluation["ts"], evaluation["dur"]) == (6_000_000.0, 2_000_000.0)
    (checkpoint,) = (entry for entry in spans if entry["name"] == "checkpoint")
    assert checkpoint["tid"] != evaluation["tid"]  # it is written while others go on


def test_the_command_writes_beside_the_run(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", warn=pytest.fail)
    for event in story():
        log.emit(event)
    log.close()
    trace_command(tmp_path)
    assert json.loads((tmp_path / "trace.json").read_text()) == build_trace(story())
    with pytest.raises(LockstepError, match=r"cannot be written .*; choose another file"):
        trace_command(tmp_path, tmp_path / "no" / "such" / "trace.json")


def test_a_log_without_a_run_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match=r"holds no run, .*; name a run's folder"):
        build_trace([])
