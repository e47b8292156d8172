"""Schedules worked by hand and drawn, closed formulas, and the recursion of MG-WFBP as oracles of the simulator."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.collectives import Phase
from lockstep.plan.graph import COMPUTE, INTRA, NIC, READER, StepCosts, Task, expect_slowest, plan_tasks
from lockstep.plan.simulate import schedule, simulate


def inter(seconds: float) -> tuple[Phase, ...]:
    return (Phase("inter", seconds),)


def draw(tasks: list[Task]) -> str:
    """One line a resource, one character a second: the first letter of what runs, a dot where it is idle."""
    spans = schedule(tasks)
    end = round(max(span.end_s for span in spans))
    rows = []
    for resource in dict.fromkeys(task.resource for task in tasks):
        row = ["."] * end
        for span in spans:
            if span.task.resource == resource:
                for second in range(round(span.start_s), round(span.end_s)):
                    letter = span.task.name[-1] if span.task.name.startswith("buffer") else span.task.name[0]
                    row[second] = letter
        rows.append(f"{resource:8}{''.join(row).rstrip('.')}")
    return "\n".join(rows)


def strip(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_one_step_whose_messages_are_sent_under_the_backward_pass() -> None:
    # Buffers 1 to 3 are full 2, 3 and 6 seconds into the backward pass; the NIC takes them in turn.
    costs = StepCosts(3, 6, 1, ready_s=(2, 3, 6), messages=(inter(2), inter(4), inter(2)))
    drawn = """
        compute fffbbbbbb....u
        nic     .....11222233
    """
    assert draw(plan_tasks(costs, 1)) == strip(drawn)
    parts = simulate(costs).parts
    assert (parts.forward_s, parts.backward_s, parts.communicate_s, parts.update_s) == (3, 6, 4, 1)


def test_the_same_step_with_its_messages_after_the_backward_pass() -> None:
    costs = StepCosts(3, 6, 1, ready_s=(2, 3, 6), messages=(inter(2), inter(4), inter(2)), overlap=False)
    drawn = """
        compute fffbbbbbb........u
        nic     .........11222233
    """
    assert draw(plan_tasks(costs, 1)) == strip(drawn)


def test_a_hierarchical_sum_goes_inside_the_node_across_and_inside_again() -> None:
    phases = (Phase("intra", 1), Phase("inter", 3), Phase("intra", 1))
    costs = StepCosts(2, 4, 1, ready_s=(1, 4), messages=(phases, phases))
    drawn = """
        compute ffbbbb.......u
        intra   ...1...12...2
        nic     ....111..222
    """
    # The channel sums one buffer at a time: buffer 2 waits for buffer 1 although its links are free.
    assert draw(plan_tasks(costs, 1)) == strip(drawn)


def test_batches_are_read_ahead_of_the_step_as_far_as_there_is_room() -> None:
    # Reading takes 5 and the step 4: the step waits for input 1 second in each 5.
    costs = StepCosts(1, 2, 1, read_s=5, prefetch=1)
    drawn = """
        reader  rrrrrrrrrrrrrrr
        compute .....fbbu.fbbu.fbbu
    """
    assert draw(plan_tasks(costs, 3)) == strip(drawn)
    assert simulate(costs).parts.input_s == 1
    # Nothing is read ahead: each step begins with it.
    drawn = """
        reader  rrrrr....rrrrr
        compute .....fbbu.....fbbu
    """
    assert draw(plan_tasks(StepCosts(1, 2, 1, read_s=5, prefetch=0), 2)) == strip(drawn)


def test_three_stages_of_input_work_at_the_same_time_where_there_is_room_for_three_batches() -> None:
    costs = StepCosts(1, 1, 1, read_s=2, decode_s=3, copy_s=1, prefetch=3)
    drawn = """
        reader  rrrrrr
        decoder ..ddddddddd
        copy    .....c..c..c
        compute ......fbufbufbu
    """
    assert draw(plan_tasks(costs, 3)) == strip(drawn)
    assert simulate(costs).step_s == 3


def test_two_passes_fill_the_buffers_in_the_second() -> None:
    costs = StepCosts(1, 2, 1, ready_s=(1, 2), messages=(inter(1), inter(1)), passes=2)
    drawn = """
        compute fbbfbb.u
        nic     .....12
    """
    assert draw(plan_tasks(costs, 1)) == strip(drawn)


def test_weights_are_gathered_after_an_update_in_parts() -> None:
    costs = StepCosts(1, 1, 1, ready_s=(1,), messages=(inter(1),), gather=(Phase("intra", 2),))
    drawn = """
        compute fb.u
        nic     ..1
        intra   ....ww
    """
    assert draw(plan_tasks(costs, 1)) == strip(drawn)
    assert simulate(costs).parts.communicate_s == 3


def test_a_host_that_launches_slower_than_the_device_computes_is_waited_for() -> None:
    parts = simulate(StepCosts(1, 2, 1, launch_s=6)).parts
    assert parts.step_s == 6
    assert parts.launch_s == 2


def test_a_free_resource_takes_the_task_that_stands_first_and_never_stops_one() -> None:
    tasks = [
        Task("a", COMPUTE, 0, 3, ()),
        Task("x", NIC, 0, 2, (0,)),
        Task("b", COMPUTE, 0, 1, ()),
        Task("y", NIC, 0, 4, ()),
    ]
    drawn = """
        compute aaab
        nic     yyyyxx
    """
    assert draw(tasks) == strip(drawn)


seconds = st.floats(0.001, 10)


@given(seconds, seconds, seconds, st.lists(seconds, min_size=1, max_size=6), seconds, seconds, st.integers(0, 1))
def test_without_overlap_the_step_is_the_closed_formula(
    forward: float, backward: float, update: float, sums: list[float], read: float, copy: float, prefetch: int
) -> None:
    ready = tuple(backward * (number + 1) / len(sums) for number in range(len(sums)))
    costs = StepCosts(
        forward,
        backward,
        update,
        ready,
        tuple(map(inter, sums)),
        overlap=False,
        read_s=read,
        copy_s=copy,
        prefetch=prefetch,
    )
    io, step = read + copy, forward + backward + sum(sums) + update
    # Shi et al.: all in turn, or the next batch fetched meanwhile.
    expected = max(io, step) if prefetch else io + step
    found = simulate(costs)
    assert found.step_s == pytest.approx(expected, rel=1e-9)
    assert found.parts.communicate_s == pytest.approx(sum(sums), rel=1e-6)


def wait_free(ready: list[float], sums: list[float], backward: float) -> float:
    """The recursion of MG-WFBP: what of the communication is left when the backward pass is over."""
    done = 0.0
    for at, taken in zip(ready, sums, strict=True):
        done = max(done, at) + taken
    return max(0.0, done - backward)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20), seconds, seconds)
def test_with_overlap_what_is_exposed_is_what_the_recursion_of_mg_wfbp_says(
    layers: list[tuple[float, float]], forward: float, update: float
) -> None:
    ready, at = [], 0.0
    for computing, _ in layers:
        at += computing
        ready.append(at)
    sums = [taken for _, taken in layers]
    costs = StepCosts(forward, at, update, tuple(ready), tuple(map(inter, sums)))
    found = simulate(costs)
    exposed = wait_free(ready, sums, at)
    assert found.parts.communicate_s == pytest.approx(exposed, rel=1e-9, abs=1e-9)
    assert found.step_s == pytest.approx(forward + at + exposed + update, rel=1e-9)


@given(st.lists(seconds, min_size=1, max_size=5), seconds, seconds, st.floats(0, 5), st.integers(0, 4), st.booleans())
def test_a_step_is_never_shorter_than_any_resource_is_busy_nor_longer_than_all_in_turn(
    sums: list[float], forward: float, backward: float, read: float, prefetch: int, overlap: bool
) -> None:
    ready = tuple(backward * (number + 1) / len(sums) for number in range(len(sums)))
    costs = StepCosts(
        forward, backward, 0.5, ready, tuple(map(inter, sums)), overlap=overlap, read_s=read, prefetch=prefetch
    )
    found = simulate(costs)
    assert found.step_s >= max(costs.compute_s, sum(sums), read) * (1 - 1e-9)
    assert found.step_s <= (costs.compute_s + sum(sums) + read) * (1 + 1e-9)
    assert min(vars(found.parts).values()) >= -1e-9
    for resource in (READER, COMPUTE, NIC, INTRA):
        spans = sorted((s.start_s, s.end_s) for s in found.scheduled if s.task.resource == resource)
        assert all(early[1] <= late[0] for early, late in pairwise(spans))
    for span in found.scheduled:
        assert all(found.scheduled[before].end_s <= span.start_s for before in span.task.after)


def test_the_slowest_of_many_is_expected_where_order_statistics_say() -> None:
    # E[max] of 2 and 3 standard normal numbers: 1/√π and 3/(2√π); of 1000: 3.2414.
    assert expect_slowest(1, 0.1) == 0
    for count, exact in ((2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (1000, 3.2414)):
        assert expect_slowest(count, 1.0) == pytest.approx(exact, rel=0.05)
    parts = simulate(StepCosts(1, 2, 1, slowdown=0.1)).parts
    assert parts.slowest_s == pytest.approx(0.3)
    assert (parts.forward_s, parts.backward_s) == pytest.approx((1, 2))
