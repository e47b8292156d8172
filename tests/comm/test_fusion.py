"""Cut points against brute force over every set of cuts, and against cases worked by hand."""

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.fusion import Buffer, add_tail, plan_buffers, plan_merged, plan_two_segments
from lockstep.errors import LockstepError
from lockstep.layout import ALIGNMENT, Layout, ParameterSpec, plan_layout

Predict = Callable[[int], float]
UNIT = ALIGNMENT * 4  # bytes of the smallest slot in FP32

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


def lay_out(numels: list[int]) -> Layout:
    return plan_layout(ParameterSpec(f"p{i}", (n,), True, True) for i, n in enumerate(numels))


@given(sizes, st.floats(1, 50_000))
def test_buffers_tile_the_layout_in_order(numels: list[int], threshold: float) -> None:
    layout = lay_out(numels)
    buffers = plan_buffers(layout, threshold)
    assert buffers[0].start == 0
    assert buffers[-1].end == layout.numel
    assert [b.start for b in buffers[1:]] == [b.end for b in buffers[:-1]]
    assert [i for b in buffers for i in range(b.first, b.last)] == list(range(len(numels)))


@given(sizes, st.floats(1, 50_000))
def test_a_buffer_exceeds_the_threshold_only_when_one_slot_does(numels: list[int], threshold: float) -> None:
    layout = lay_out(numels)
    for buffer in plan_buffers(layout, threshold):
        content = (layout.slots[buffer.last - 1].end - buffer.start) * 4
        assert content <= threshold or buffer.last - buffer.first == 1


@given(sizes, st.floats(1, 50_000))
def test_no_two_neighbours_would_have_fitted_together(numels: list[int], threshold: float) -> None:
    layout = lay_out(numels)
    buffers = plan_buffers(layout, threshold)
    for left, right in itertools.pairwise(buffers):
        assert (layout.slots[right.first].end - left.start) * 4 > threshold


def test_two_small_slots_share_and_a_large_one_travels_alone() -> None:
    layout = lay_out([1000, ALIGNMENT, ALIGNMENT])  # backward order: the small ones first
    first, second = plan_buffers(layout, threshold_bytes=2 * ALIGNMENT * 4)
    assert (first.first, first.last, first.end) == (0, 2, 2 * ALIGNMENT)
    assert (second.first, second.last, second.end) == (2, 3, layout.numel)


def affine(startup_s: float, unit_s: float) -> Predict:
    """A cost of so much for each buffer and so much for each unit in it."""
    return lambda num_bytes: startup_s + unit_s * num_bytes / UNIT


def slots_of(units: Sequence[int]) -> Layout:
    """A layout whose slots have these sizes, in backward order."""
    return lay_out([ALIGNMENT * count for count in reversed(units)])


def firsts(buffers: Sequence[Buffer]) -> list[int]:
    return [buffer.first for buffer in buffers]


def exposed_s(
    buffers: Sequence[Buffer], ready_s: Sequence[float], predict: Predict, bytes_per_element: int = 4
) -> float:
    """Seconds by which communication outlasts the backward pass."""
    ready = list(accumulate(ready_s, max))
    done = 0.0
    for buffer in buffers:
        done = max(done, ready[buffer.last - 1]) + predict((buffer.end - buffer.start) * bytes_per_element)
    return done - ready[-1]


def finish(units: Sequence[int], ready_s: Sequence[float], predict: Predict, cuts: Sequence[int]) -> float:
    """When the last buffer is done, by playing the step through with buffers that begin at `cuts`."""
    now = 0.0
    for first, last in itertools.pairwise([*cuts, len(units)]):
        now = max(now, *ready_s[:last]) + predict(sum(units[first:last]) * UNIT)
    return now


def every_plan(num_slots: int) -> list[list[int]]:
    return [[0, *cuts] for count in range(num_slots) for cuts in itertools.combinations(range(1, num_slots), count)]


steps = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=8)
costs = st.one_of(
    st.builds(affine, st.integers(0, 15), st.sampled_from([0.1, 0.5, 1.0, 3.0])),
    # The cheapest of two algorithms, one that jumps, and one that falls: nothing but a table of seconds is assumed.
    st.just(lambda num_bytes: min(1 + num_bytes / UNIT, 6 + 0.2 * num_bytes / UNIT)),
    st.just(lambda num_bytes: 1.0 + math.ceil(num_bytes / UNIT / 7)),
    st.just(lambda num_bytes: 20.0 / (1 + num_bytes / UNIT)),
)


