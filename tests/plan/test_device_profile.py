"""A device's profile: what it says between and beyond the batches it was measured at, and as a file."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from lockstep.plan.device import BatchTime, DeviceInput, DeviceProfile, LayerTime, SlotReady, from_json, to_json
from lockstep.plan.plan import Execution
from tests.plan.synthetic import OWN, RESNET50_RATES, synthesize

PLAIN = Execution()


def build_row(batch: int, execution: Execution = PLAIN, scale: float = 1.0) -> BatchTime:
    """4 ms and 2 ms an image: what is twice as long takes twice as much."""
    s = scale * 1e-3
    return BatchTime(
        batch=batch,
        execution=execution,
        step_s=(4 + 2 * batch) * s,
        forward_s=(1 + 0.5 * batch) * s,
        backward_s=(2 + 1.25 * batch) * s,
        update_s=(1 + 0.25 * batch) * s,
        launch_s=0.25 * s,
        memory_bytes=1000 + 100 * batch,
        layers=(LayerTime("a", (1 + 0.5 * batch) * s, (2 + 1.25 * batch) * s, 64 * batch, ("a.w",)),),
        slots=(SlotReady("a.w", 7, 28, (2 + 1.25 * batch) * s),),
    )


def build_profile(*rows: BatchTime) -> DeviceProfile:
    found = DeviceInput("cpu", 500.0, 1e5, 0.0)
    return DeviceProfile("x", "m", 224, "fp32", "sgd", "measured", "a note", 10**9, rows, found)


def test_between_and_beyond_measured_batches_times_are_straight_lines() -> None:
    profile = build_profile(build_row(4), build_row(16), build_row(8))
    for batch in (4, 6, 8, 10, 16, 64, 2):
        found, wanted = profile.at(batch, PLAIN), build_row(batch)
        assert found.batch == batch
        assert found.extrapolated == (batch in (2, 64))
        for name in ("step_s", "forward_s", "backward_s", "update_s", "launch_s", "memory_bytes"):
            assert getattr(found, name) == pytest.approx(getattr(wanted, name)), (batch, name)
        assert found.layers[0].backward_s == pytest.approx(wanted.layers[0].backward_s)
        assert found.layers[0].activation_bytes == wanted.layers[0].activation_bytes
        assert found.slots[0].ready_s == pytest.approx(wanted.slots[0].ready_s)
        assert (found.slots[0].elements, found.slots[0].num_bytes) == (7, 28)


def test_one_batch_tells_a_rate() -> None:
    found = build_profile(build_row(4)).at(12)
    assert found.step_s == pytest.approx(3 * build_row(4).step_s)
    assert found.extrapolated


def test_a_line_below_the_smallest_batch_never_goes_below_zero() -> None:
    steep = replace(build_row(8), update_s=1.0)
    assert build_profile(build_row(4), steep).at(1).update_s == 0.0


def test_the_quickest_way_is_taken_among_those_measured_that_far() -> None:
    plain = build_row(4), build_row(8), build_row(16, scale=3.0)
    own = build_row(4, OWN, 2.0), build_row(8, OWN, 0.5)
    profile = build_profile(*plain, *own)
    assert profile.executions == (PLAIN, OWN)
    assert profile.at(4).execution == PLAIN
    assert profile.at(8).execution == OWN
    assert profile.at(16).execution == PLAIN  # quicker ones did not fit there, or nobody looked
    with pytest.raises(LockstepError, match="no step with compiled whole"):
        profile.at(4, Execution(compile="whole"))
    with pytest.raises(LockstepError, match="batch of 0"):
        profile.at(0)


def test_a_profile_survives_its_file_to_four_digits_and_is_small() -> None:
    exact = build_profile(build_row(4), build_row(8, OWN))
    assert from_json(to_json(exact)) == exact
    assert from_json(to_json(replace(exact, input=None))).input is None
    profile = synthesize()
    text = to_json(profile)
    assert len(text) < 40_000
    again = from_json(text)
    assert to_json(again) == text
    for row, read in zip(profile.batches, again.batches, strict=True):
        assert read.step_s == pytest.approx(row.step_s, rel=5e-4)
        assert [slot.num_bytes for slot in read.slots] == [slot.num_bytes for slot in row.slots]
    assert again.at(256).batch / again.at(256).step_s == pytest.approx(RESNET50_RATES[256], rel=1e-3)


def change(path: list[Any], value: Any) -> str:
    table = json.loads(to_json(build_profile(build_row(4), build_row(8))))
    place = table
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(table)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], 2),
        (["source"], "guessed"),
        (["note"], "x" * 3000),
        (["device"], "[/bold]"),
        (["image_size"], 0),
        (["memory_bytes"], -1),
        (["memory_bytes"], 1e9),
        (["batches"], []),
        (["batches", 0, "batch"], 8),
        (["batches", 0, "batch"], True),
        (["batches", 0, "batch"], 1 << 40),
        (["batches", 0, "step_s"], 0),
        (["batches", 0, "step_s"], -1.0),
        (["batches", 0, "step_s"], float("nan")),
        (["batches", 0, "step_s"], float("inf")),
        (["batches", 0, "step_s"], 10**400),
        (["batches", 0, "layers"], []),
        (["batches", 0, "layers", 0], [1, 2]),
        (["batches", 0, "layers", 0, 2], 1.5),
        (["batches", 0, "ready_s"], [1, 2]),
        (["batches", 0, "execution", "kernels"], "mine"),
        (["batches", 0, "execution", "recorded"], 1),
        (["layers", 0, 1], "b.w"),
        (["layers", 0], []),
        (["slots", 0, 1], 0),
        (["slots", 0], ["a.w", 7]),
        (["input", "images_per_core_s"], 0),
        (["input", "copy_bytes_s"], -1),
        (["input"], [1]),
    ],
)
def test_what_nobody_can_have_measured_is_refused(path: list[Any], value: Any) -> None:
    with pytest.raises(LockstepError, match="device profile"):
        from_json(change(path, value))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=6), st.data())
@settings(max_examples=60, deadline=None)
def test_any_value_anywhere_is_a_profile_or_a_sentence(value: Any, data: st.DataObject) -> None:
    table: Any = json.loads(to_json(build_profile(build_row(4), build_row(8))))
    path: list[Any] = []
    while isinstance(table, dict | list) and table and (not path or data.draw(st.booleans())):
        path.append(data.draw(st.sampled_from(sorted(table) if isinstance(table, dict) else range(len(table)))))
        table = table[path[-1]]
    try:
        found = from_json(change(path, value))
    except LockstepError:
        return
    assert found.at(6).step_s > 0


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": 1}', "[" * 100_000, "\x00"])
def test_other_text_is_no_profile(text: str) -> None:
    with pytest.raises(LockstepError, match="device profile"):
        from_json(text)
