"""Logarithmic axes: every value inside, numbers to read it by, and room for each of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.page.log_axis import MOST_TICKS, build_log_axis


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([320.0, 380.0], ["200", "500"]),
        ([1000.0], ["1,000", "2,000"]),
        ([128.0, 3200.0], ["100", "200", "500", "1,000", "2,000", "5,000"]),
        ([0.3, 2.0], ["0.2", "0.5", "1", "2"]),
        ([128.0, 2e6], ["100", "1,000", "10,000", "100,000", "1,000,000"]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(values: list[float], names: list[str]) -> None:
    assert build_log_axis(values)["ticktext"] == names


@given(st.lists(st.floats(min_value=0, exclude_min=True, allow_infinity=False), min_size=1))
def test_every_axis_holds_its_values_and_two_ticks(values: list[float]) -> None:
    axis = build_log_axis(values)
    low, high = axis["range"]
    assert low < math.log10(min(values)) <= math.log10(max(values)) < high
    assert 2 <= len(axis["tickvals"]) == len(axis["ticktext"]) <= MOST_TICKS


def test_what_has_no_logarithm_is_left_out() -> None:
    assert build_log_axis([-5.0, 0.0]) == {"type": "log"}
    assert build_log_axis([-5.0, 0.0, 300.0]) == build_log_axis([300.0])
