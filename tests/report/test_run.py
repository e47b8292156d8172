"""What a run leaves behind on rank 0."""

import json
from pathlib import Path

import pytest

from lockstep.events import Event, Notice, read_events
from lockstep.report.run import RunSink, SilentSink
from tests.report.records import ended, evaluated, started


class Listener:
    """Keeps what a display would show."""

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.closed = False

    def emit(self, event: Event) -> None:
        self.heard.append(event)

    def close(self) -> None:
        self.closed = True


RUN: list[Event] = [started(1000), evaluated(40, 1020, top1=0.75), ended(40, 1021, wall_s=21.0)]


def test_a_run_leaves_its_events_and_its_summary(tmp_path: Path) -> None:
    display = Listener()
    sink = RunSink(tmp_path, display)
    for event in RUN:
        sink.emit(event)
    sink.close()
    assert read_events(tmp_path / "events.jsonl") == display.heard == RUN
    assert display.closed
    assert json.loads((tmp_path / "summary.json").read_text())["top1"] == 0.75


def test_the_summary_of_a_resumed_run_covers_all_parts(tmp_path: Path) -> None:
    for _ in range(2):
        sink = RunSink(tmp_path, Listener())
        for event in RUN:
            sink.emit(event)
        sink.close()
    assert json.loads((tmp_path / "summary.json").read_text())["wall_s"] == 42.0


def test_a_summary_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    display = Listener()
    sink = RunSink(tmp_path, display)
    (tmp_path / "summary.json").mkdir()
    for event in RUN:
        sink.emit(event)
    sink.close()
    (notice,) = (event for event in display.heard if isinstance(event, Notice))
    assert notice.text.startswith("Cannot write the summary ")
    assert display.heard[-1] == RUN[-1]


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    sink = SilentSink()
    for event in RUN:
        sink.emit(event)
    sink.close()
    assert capsys.readouterr() == ("", "")