@given(steps, costs)
def test_the_merged_plan_is_done_as_soon_as_the_best_of_all_plans(
    slots: list[tuple[int, int]], predict: Predict
) -> None:
    units = [size for size, _ in slots]
    ready = [float(time) for time in itertools.accumulate(gap for _, gap in slots)]
    buffers = plan_merged(slots_of(units), ready, predict)
    ends = {tuple(cuts): finish(units, ready, predict, cuts) for cuts in every_plan(len(units))}
    soonest = min(ends.values())
    assert finish(units, ready, predict, firsts(buffers)) == pytest.approx(soonest)
    # Of equally quick plans, one with the fewest buffers: each is a collective that can be disturbed.
    assert len(buffers) == min(len(cuts) for cuts, end in ends.items() if end <= soonest * (1 + 1e-9))


@given(steps, costs)
def test_two_segments_have_the_best_of_all_single_cuts(slots: list[tuple[int, int]], predict: Predict) -> None:
    units = [size for size, _ in slots]
    ready = [float(time) for time in itertools.accumulate(gap for _, gap in slots)]
    buffers = plan_two_segments(slots_of(units), ready, predict)
    assert len(buffers) == min(2, len(units))
    ends = [finish(units, ready, predict, cuts) for cuts in every_plan(len(units)) if len(cuts) == len(buffers)]
    assert finish(units, ready, predict, firsts(buffers)) == pytest.approx(min(ends))


@given(sizes, st.floats(0, 5))
def test_merged_and_halved_layouts_are_tiled_in_order(numels: list[int], startup: float) -> None:
    layout = lay_out(numels)
    ready = [float(index) for index in range(len(numels))]
    for plan in (plan_merged, plan_two_segments):
        buffers = plan(layout, ready, affine(startup, 0.01))
        assert (buffers[0].start, buffers[-1].end) == (0, layout.numel)
        assert all(left.end == right.start for left, right in itertools.pairwise(buffers))
        assert [i for b in buffers for i in range(b.first, b.last)] == list(range(len(numels)))


@given(steps, costs, st.floats(1, 2000))
def test_exposed_time_is_what_sticks_out_after_backward(
    slots: list[tuple[int, int]], predict: Predict, threshold: float
) -> None:
    units = [size for size, _ in slots]
    ready = [float(time) for time in itertools.accumulate(gap for _, gap in slots)]
    buffers = plan_buffers(slots_of(units), threshold)
    expected = finish(units, ready, predict, firsts(buffers)) - ready[-1]
    assert exposed_s(buffers, ready, predict) == pytest.approx(expected)


def merge_greedily(units: Sequence[int], ready_s: Sequence[float], startup_s: float, unit_s: float) -> list[int]:
    """MG-WFBP's rule: take the next gradient along if it is ready before the start-up it saves would be spent."""
    cuts, done = [0], 0.0
    for index in range(1, len(units)):
        begin = max(done, ready_s[index - 1])
        if ready_s[index] >= begin + startup_s:
            done = begin + startup_s + unit_s * sum(units[cuts[-1] : index])
            cuts.append(index)
    return cuts


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=2, max_size=60),
    st.floats(0, 15),
    st.floats(0.1, 3),
)
def test_the_merged_plan_is_never_slower_than_the_greedy_one(
    slots: list[tuple[int, int]], startup: float, unit: float
) -> None:
    units = [size for size, _ in slots]
    ready = [float(time) for time in itertools.accumulate(gap for _, gap in slots)]
    predict = affine(startup, unit)
    merged = finish(units, ready, predict, firsts(plan_merged(slots_of(units), ready, predict)))
    assert merged <= finish(units, ready, predict, merge_greedily(units, ready, startup, unit)) * (1 + 1e-9)


def test_the_greedy_rule_may_wait_where_the_merged_plan_goes_at_once() -> None:
    units, ready, predict = [5, 13, 12], [4.0, 5.0, 7.0], affine(2, 0.2)
    # Greedy holds slot 0 back for slot 1: 5 + 2 + 3.6, then 2 + 2.4.
    assert finish(units, ready, predict, merge_greedily(units, ready, 2, 0.2)) == pytest.approx(15)
    # Slot 0 at 4 is done at 7, just when the rest is ready: 7 + 2 + 5.
    assert firsts(plan_merged(slots_of(units), ready, predict)) == [0, 1]
    assert finish(units, ready, predict, [0, 1]) == pytest.approx(14)


def test_one_buffer_without_overlap_is_the_plan_when_start_up_dominates() -> None:
    units, ready, predict = [3, 1, 4, 1, 5, 9, 2, 6], [1.0, 2, 3, 4, 5, 6, 7, 8], affine(100, 0.01)
    (buffer,) = plan_merged(slots_of(units), ready, predict)
    assert (buffer.first, buffer.last) == (0, 8)
    assert exposed_s([buffer], ready, predict) == pytest.approx(100 + 0.31)


