"""The clock against a clock of the test's own."""

from types import SimpleNamespace

import pytest
import torch

from lockstep.comm import moment
from lockstep.engine.timing import KINDS, Clock


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by hand: powers of two, so that differences are exact."""
    now = [1024.0]
    monkeypatch.setattr(moment, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def build() -> Clock:
    return Clock(torch.device("cpu"))


def test_intervals_add_up_by_kind(seconds: list[float]) -> None:
    clock = build()
    for kind, lasted in [("input", 1.0), ("compute", 2.0), ("communicate", 4.0), ("compute", 8.0), ("other", 16.0)]:
        seconds[0] += lasted
        clock.mark(kind)  # type: ignore[arg-type]
    assert clock.take() == {"input": 1.0, "compute": 10.0, "communicate": 4.0, "other": 16.0}


def test_taking_starts_again_from_zero(seconds: list[float]) -> None:
    clock = build()
    seconds[0] += 1
    clock.mark("compute")
    clock.take()
    assert clock.take() == {"input": 0.0, "compute": 0.0, "communicate": 0.0, "other": 0.0}
    seconds[0] += 2
    clock.mark("input")
    assert clock.take() == {"input": 2.0, "compute": 0.0, "communicate": 0.0, "other": 0.0}


def test_what_passes_without_a_mark_is_nobodys(seconds: list[float]) -> None:
    clock = build()
    seconds[0] += 64
    clock.take()
    seconds[0] += 2
    clock.mark("input")
    assert clock.take()["input"] == 2.0


def test_time_between_a_mark_and_the_taking_falls_to_the_next_mark(seconds: list[float]) -> None:
    clock = build()
    seconds[0] += 1
    clock.mark("compute")
    seconds[0] += 2
    assert sum(clock.take().values()) == 1
    seconds[0] += 4
    clock.mark("other")
    assert clock.take()["other"] == 6


def test_the_total_is_all_the_time_that_passed(seconds: list[float]) -> None:
    clock = build()
    start, total = seconds[0], 0.0
    for step in range(7):
        for kind in KINDS:
            seconds[0] += 0.25 * (step + 1)
            clock.mark(kind)
        if step % 3 == 0:
            total += sum(clock.take().values())
    total += sum(clock.take().values())
    assert total == seconds[0] - start
