"""Sides in processes of their own: those that work take all their turns, those that fail are named and left out."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from lockstep.bench.turns import ROOM, WARM_UP_STEPS, Entry, Outcome, Ready, Step, count_room, first_line, take_turns


def build_good(name: str, log: Path) -> tuple[str, Step]:
    x = torch.ones(4)

    def step() -> None:
        with log.open("a") as file:
            file.write(f"{name} {os.getpid()}\n")
        x.mul_(2)

    return f"the setting of {name}", step


def build_raising() -> tuple[str, Step]:
    raise RuntimeError("CUDA error: no such thing\nand much more about it")


def build_dying(when: int) -> tuple[str, Step]:
    """A step that ends its process; `when` counts steps, those before the turns included."""
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        if taken == when:
            os._exit(3)

    return "", step


def build_hanging() -> tuple[str, Step]:
    time.sleep(3600)
    raise AssertionError


def test_good_sides_take_every_turn_and_bad_ones_are_named(tmp_path: Path) -> None:
    log = tmp_path / "steps"
    steps_of_a_turn = WARM_UP_STEPS + 2
    before_turns = 6 + 3
    entries = [
        Entry("first", build_good, ("first", log)),
        Entry("unbuildable", build_raising),
        Entry("mortal", build_dying, (before_turns + steps_of_a_turn + 1,)),
        Entry("last", build_good, ("last", log)),
    ]
    said: list[str] = []
    outcomes = take_turns(entries, rounds=4, turn_s=0.0, say=said.append)

    assert [outcome.name for outcome in outcomes] == ["first", "last"]
    assert [outcome.ready.setting for outcome in outcomes] == ["the setting of first", "the setting of last"]
    assert all(outcome.ready.memory_bytes == outcome.ready.peak_bytes == 0 for outcome in outcomes)  # there is no GPU
    assert all(len(outcome.times) == 4 and min(outcome.times) > 0 for outcome in outcomes)
    assert [line for line in said if line.startswith("left out")] == [
        "left out: unbuildable: CUDA error: no such thing",
        "left out: mortal: its process ended with exit code 3",
    ]
    assert multiprocessing.active_children() == []

    steps = log.read_text().splitlines()
    assert len(set(steps)) == 2  # each in one process, and that not ours
    assert f"first {os.getpid()}" not in steps
    names = [step.split()[0] for step in steps]
    turns = [*["first"] * steps_of_a_turn, *["last"] * steps_of_a_turn]
    assert names == ["first"] * before_turns + ["last"] * before_turns + turns * 4


def test_a_side_that_does_not_answer_is_left_out() -> None:
    said: list[str] = []
    assert take_turns([Entry("sleeper", build_hanging)], rounds=2, limit_s=0.5, say=said.append) == []
    assert said == ["left out: sleeper: no answer within 0.5 s"]
    assert multiprocessing.active_children() == []


def test_no_process_is_left_when_the_parent_is_interrupted(tmp_path: Path) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_turns([Entry("first", build_good, ("first", tmp_path / "steps"))], rounds=2, say=interrupt)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "ValueError"),
        ("\nout of memory\nmore", "out of memory"),
        ("the compiler raised:\nKeyError: 1\nmore", "the compiler raised: KeyError: 1"),
        ("x" * 200, "x" * 160),
    ],
)
def test_an_error_is_one_line(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line


def test_room_is_left_for_whichever_side_needs_most() -> None:
    small, large = (Outcome("", Ready("", 0.0, 1.0, peak // 2, peak)) for peak in (10, 40))
    assert count_room([small, large]) == ROOM * 40
    assert count_room([small]) == ROOM * 10
    assert count_room([]) == 0