def test_every_gradient_goes_alone_when_start_up_is_free_and_the_link_is_the_bottleneck() -> None:
    units, ready, predict = [4, 4, 4], [1.0, 2.0, 3.0], affine(0, 1)
    # Busy from 1 on: 1 + 12. Anything that waits for slot 1 begins at 2 or later.
    buffers = plan_merged(slots_of(units), ready, predict)
    assert firsts(buffers) in ([0, 1], [0, 2], [0, 1, 2])
    assert exposed_s(buffers, ready, predict) == pytest.approx(13 - 3)


def test_only_the_last_gradient_is_left_over_when_the_link_is_fast() -> None:
    units, ready, predict = [8, 8, 8, 1], [10.0, 20.0, 30.0, 40.0], affine(1, 0.1)
    # The first three together are done at 30 + 1 + 2.4, before the last is ready: 1 + 0.1 sticks out.
    buffers = plan_merged(slots_of(units), ready, predict)
    assert firsts(buffers) == [0, 3]
    assert exposed_s(buffers, ready, predict) == pytest.approx(1.1)
    assert plan_two_segments(slots_of(units), ready, predict) == buffers


def test_the_two_segments_of_a_slow_start_are_cut_where_the_first_ends_as_the_second_is_ready() -> None:
    units, ready, predict = [1, 1, 1, 1], [1.0, 2.0, 3.0, 4.0], affine(1, 0.5)
    # Cut at 1: 1 + 1.5, 4 + 2.5 = 6.5. Cut at 2: 2 + 2, 4 + 2 = 6. Cut at 3: 3 + 2.5 = 5.5, + 1.5 = 7.
    assert firsts(plan_two_segments(slots_of(units), ready, predict)) == [0, 2]


def test_a_gradient_that_is_early_waits_for_those_before_it() -> None:
    units, predict = [2, 2, 2], affine(1, 1)
    for out_of_order, in_order in (([5.0, 1.0, 6.0], [5.0, 5.0, 6.0]), ([5.0, 6.0, 1.0], [5.0, 6.0, 6.0])):
        assert plan_merged(slots_of(units), out_of_order, predict) == plan_merged(slots_of(units), in_order, predict)
        each = plan_buffers(slots_of(units), UNIT)
        assert exposed_s(each, out_of_order, predict) == exposed_s(each, in_order, predict) == 5 + 9 - 6


def test_half_precision_halves_what_a_buffer_carries() -> None:
    asked: list[int] = []

    def predict(num_bytes: int) -> float:
        asked.append(num_bytes)
        return 1.0

    layout = slots_of([1, 2])
    plan_merged(layout, [1.0, 2.0], predict, bytes_per_element=2)
    assert sorted(asked) == [UNIT / 2, UNIT, 3 * UNIT / 2]
    whole = plan_buffers(layout, math.inf)
    assert exposed_s(whole, [1.0, 2.0], float, bytes_per_element=2) == 3 * UNIT / 2


@pytest.mark.parametrize("plan", [plan_merged, plan_two_segments])
@pytest.mark.parametrize(
    ("ready", "sentence"),
    [([1.0], "1 ready times for 2 gradients"), ([1.0, math.nan], "no number"), ([-1.0, 2.0], "negative")],
)
def test_ready_times_that_do_not_fit_are_a_sentence(
    plan: Callable[..., object], ready: list[float], sentence: str
) -> None:
    with pytest.raises(LockstepError, match=sentence):
        plan(slots_of([1, 2]), ready, affine(1, 1))


@given(sizes, sizes, st.floats(1, 50_000))
def test_no_buffer_holds_two_formats_and_fp32_travels_last(
    halves: list[int], norms: list[int], threshold: float
) -> None:
    specs = [ParameterSpec(f"h{i}", (n,), True, True, half=True) for i, n in enumerate(halves)]
    specs += [ParameterSpec(f"n{i}", (n,), False, False) for i, n in enumerate(norms)]
    layout = plan_layout(specs)
    *head, tail = add_tail(layout, plan_buffers(layout.head, threshold, layout.head_element_bytes))
    assert [b.element_bytes for b in head] == [2] * len(head)
    assert (head[0].start, head[-1].end) == (0, layout.split)
    assert tail == Buffer(layout.split, layout.numel, len(halves), len(specs), element_bytes=4)
    assert sum(b.num_bytes for b in (*head, tail)) == layout.gradient_bytes


def test_without_half_slots_there_is_no_tail() -> None:
    layout = lay_out([5, 7])
    assert add_tail(layout, plan_buffers(layout, 1.0)) == plan_buffers(layout, 1.0)
