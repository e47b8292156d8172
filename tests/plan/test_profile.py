"""A profile as a file, and what follows from it."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.comm.cost import FLAT, Choice, Timing
from lockstep.comm.fusion import ReductionPlan, plan_buffers
from lockstep.errors import LockstepError
from lockstep.layout import ParameterSpec, plan_layout
from lockstep.plan.folder import PLAN_FILE, PROFILE_FILE, read_plan, read_profile, write_plan
from lockstep.plan.plan import Execution, InputPlan, Plan
from lockstep.plan.profile import InputRate, Profile, Setup, SlotTime, StepTime, Trial, from_json, time_slots, to_json

SETUP = Setup("H200", "2x8", "", "nccl 2.28.9", "fp16", 256, 256, 224, "resnet50", "lars", "torch 2.11")
OWN = Execution("own", recorded=True)
PROFILE = Profile(
    SETUP,
    2.5,
    steps=(
        StepTime(
            OWN, 0.024, 0.016, (SlotTime("fc.weight", 4_096_000, 0.001, 0.001), SlotTime("b", 64, 0.0035, 0.0025))
        ),
    ),
    messages=(Timing(FLAT, 1024, 1e-4), Timing(FLAT, 1 << 20, 1e-3), Timing(Choice("torus", 8), 1024, 2e-4)),
    trials=(Trial(OWN, "merged", "2 buffers", 0.025), Trial(Execution(), "merged", "", math.inf, "no memory (rank 1)")),
    input=InputRate(9500.0, "both", 4),
)
LAYOUT = plan_layout([ParameterSpec("w", (4, 4), True, True)])
PLAN = Plan(OWN, ReductionPlan(plan_buffers(LAYOUT, 1e9), (FLAT,), True), InputPlan("cpu", 1, 0, 0))


def test_a_profile_survives_its_file() -> None:
    assert from_json(to_json(PROFILE)) == PROFILE
    assert from_json(to_json(Profile(SETUP, 0.0))) == Profile(SETUP, 0.0)


def test_a_profile_of_an_earlier_version_does_not_tell_the_parts_of_a_step() -> None:
    told = replace(PROFILE.steps[0], forward_s=0.006, update_s=0.002, mean_s=0.025, slowest_s=0.026)
    profile = replace(PROFILE, steps=(told,))
    assert from_json(to_json(profile)) == profile
    table = json.loads(to_json(profile))
    for name in ("forward_s", "update_s", "mean_s", "slowest_s"):
        del table["steps"][0][name]
    assert from_json(json.dumps(table)) == PROFILE
    table["steps"][0]["slowest_s"] = -1.0
    with pytest.raises(LockstepError, match="damaged"):
        from_json(json.dumps(table))


def test_seconds_of_each_slot_are_the_distances_of_ready_times() -> None:
    layout = plan_layout(ParameterSpec(name, (8,), True, True, half=name in "bd") for name in "abcd")
    slots = {slot.name: slot for slot in time_slots(layout, [0.5, 0.75, 0.625, 1.0])}
    order = [slot.name for slot in layout.slots]
    assert order == ["d", "b", "c", "a"]  # half ones first, each part in backward order
    assert [slots[name].backward_s for name in order] == [0.5, 0.125, 0.125, 0.25]
    assert [slots[name].num_bytes for name in order] == [16, 16, 32, 32]


def test_costs_are_fitted_where_two_sizes_were_measured() -> None:
    (choice,) = PROFILE.fits
    assert choice == FLAT
    assert PROFILE.fits[FLAT].predict(1 << 20) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "H100"},
        {"backend": "nccl 2.30.0"},
        {"precision": "bf16"},
        {"batch": 32},
        {"image_size": 160},
        {"links": "Link(1e-6, 1e9)"},
        {"topology": "4x4"},
        {"pins": "lars, overlap=on"},
    ],
)
def test_another_setup_has_another_name(change: dict[str, object]) -> None:
    other = replace(SETUP, **change)  # type: ignore[arg-type]
    assert other.name != SETUP.name
    assert "/" not in other.name


def test_plan_and_profile_are_kept_in_one_folder(tmp_path: Path) -> None:
    write_plan(tmp_path / "deep", PLAN, PROFILE)
    assert read_plan(tmp_path / "deep", LAYOUT, 16) == (PLAN, PROFILE)
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {PLAN_FILE, PROFILE_FILE}
    assert read_plan(tmp_path, LAYOUT, 16) is None
    (tmp_path / "deep" / PLAN_FILE).write_text("nonsense [")
    assert read_plan(tmp_path / "deep", LAYOUT, 16) is None
    assert read_profile(tmp_path / "deep") == PROFILE


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LockstepError, match="cannot be written"):
        write_plan(tmp_path / "file" / "folder", PLAN, PROFILE)


def test_a_damaged_profile_is_a_sentence() -> None:
    table = json.loads(to_json(PROFILE))
    for wrong in (
        table | {"format": 99},
        table | {"seconds": -1},
        table | {"steps": 7},
        table | {"setup": {}},
        table | {"messages": [{"all_reduce": "flat", "bytes": -5, "seconds": 1.0}]},
        table | {"trials": [{}]},
        table | {"seconds": 10**400},
        table | {"setup": table["setup"] | {"batch": 10**400}},
        table | {"setup": table["setup"] | {"device": "[/bold]"}},
        table | {"messages": [{"all_reduce": "flat", "bytes": 10**400, "seconds": 1.0}]},
        *(
            table | {"messages": [{"all_reduce": "flat", "bytes": number, "seconds": seconds} for number in (1, 9)]}
            for seconds in (0, 1e-320, 1e300)
        ),
        table | {"trials": [table["trials"][0] | {"failure": "[/bold]"}]},
        [],
    ):
        with pytest.raises(LockstepError, match="The profile"):
            from_json(json.dumps(wrong))
    with pytest.raises(LockstepError, match="The profile"):
        from_json("[" * 100_000)


def test_any_bytes_are_a_profile_or_a_sentence() -> None:
    text = to_json(PROFILE)
    generator = random.Random(1)
    for _ in range(300):
        letters = list(text)
        for _ in range(generator.randint(1, 4)):
            letters[generator.randrange(len(letters))] = chr(generator.randrange(32, 127))
        try:
            from_json("".join(letters))
        except LockstepError:
            continue
