"""Learning rates by hand, and what holds for all of them."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.optim.schedule import Schedule

kinds = st.sampled_from(["constant", "poly", "cosine", "step"])


@st.composite
def schedules(draw: Any) -> Schedule:
    total = draw(st.integers(1, 200))
    return Schedule(
        draw(kinds),
        lr=draw(st.floats(0.1, 30)),
        total_steps=total,
        warmup_steps=draw(st.integers(0, total)),
        warmup_lr=draw(st.floats(0, 0.1)),
        end_lr=draw(st.floats(0, 0.1)),
        power=draw(st.floats(0.5, 4)),
        milestones=tuple(sorted(draw(st.sets(st.integers(0, total), max_size=4)))),
    )


def rates(schedule: Schedule) -> list[float]:
    return [schedule.lr_at(step) for step in range(schedule.total_steps)]


def test_warm_up_is_linear_from_its_first_rate_to_the_full_one() -> None:
    schedule = Schedule("constant", lr=1.0, total_steps=6, warmup_steps=4, warmup_lr=0.2)
    assert rates(schedule) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_poly_falls_to_its_end_at_the_last_step() -> None:
    schedule = Schedule("poly", lr=4.0, total_steps=5, end_lr=0.0, power=2.0)
    assert rates(schedule) == pytest.approx([4.0, 2.25, 1.0, 0.25, 0.0])


def test_poly_after_warm_up_decays_over_the_remaining_steps() -> None:
    schedule = Schedule("poly", lr=4.0, total_steps=7, warmup_steps=2, end_lr=2.0, power=1.0)
    assert rates(schedule) == pytest.approx([0.0, 2.0, 4.0, 3.5, 3.0, 2.5, 2.0])


def test_cosine_is_half_way_in_the_middle() -> None:
    schedule = Schedule("cosine", lr=3.0, total_steps=5, end_lr=1.0)
    assert rates(schedule) == pytest.approx([3.0, 2.0 + math.sqrt(0.5), 2.0, 2.0 - math.sqrt(0.5), 1.0])


def test_step_falls_by_gamma_at_every_milestone() -> None:
    schedule = Schedule("step", lr=1.0, total_steps=6, warmup_steps=1, milestones=(2, 4), gamma=0.1)
    assert rates(schedule) == pytest.approx([0.0, 1.0, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("kind", ["constant", "poly", "cosine", "step"])
def test_a_run_of_one_step_uses_the_full_rate(kind: Any) -> None:
    assert Schedule(kind, lr=2.0, total_steps=1).lr_at(0) == 2.0


@pytest.mark.parametrize("kind", ["constant", "poly", "cosine", "step"])
def test_a_run_may_be_all_warm_up(kind: Any) -> None:
    schedule = Schedule(kind, lr=2.0, total_steps=4, warmup_steps=4)
    assert rates(schedule) == pytest.approx([0.0, 0.5, 1.0, 1.5])


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(LockstepError, match="warm-up of 11 steps is longer than the run of 10 steps"):
        Schedule("poly", lr=1.0, total_steps=10, warmup_steps=11)


def test_milestones_out_of_order_are_refused() -> None:
    with pytest.raises(LockstepError, match=r"must ascend, but come to steps \[4, 2\]"):
        Schedule("step", lr=1.0, total_steps=10, milestones=(4, 2))


@given(schedules())
def test_rates_stay_between_their_bounds(schedule: Schedule) -> None:
    lowest = min(schedule.warmup_lr, schedule.end_lr, schedule.lr * schedule.gamma ** len(schedule.milestones))
    assert all(lowest - 1e-12 <= rate <= schedule.lr * (1 + 1e-12) for rate in rates(schedule))


@given(schedules())
def test_rates_rise_through_warm_up_and_never_after(schedule: Schedule) -> None:
    found = rates(schedule)
    rising, falling = found[: schedule.warmup_steps], found[schedule.warmup_steps :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


@given(schedules().filter(lambda s: s.kind in ("poly", "cosine") and s.total_steps - 1 > s.warmup_steps))
def test_decay_joins_warm_up_and_ends_where_it_should(schedule: Schedule) -> None:
    assert schedule.lr_at(schedule.warmup_steps) == pytest.approx(schedule.lr)
    assert schedule.lr_at(schedule.total_steps - 1) == pytest.approx(schedule.end_lr, abs=1e-12)


@given(schedules().filter(lambda s: s.kind in ("constant", "cosine")))
def test_rates_do_not_jump(schedule: Schedule) -> None:
    found = rates(schedule)
    steepest = schedule.lr / max(1, schedule.warmup_steps)
    decay_steps = schedule.total_steps - 1 - schedule.warmup_steps
    if schedule.kind == "cosine" and decay_steps > 0:
        steepest = max(steepest, schedule.lr * math.pi / 2 / decay_steps)
    assert all(abs(b - a) <= steepest + 1e-9 for a, b in pairwise(found))
