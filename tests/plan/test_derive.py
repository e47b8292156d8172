"""Profiles of hardware that nobody here has."""

from dataclasses import replace

import pytest

from lockstep.errors import LockstepError
from lockstep.plan import shipped
from lockstep.plan.derive import DATASHEETS, RATES, Datasheet, bend, derive, derive_published, meet_rate
from lockstep.plan.device import BatchTime, DeviceProfile, LayerTime, SlotReady, from_json, to_json
from lockstep.plan.plan import Execution
from tests.plan.synthetic import ALEXNET_RATES, synthesize

KNOWN = Datasheet("known", flops=1e12, bandwidth=1e9, memory_bytes=10**9)


def build_row(batch: int, forward_s: float, backward_s: float, kept: int) -> BatchTime:
    return BatchTime(
        batch=batch,
        execution=Execution(),
        step_s=forward_s + backward_s + 0.5,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=0.5,
        launch_s=0.0,
        memory_bytes=1000,
        layers=(LayerTime("a", forward_s, backward_s, kept, ("a.w", "a.b")),),
        slots=(SlotReady("a.b", 2, 8, backward_s / 2), SlotReady("a.w", 8, 16, backward_s)),
    )


def build_profile() -> DeviceProfile:
    # Forward 1 s + 1 s an image, backward 2 s + 2 s an image, of which 0.25 GB an image kept: 0.5 s and 0.75 s.
    rows = [build_row(batch, 1.0 + batch, 2.0 + 2 * batch, batch * 250_000_000) for batch in (2, 4)]
    return DeviceProfile("known", "m", 32, "fp16", "sgd", "measured", "", 10**9, tuple(rows))


def test_fixed_travelling_and_computing_parts_are_scaled_apart() -> None:
    wanted = Datasheet("wanted", flops=0.25e12, bandwidth=0.5e9, memory_bytes=7)
    found = derive(build_profile(), KNOWN, wanted)
    assert (found.device, found.source, found.memory_bytes) == ("wanted", "derived", 7)
    row = found.at(2)
    # Forward: 2 × 0.5 s travel at half the speed, 2 × 0.5 s compute at a quarter: 2 s become 6, and the fixed 1 s 3.
    assert row.forward_s == pytest.approx(3 * (1 + 2))
    # Backward: 2 × 0.75 s travel, 2 × 1.25 s compute: 4 s become 13, and the fixed 2 s grow as they do.
    assert row.backward_s == pytest.approx(13 / 4 * (2 + 4))
    assert row.update_s == pytest.approx(2 * 0.5)
    assert row.step_s == pytest.approx(row.forward_s + row.backward_s + row.update_s)
    assert [slot.ready_s for slot in row.slots] == pytest.approx([row.backward_s / 2, row.backward_s])


def test_the_same_device_is_itself() -> None:
    profile = synthesize()
    found = derive(profile, DATASHEETS["h200"], DATASHEETS["h200"])
    for row, same in zip(profile.batches, found.batches, strict=True):
        assert same.step_s == pytest.approx(row.step_s)
        assert [s.ready_s for s in same.slots] == pytest.approx([s.ready_s for s in row.slots])


def test_wider_elements_take_twice_the_room_and_the_time_to_travel() -> None:
    wanted = replace(KNOWN, name="wanted", precision="fp32")
    row = derive(build_profile(), KNOWN, wanted).at(4)
    assert row.forward_s == pytest.approx((2 * 0.5 + 0.5) * (1 + 4))  # half of it travels
    assert row.memory_bytes == 2000
    assert row.layers[0].activation_bytes == 2_000_000_000
    assert [slot.num_bytes for slot in row.slots] == [8, 32]  # one was FP32 before


@pytest.mark.parametrize(("device", "model"), sorted(RATES))
def test_a_published_rate_is_met_at_its_batch(device: str, model: str) -> None:
    measured = synthesize() if model == "resnet50" else synthesize(model, ALEXNET_RATES)
    found = derive_published(device, model, measured, synthesize())
    rate = RATES[device, model]
    assert rate.batch / found.at(rate.batch).step_s == pytest.approx(rate.images_s, rel=1e-9)
    assert found.source == "derived"
    assert f"{rate.images_s:g} images/s" in found.note
    assert rate.source in found.note
    assert to_json(from_json(to_json(found))) == to_json(found)
    # Published software makes about as much of its device as ours does: else a datasheet is wrong.
    assert 0.3 < meet_rate(measured, DATASHEETS["h200"], DATASHEETS[device], rate) < 3
    for row in found.batches:
        assert sum(layer.backward_s for layer in row.layers) == pytest.approx(row.backward_s)
        assert max(slot.ready_s for slot in row.slots) <= row.backward_s * (1 + 1e-9)
        assert [slot.ready_s for slot in row.slots] == sorted(slot.ready_s for slot in row.slots)


def test_a_model_without_a_rate_is_calibrated_by_the_one_that_has_it() -> None:
    alexnet = synthesize("alexnet", ALEXNET_RATES)
    found = derive_published("p40", "alexnet", alexnet, synthesize())
    factor = meet_rate(synthesize(), DATASHEETS["h200"], DATASHEETS["p40"], RATES["p40", "resnet50"])
    wanted = derive(alexnet, DATASHEETS["h200"], DATASHEETS["p40"], factor)
    assert found.batches == wanted.batches
    assert "218 images/s of resnet50" in found.note


def test_a_moment_keeps_its_place_between_the_ends_of_layers() -> None:
    old, new = [1.0, 3.0, 4.0], [10.0, 11.0, 21.0]
    moments = (0.0, 0.5, 1.0, 2.0, 3.5, 4.0, 9.0)
    assert [bend(moment, old, new) for moment in moments] == [0.0, 5.0, 10.0, 10.5, 16.0, 21.0, 21.0]
    assert bend(1.0, [1.0, 1.0], [2.0, 2.0]) == 2.0


def test_a_profile_of_one_batch_and_a_senseless_factor_are_refused() -> None:
    profile = build_profile()
    with pytest.raises(LockstepError, match="one batch"):
        derive(replace(profile, batches=profile.batches[:1]), KNOWN, KNOWN)
    with pytest.raises(LockstepError, match="factor"):
        derive(profile, KNOWN, KNOWN, float("nan"))


def test_every_shipped_profile_reads_and_an_unknown_one_is_a_sentence() -> None:
    for device, model in shipped.list_shipped():
        profile = shipped.read_shipped(device, model)
        assert profile.model == model
        assert profile.source == ("measured" if device == "h200" else "derived")
    with pytest.raises(LockstepError, match="no profile of tpu with resnet50"):
        shipped.read_shipped("tpu", "resnet50")
