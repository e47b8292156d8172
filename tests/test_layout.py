"""Slots in the flat arrays: aligned, apart, in backward order."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.layout import ALIGNMENT, Layout, ParameterSpec, plan_layout

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)
parameters = st.lists(st.tuples(shapes, st.booleans(), st.booleans()), max_size=30).map(
    lambda rows: [ParameterSpec(f"p{i}", shape, decay, adapt) for i, (shape, decay, adapt) in enumerate(rows)]
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
def test_slots_stand_in_backward_order_and_keep_what_they_were_told(specs: list[ParameterSpec]) -> None:
    slots = reversed(plan_layout(specs).slots)
    assert [ParameterSpec(s.name, s.shape, s.decay, s.adapt) for s in slots] == specs


def test_a_model_without_parameters_has_an_empty_layout() -> None:
    assert plan_layout([]) == Layout((), 0)
