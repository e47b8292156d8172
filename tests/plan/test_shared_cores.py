"""Ranks on shared cores: schedules worked by hand, and that no work is lost or made."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.device import BatchTime
from lockstep.plan.plan import Execution
from lockstep.plan.shared_cores import Cores, Crowd, Sum, share_cores
from lockstep.plan.simulate import simulate

FULL = Cores(2, 2)  # as many ranks as cores


def build_row(forward_s: float = 3.0, backward_s: float = 6.0, update_s: float = 1.0) -> BatchTime:
    step_s = forward_s + backward_s + update_s
    return BatchTime(8, Execution(), step_s, forward_s, backward_s, update_s, 0.0, 0, (), ())


def test_ranks_beyond_the_cores_take_turns_at_computing() -> None:
    assert [Cores(ranks, 2).stretch for ranks in (1, 2, 3, 16)] == [1.0, 1.0, 1.5, 8.0]
    sums = [Sum(2.0, 5.0, 1.0), Sum(6.0, 4.0, 0.2)]
    after = simulate(share_cores(build_row(), sums, Cores(6, 2), overlap=False))
    assert after.step_s == pytest.approx(3 * 10 + 5 + 4)


def test_ranks_that_take_turns_lose_and_all_wait_for_the_slowest() -> None:
    crowd = Crowd(loss=0.1, jitter=0.05, turn_jitter=0.2)
    assert Cores(1, 2, crowd).stretch == 1.0
    # The larger of two standard normal numbers is expected at 1 / sqrt(pi), of four at 1.03.
    assert Cores(2, 2, crowd).stretch == pytest.approx(1 + 0.05 * math.pi**-0.5, abs=0.002)
    assert Cores(4, 2, crowd).stretch == pytest.approx(2 * 1.1 * (1 + 0.2 * 1.03), abs=0.01)


def test_a_message_that_waits_for_its_link_holds_nobody_up() -> None:
    # backward  123456      Buffer 1 is full after 2 s and takes 3 s of the link, buffer 2 after 6 s and 2 s.
    # link        111 22
    step = simulate(share_cores(build_row(), [Sum(2.0, 3.0, 0.0), Sum(6.0, 2.0, 0.0)], FULL, overlap=True))
    assert step.step_s == pytest.approx(3 + 6 + 2 + 1)


def test_a_message_that_needs_all_cores_has_half_of_them_beside_the_backward_pass() -> None:
    # The sum of 4 s begins at once and has half of the cores for 8 s, in which backward comes to its fourth second;
    # backward ends 2 s later.
    costs = share_cores(build_row(), [Sum(0.0, 4.0, 1.0)], FULL, overlap=True)
    assert costs.messages[0][0].seconds == pytest.approx(8)
    assert costs.backward_s == pytest.approx(10)
    assert simulate(costs).step_s == pytest.approx(3 + 10 + 1)
    # One of 10 s: backward ends after 12 s, when 6 s of it are done, and 4 s follow at full speed.
    costs = share_cores(build_row(), [Sum(0.0, 10.0, 1.0)], FULL, overlap=True)
    assert costs.backward_s == pytest.approx(12)
    assert simulate(costs).step_s == pytest.approx(3 + 16 + 1)


def test_a_message_that_needs_a_quarter_of_the_cores_takes_only_that() -> None:
    # 4 s at full speed, in which backward gets 3 s done; the other 3 s follow.
    costs = share_cores(build_row(), [Sum(0.0, 4.0, 0.25)], FULL, overlap=True)
    assert costs.messages[0][0].seconds == pytest.approx(4)
    assert costs.backward_s == pytest.approx(7)


def test_idle_cores_serve_messages_first() -> None:
    # One rank on two cores: half of them idle, so that a sum which needs half of them is free.
    costs = share_cores(build_row(), [Sum(0.0, 4.0, 0.5)], Cores(1, 2), overlap=True)
    assert (costs.backward_s, costs.messages[0][0].seconds) == (pytest.approx(6), pytest.approx(4))


messages = st.lists(
    st.tuples(st.floats(0.0, 6.0), st.floats(0.001, 9.0), st.floats(0.0, 1.0)), min_size=1, max_size=6
).map(lambda rows: [Sum(*row) for row in sorted(rows)])


@given(messages, st.integers(2, 16))
def test_overlap_never_takes_longer_than_one_after_the_other_nor_less_than_the_work(
    sums: list[Sum], ranks: int
) -> None:
    row, cores = build_row(), Cores(ranks, 2)
    after = simulate(share_cores(row, sums, cores, overlap=False)).step_s
    under = simulate(share_cores(row, sums, cores, overlap=True)).step_s
    work = cores.stretch * row.step_s + sum(each.core_share * each.seconds for each in sums)
    assert work * (1 - 1e-9) <= under <= after * (1 + 1e-9)
    fixed = cores.stretch * (row.forward_s + row.update_s)
    assert under >= fixed + sum(each.seconds for each in sums) * (1 - 1e-9)


@given(messages)
def test_where_messages_are_nothing_but_work_overlap_gains_nothing(sums: list[Sum]) -> None:
    busy = [Sum(each.ready_s, each.seconds, 1.0) for each in sums]
    after, under = (simulate(share_cores(build_row(), busy, FULL, overlap=overlap)).step_s for overlap in (False, True))
    assert under == pytest.approx(after)
