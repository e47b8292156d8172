"""Parts joined to one run, and points thinned to what a screen can show."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.events import AnchorTaken, Evaluated, Event, Notice, StepDone
from lockstep.report.history import History, list_notes, measure_spent, number, thin
from tests.report.made_run import make_run
from tests.report.records import ended, epoch_done, evaluated, saved, started, stepped


def test_a_resumed_part_overwrites_the_steps_it_repeats() -> None:
    first = [started(1000), stepped(10, 1005), stepped(20, 1010), stepped(30, 1015)]
    second = [started(2000, start_step=20), stepped(30, 2005, step_s=0.4), stepped(40, 2010), ended(40, 2011, 11.0)]
    history = History([*first, *second])
    assert [(spot.step, event.step_s) for spot, event in history.steps] == [(10, 0.5), (20, 0.5), (30, 0.4), (40, 0.5)]
    assert [spot.wall_s for spot, _ in history.steps] == [5.0, 10.0, 20.0, 25.0]  # the first part lasted 15 s
    (boundary,) = history.boundaries
    assert (boundary.step, boundary.epoch, boundary.wall_s) == (20, 2.0, 15.0)


def test_times_are_those_of_the_summary() -> None:
    history = History(
        [started(1000), evaluated(10, 1007, 0.5), started(2000, start_step=10), evaluated(20, 2009, 0.75)]
    )
    times = [point["wall_s"] for point in history.summary["time_to_accuracy"]]
    assert [spot.wall_s for spot, _ in history.placed(Evaluated)] == times


def test_an_epoch_that_was_told_twice_counts_once() -> None:
    history = History([started(), epoch_done(0, 1005, ledger_ok=False), epoch_done(0, 1010), epoch_done(1, 1015)])
    assert [(event.epoch, event.ledger_ok) for event in history.epochs] == [(0, True), (1, True)]


def test_the_seconds_of_a_part_add_up_to_its_wall_time() -> None:
    part = [started(1000), stepped(10, 1006), saved(10, 1009), evaluated(10, 1011, 0.5), ended(10, 1012, 30.0)]
    spent = measure_spent(part)
    parts = (spent.compute, spent.communication, spent.input, spent.evaluation, spent.checkpoint, spent.startup)
    assert parts == (16.0, 3.0, 1.0, 2.0, 3.0, 1.0)
    assert math.isclose(sum(parts) + spent.other, 30.0)


def test_passes_for_full_gradients_are_no_mystery() -> None:
    taken = AnchorTaken(step=0, samples=9, seconds=4.0, loss=1.0, gradient_norm=1.0, scale=None, ledger="", time_s=1004)
    spent = measure_spent([started(1000), taken, stepped(10, 1010), ended(10, 1012, 30.0, anchor_s=4.0)])
    assert spent.anchors == 4.0
    assert math.isclose(sum(vars(spent).values()), 30.0)


def test_a_killed_part_says_where_its_time_went_by_its_steps() -> None:
    spent = measure_spent([started(1000), stepped(10, 1007), stepped(20, 1012)])
    assert (spent.compute, spent.startup) == (10.0, 2.0)


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), max_size=400), st.integers(4, 50))
def test_thinning_keeps_both_ends_and_the_extremes(values: list[float | None], most: int) -> None:
    kept = thin(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 4)
    finite = [value for value in values if number(value) is not None]
    if values:
        assert {0, len(values) - 1} <= set(kept)
    if finite:
        left = [number(values[index]) for index in kept]
        assert {min(finite), max(finite)} <= {value for value in left if value is not None}


def test_what_is_no_number_is_none() -> None:
    for value in (None, True, "7", [], math.nan, math.inf, 10**400):
        assert number(value) is None
    assert number(7) == 7.0


def test_the_made_run_has_every_kind_of_step() -> None:
    history = History(make_run(steps=200))
    assert all(isinstance(event, StepDone) for _, event in history.steps)
    assert len(history.steps) == 40


def test_a_note_comes_once_with_the_step_it_first_came_at() -> None:
    first: list[Event] = [started(1000), Notice(level="info", text="a", time_s=1001), stepped(10, 1005)]
    first += [Notice(level="info", text="b", rank=1, time_s=1006), Notice(level="warning", text="c", time_s=1006)]
    second: list[Event] = [started(2000, start_step=10), Notice(level="info", text="a", time_s=2001)]
    second += [Notice(level="info", text="d", time_s=2002)]
    found = list_notes(History([*first, *second]))
    assert [(spot.step, text) for spot, text in found] == [(0, "a"), (10, "rank 1: b"), (10, "d")]
    assert [spot.wall_s for spot, _ in found] == [1.0, 6.0, 7.0]  # the first part lasted 5 s, by its steps
