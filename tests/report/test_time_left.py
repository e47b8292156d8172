"""The time left of runs made by hand: 40 steps, an evaluation every 10."""

import pytest

from lockstep.report.time_left import TimeLeft
from tests.report.records import evaluated, saved, started, stepped


def test_before_the_first_evaluation_its_cost_is_a_third_of_training_on_as_many_samples() -> None:
    left = TimeLeft(started())
    left.emit(stepped(4, 1002))
    # 36 steps of 0.5 s, and 4 evaluations of 100 samples at 64 images/s, forward only.
    assert left.seconds() == pytest.approx(36 * 0.5 + 4 * 100 / 64 / 3)


def test_evaluations_left_are_counted_at_their_measured_cost() -> None:
    left = TimeLeft(started())
    left.emit(stepped(10, 1005))
    left.emit(evaluated(10, 1007, top1=0.5, seconds=2.0))
    assert left.seconds() == pytest.approx(30 * 0.5 + 3 * 2.0)


def test_an_evaluation_at_the_end_counts_even_off_the_beat() -> None:
    left = TimeLeft(started(config={"train": {"eval_every": "15st", "checkpoint_every": "0st"}}))
    left.emit(stepped(20, 1010))
    left.emit(evaluated(20, 1010, top1=0.5, seconds=2.0))
    assert left.seconds() == pytest.approx(20 * 0.5 + 2 * 2.0)  # at steps 30 and 40


def test_checkpoints_left_are_counted_too() -> None:
    left = TimeLeft(started(config={"train": {"eval_every": "0st", "checkpoint_every": "2ep"}}))
    left.emit(stepped(20, 1010))
    left.emit(evaluated(20, 1010, top1=0.5, seconds=2.0))
    left.emit(saved(20, 1013, seconds=3.0))
    assert left.seconds() == pytest.approx(20 * 0.5 + 2.0 + 3.0)


def test_nothing_is_left_at_the_end() -> None:
    left = TimeLeft(started())
    left.emit(stepped(40, 1020))
    assert left.seconds() == 0


def test_a_slower_pace_is_followed() -> None:
    left = TimeLeft(started(config={"train": {"eval_every": "0st", "checkpoint_every": "0st"}}, num_val=0))
    left.emit(stepped(1, 1001, step_s=0.1))
    for step in range(2, 22):
        left.emit(stepped(step, 1000 + step, step_s=1.0))
    assert left.seconds() == pytest.approx(19 * 1.0, rel=0.01)
