"""A plan as a file: what was written is read back, and whatever does not describe a plan is found out."""

import random
import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.cost import FLAT, Choice
from lockstep.comm.fusion import ReductionPlan, add_tail, plan_buffers
from lockstep.errors import LockstepError
from lockstep.layout import Layout, ParameterSpec, plan_layout
from lockstep.plan.plan import Execution, InputPlan, Plan, describe_reduction, from_toml, to_table, to_toml

INPUT = InputPlan("both", 4, 2, 0)


def build_layout(halves: list[bool]) -> Layout:
    return plan_layout(
        ParameterSpec(f"w{index}", (index + 3, 7), True, True, half) for index, half in enumerate(halves)
    )


def build_plan(layout: Layout, threshold: float = 100.0, overlap: bool = True) -> Plan:
    buffers = add_tail(layout, plan_buffers(layout.head, threshold, layout.head_element_bytes))
    choices = tuple([FLAT, Choice("hierarchical", 2), Choice("doubling")][i % 3] for i in range(len(buffers)))
    return Plan(Execution("own", True), ReductionPlan(buffers, choices, overlap), INPUT)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.floats(1, 1e4), st.booleans())
def test_a_plan_survives_its_file(halves: list[bool], threshold: float, overlap: bool) -> None:
    layout = build_layout(halves)
    plan = build_plan(layout, threshold, overlap)
    assert from_toml(to_toml(plan), layout, 4) == plan


def damage(table: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *way, last = path.split(".")
    place: Any = table
    for key in way:
        place = place[int(key)] if key.isdigit() else place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return table


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("execution.kernels", "theirs"),
        ("execution.recorded", 1),
        ("execution", None),
        ("reduction.overlap", "yes"),
        ("reduction.buffer", []),
        ("reduction.buffer", [1, 2]),
        ("reduction.buffer.0.first", 1),
        ("reduction.buffer.0.last", 0),  # an empty buffer
        ("reduction.buffer.0.last", -1),
        ("reduction.buffer.1.first", 0),  # a slot twice
        ("reduction.buffer.2.last", 99),
        ("reduction.buffer.1.first", 2.0),
        ("reduction.buffer.0.all_reduce", "carrier pigeon"),
        ("reduction.buffer.0.all_reduce", "hierarchical/5000"),
        ("reduction.buffer.0.all_reduce", 7),
        ("input.threads", 0),
        ("input.threads", 10**30),
        ("input.decoder", "abacus"),
    ],
)
def test_what_is_no_plan_for_this_layout_is_a_sentence(path: str, value: Any) -> None:
    layout = build_layout([True] * 6 + [False] * 3)
    table = to_table(build_plan(layout))
    assert len(table["reduction"]["buffer"]) > 2
    with pytest.raises(LockstepError, match=r"plan|all-reduce"):
        from_toml(tomli_w.dumps(damage(table, path, value)), layout, 4)


def test_a_plan_of_another_network_is_a_sentence() -> None:
    layout = build_layout([True] * 5)
    with pytest.raises(LockstepError, match="each of the 4 gradients once"):
        from_toml(to_toml(build_plan(layout)), build_layout([True] * 4), 2)


def test_a_buffer_never_holds_two_formats() -> None:
    layout = build_layout([True, True, False])
    table = to_table(build_plan(layout))
    table["reduction"]["buffer"] = [{"first": 0, "last": 3, "all_reduce": "flat"}]
    with pytest.raises(LockstepError, match="mix the 2 half gradients"):
        from_toml(tomli_w.dumps(table), layout, 2)


def test_any_bytes_are_a_plan_or_a_sentence() -> None:
    layout = build_layout([True, False, True])
    text = to_toml(build_plan(layout))
    generator = random.Random(0)
    for _ in range(300):
        letters = list(text)
        for _ in range(generator.randint(1, 4)):
            letters[generator.randrange(len(letters))] = chr(generator.randrange(32, 127))
        try:
            plan = from_toml("".join(letters), layout, 4)
        except LockstepError:
            continue
        assert sum(buffer.last - buffer.first for buffer in plan.reduction.buffers) == 3


def test_deep_nesting_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match="not valid TOML"):
        from_toml("a = " + "[" * 100_000, build_layout([True]), 2)


@pytest.mark.parametrize("path", ["execution.kernels", "input.threads", "reduction.buffer.0.all_reduce"])
def test_an_integer_of_thousands_of_digits_is_a_short_sentence(path: str) -> None:
    layout = build_layout([True] * 6 + [False] * 3)
    text = tomli_w.dumps(damage(to_table(build_plan(layout)), path, "HERE")).replace('"HERE"', "0x" + "f" * 5000)
    with pytest.raises(LockstepError, match="plan") as caught:
        from_toml(text, layout, 4)
    assert len(str(caught.value)) < 500


def test_in_words_it_says_buffers_overlap_and_algorithms() -> None:
    layout = build_layout([False] * 2)
    plan = build_plan(layout, threshold=1e9)
    assert describe_reduction(plan.reduction) == "1 buffer under the backward pass (by flat)"
    mixed = build_plan(layout, threshold=1.0, overlap=False)
    assert describe_reduction(mixed.reduction) == "2 buffers after the backward pass (1 by flat, 1 by hierarchical/2)"
    assert tomllib.loads(to_toml(mixed))["input"]["decoder"] == "both"
