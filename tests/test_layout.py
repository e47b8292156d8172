"""Slots in the flat arrays: aligned, apart, in backward order."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.layout import ALIGNMENT, Layout, ParameterSpec, plan_layout

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)
parameters = st.lists(st.tuples(shapes, st.booleans(), st.booleans(), st.booleans()), max_size=30).map(
    lambda rows: [ParameterSpec(f"p{i}", *row) for i, row in enumerate(rows)]
)


@given(parameters)
def test_no_element_belongs_to_two_slots_or_lies_outside(specs: list[ParameterSpec]) -> None:
    layout = plan_layout(specs)
    owned = [element for slot in layout.slots for element in range(slot.offset, slot.end)]
    assert len(owned) == len(set(owned)) == sum(math.prod(spec.shape) for spec in specs)
    assert all(0 <= element < layout.numel for element in owned)


@given(parameters)
def test_slots_and_the_end_are_aligned_without_waste(specs: list[ParameterSpec]) -> None:
    layout = plan_layout(specs)
    starts = [*(slot.offset for slot in layout.slots), layout.numel]
    assert all(start % ALIGNMENT == 0 for start in starts)
    gaps = [start - slot.end for slot, start in zip(layout.slots, starts[1:], strict=True)]
    assert all(0 <= gap < ALIGNMENT for gap in gaps)


@given(parameters)
def test_half_slots_come_first_and_both_parts_stand_in_backward_order(specs: list[ParameterSpec]) -> None:
    layout = plan_layout(specs)
    backward = specs[::-1]
    expected = [spec for spec in backward if spec.half] + [spec for spec in backward if not spec.half]
    assert [ParameterSpec(s.name, s.shape, s.decay, s.adapt, s.half) for s in layout.slots] == expected
    assert all(slot.half == (slot.offset < layout.split) for slot in layout.slots)
    assert [slot.name for slot in sorted(layout.slots, key=lambda slot: slot.depth)] == [s.name for s in backward]


@given(parameters)
def test_the_head_is_the_half_part_or_everything(specs: list[ParameterSpec]) -> None:
    layout = plan_layout(specs)
    halves = [slot for slot in layout.slots if slot.half]
    assert list(layout.head.slots) == (halves or list(layout.slots))
    assert layout.head.numel == (layout.split or layout.numel)
    assert layout.gradient_bytes == 4 * layout.numel - 2 * layout.split
    assert layout.head_element_bytes == (2 if halves else 4)


def test_a_model_without_parameters_has_an_empty_layout() -> None:
    assert plan_layout([]) == Layout((), 0)
