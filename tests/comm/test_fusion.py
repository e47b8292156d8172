import itertools

from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.fusion import plan_buffers
from lockstep.layout import ALIGNMENT, Layout, ParameterSpec, plan_layout

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
