"""What a run expects of itself, against steps worked by hand."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.cost import FLAT, Choice, Timing, predict_seconds
from lockstep.comm.fusion import Buffer, ReductionPlan
from lockstep.comm.topology import Link, Topology
from lockstep.plan import foresight
from lockstep.plan.foresight import DERIVED, GUESS, LINKS, NOW, ONCE, SHIPPED, Facts, find_device, foresee
from lockstep.plan.graph import expect_slowest
from lockstep.plan.plan import Execution, InputPlan, Plan
from lockstep.plan.profile import InputRate, Profile, Setup, SlotTime, StepTime, Trial
from tests.plan.synthetic import OWN, synthesize

SETUP = Setup("NVIDIA H200", "1x2", "", "nccl 2.28.9", "fp16", 50, 256, 224, "resnet50", "lars", "torch 2.11")
TWO = Topology(((0, 1),))
# Two gradients of 1,000,000 and 250,000 elements, ready 20 and 60 ms into a backward pass of 60.
SLOTS = (SlotTime("fc", 4_000_000, 0.02, 0.02), SlotTime("conv", 1_000_000, 0.06, 0.04))
STEP = StepTime(Execution(), 0.1, 0.06, SLOTS, forward_s=0.03, update_s=0.01, mean_s=0.1, slowest_s=0.1)
BUFFERS = (Buffer(0, 1_000_000, 0, 1), Buffer(1_000_000, 1_250_000, 1, 2))
# 30 ms for the first, 10 ms for the second.
MESSAGES = (Timing(FLAT, 1_000_000, 0.01), Timing(FLAT, 4_000_000, 0.03))


def make_facts(*, overlap: bool = True, step: StepTime = STEP, **changes: Any) -> Facts:
    profile = Profile(SETUP, 1.0, steps=(step,), messages=MESSAGES)
    plan = Plan(Execution(), ReductionPlan(BUFFERS, (FLAT, FLAT), overlap), InputPlan("cpu", 2, 0, 0))
    values: dict[str, Any] = {
        "plan": plan,
        "profile": profile,
        "source": "measured",
        "topology": TWO,
        "wire_bytes": 4,
        "on_gpu": True,
        "global_batch": 100,
        "num_images": 1000,
        "steps": 70,
    }
    return Facts(**(values | changes))


def test_a_step_on_a_gpu_hides_what_fits_under_the_backward_pass() -> None:
    # In steps of 10 ms. Buffer 1 is full after 2, buffer 2 after 6 units of backward.
    #   compute  fff bbbbbb . u
    #   network  ... ..1112      buffer 2 alone is waited for
    found = foresee(make_facts())
    assert found is not None
    assert [found.input_s, found.forward_s, found.backward_s, found.slowest_s] == pytest.approx([0, 0.03, 0.06, 0])
    assert [found.communicate_s, found.update_s, found.messages_s] == pytest.approx([0.01, 0.01, 0.04])
    assert [found.compute_s, found.step_s] == pytest.approx([0.1, 0.11])
    assert found.images_per_second == pytest.approx(100 / 0.11)
    assert found.speed_one_rank == pytest.approx(50 / 0.1)
    assert found.efficiency == pytest.approx(0.1 / 0.11)
    assert found.images_per_second == pytest.approx(found.speed_one_rank * 2 * found.efficiency)
    assert (found.steps, found.images, found.world_size) == (70, 100, 2)
    assert found.train_s == pytest.approx(70 * 0.11)
    assert found.sources == {"computing": NOW, "messages": NOW, "slowest": NOW, "input": GUESS}


def test_messages_after_the_backward_pass_hide_nothing() -> None:
    found = foresee(make_facts(overlap=False))
    assert found is not None
    assert [found.communicate_s, found.step_s] == pytest.approx([0.04, 0.14])


def test_on_a_cpu_messages_and_computing_share_the_cores_so_that_all_work_adds_up() -> None:
    # Under the backward pass each gets half: buffer 1 takes 60 ms and backward makes 30 of its 40 left, ends 10 later,
    # and buffer 2 follows alone. Nothing is gained but nothing is lost: 100 ms and 40 ms.
    found = foresee(make_facts(on_gpu=False))
    assert found is not None
    assert [found.forward_s, found.backward_s, found.communicate_s] == pytest.approx([0.03, 0.09, 0.01])
    assert found.step_s == pytest.approx(0.14)
    after = foresee(make_facts(on_gpu=False, overlap=False))
    assert after is not None
    assert [after.backward_s, after.communicate_s, after.step_s] == pytest.approx([0.06, 0.04, 0.14])


def test_all_wait_for_the_slowest_rank() -> None:
    # The mean rank takes 110 ms, rank 0 100 ms, the slowest 121 ms: all parts by 1.1, and 10 % on both passes.
    found = foresee(make_facts(step=replace(STEP, mean_s=0.11, slowest_s=0.121)))
    assert found is not None
    assert [found.forward_s, found.backward_s, found.update_s] == pytest.approx([0.033, 0.066, 0.011])
    assert found.slowest_s == pytest.approx(0.0099)
    # Full after 24.2 and 72.6 ms of a backward pass of 72.6.
    assert found.communicate_s == pytest.approx(0.01)
    assert found.step_s == pytest.approx(0.033 + 0.066 + 0.0099 + 0.01 + 0.011)
    guessed = foresee(make_facts(step=replace(STEP, mean_s=0.0, slowest_s=0.0)))
    assert guessed is not None
    assert guessed.slowest_s == pytest.approx(0.09 * expect_slowest(2, 0.01))
    assert guessed.sources["slowest"] == GUESS


def test_passes_before_the_last_send_nothing() -> None:
    # Two passes of 25 images: forward and backward twice, gradients ready in the second backward pass.
    step = replace(STEP, step_s=0.19, forward_s=0.06, mean_s=0.19, slowest_s=0.19)
    found = foresee(make_facts(step=step, passes=2))
    assert found is not None
    assert [found.forward_s, found.backward_s, found.communicate_s] == pytest.approx([0.06, 0.12, 0.01])
    assert found.step_s == pytest.approx(0.20)


def test_smaller_last_batches_take_less_computing_and_the_same_messages() -> None:
    found = foresee(make_facts(num_images=150, overlap=False))
    assert found is not None
    assert found.images == 75
    assert [found.forward_s, found.backward_s, found.update_s] == pytest.approx([0.0225, 0.045, 0.01])
    assert found.step_s == pytest.approx(0.0225 + 0.045 + 0.01 + 0.04)
    assert any("75 %" in text for text in found.assumptions)


def test_input_that_is_known_to_be_slow_is_waited_for() -> None:
    facts = make_facts()
    known = replace(facts, profile=replace(facts.profile, input=InputRate(250.0, "cpu", 2)), source="remembered")
    found = foresee(known)  # 50 images in 200 ms
    assert found is not None
    assert [found.step_s, found.input_s, found.input_rate] == pytest.approx([0.2, 0.09, 250.0])
    assert (found.sources["input"], found.sources["computing"]) == ("an earlier part of this run", ONCE)
    # On a CPU the threads take half of the cores they work on from computing; two threads work on four cores.
    on_cpu = foresee(replace(known, on_gpu=False, cores=4))
    assert on_cpu is not None
    assert on_cpu.forward_s == pytest.approx(0.03 + 0.5 * 0.2 * 2 / 4)
    quick = foresee(replace(known, profile=replace(facts.profile, input=InputRate(5000.0, "cpu", 2))))
    assert quick is not None
    assert [quick.step_s, quick.input_s] == pytest.approx([0.11, 0.0])


def test_a_rank_alone_takes_what_its_trial_took_and_sends_nothing() -> None:
    facts = make_facts(topology=Topology(((0,),)))
    trial = Trial(Execution(), "PyTorch's own", "", 0.09)
    found = foresee(replace(facts, profile=replace(facts.profile, messages=(), trials=(trial,))))
    assert found is not None
    assert [found.forward_s, found.backward_s, found.update_s] == pytest.approx([0.027, 0.054, 0.009])
    assert [found.step_s, found.messages_s, found.efficiency] == pytest.approx([0.09, 0.0, 1.0])
    assert "messages" not in found.sources


def test_anchors_are_epochs_of_steps_with_half_of_the_passes() -> None:
    # Alone, a step of 15 + 30 ms at the anchor, as much at the iterate, and 10 ms of update: 100 ms, and 55 for a batch
    # of an anchor. 70 steps take 7 s, 7 anchors of 10 batches 3.85 s.
    facts = make_facts(topology=Topology(((0,),)), passes=2, anchors=7, rule="halp")
    found = foresee(replace(facts, profile=replace(facts.profile, messages=())))
    assert found is not None
    assert [found.step_s, found.train_s, found.efficiency] == pytest.approx([0.1, 10.85, 1.0])
    assert found.images_per_second == pytest.approx(70 * 100 / 10.85)
    assert found.speed_one_rank == pytest.approx(70 * 100 / 10.85)
    # Its passes not known apart: 70 ms before the last backward pass of 30, and 50 for a batch of an anchor.
    merged = replace(STEP, backward_s=0.03, forward_s=0.0, update_s=0.0)
    unknown = foresee(make_facts(topology=Topology(((0,),)), step=merged, passes=2, anchors=7, rule="halp"))
    assert unknown is not None
    assert [unknown.step_s, unknown.train_s] == pytest.approx([0.1, 7 + 3.5])
    # Waiting for input of 200 ms a batch, both take as long.
    known = replace(facts, profile=replace(facts.profile, messages=(), input=InputRate(250.0, "cpu", 2)))
    waiting = foresee(known)
    assert waiting is not None
    assert [waiting.step_s, waiting.train_s] == pytest.approx([0.2, 140 * 0.2])


@pytest.mark.parametrize("rule", ["muon", "svrg", "halp"])
def test_what_a_rule_without_costs_takes_is_measured_and_its_memory_unknown(rule: str) -> None:
    facts = make_facts(device=synthesize(), rule=rule)
    found = foresee(facts)
    assert found is not None
    assert found.memory_bytes is None
    assert "memory" not in found.sources
    unmeasured = replace(facts, plan=replace(facts.plan, execution=OWN), profile=Profile(SETUP, 0.0))
    assert foresee(unmeasured) is None
    assert foresee(replace(unmeasured, rule="sgd")) is not None


def test_messages_nobody_measured_are_those_of_the_links() -> None:
    links = Topology(((0, 1),), intra=Link(1e-3, 1e8), inter=Link(1e-3, 1e8))
    for topology, source in ((links, LINKS), (TWO, GUESS)):
        facts = make_facts(topology=topology, overlap=False)
        found = foresee(replace(facts, profile=replace(facts.profile, messages=())))
        assert found is not None
        expected = sum(predict_seconds(FLAT, size, topology) for size in (4_000_000, 1_000_000))
        assert [found.messages_s, found.communicate_s] == pytest.approx([expected, expected])
        assert found.sources["messages"] == source
    mixed = make_facts()
    reduction = ReductionPlan(BUFFERS, (FLAT, Choice("doubling")), overlap=True)
    found = foresee(replace(mixed, plan=replace(mixed.plan, reduction=reduction)))
    assert found is not None
    assert found.messages_s == pytest.approx(0.03 + predict_seconds(Choice("doubling"), 1_000_000, TWO))
    assert found.sources["messages"] == GUESS


def test_half_numbers_on_the_way_are_half_the_bytes() -> None:
    found = foresee(make_facts(wire_bytes=2, overlap=False))
    assert found is not None
    assert found.messages_s == pytest.approx((0.01 + 0.02 / 3) + 0.01)  # 2 MB between two sizes, and the least there is


def test_a_profile_that_does_not_tell_forward_and_update_apart_predicts_the_same_step() -> None:
    found = foresee(make_facts(step=replace(STEP, forward_s=0.0, update_s=0.0)))
    assert found is not None
    assert (found.forward_s, found.backward_s, found.update_s) == (None, None, None)
    assert [found.compute_s, found.step_s] == pytest.approx([0.1, 0.11])


def test_where_nothing_is_known_nothing_is_predicted() -> None:
    facts = make_facts()
    assert foresee(replace(facts, profile=Profile(SETUP, 0.0), source="default")) is None
    other = replace(facts.plan, execution=Execution(recorded=True))
    assert foresee(replace(facts, plan=other)) is None


def test_a_device_profile_fills_in_what_was_not_measured() -> None:
    device = synthesize()
    facts = make_facts(device=device, decodes_photos=True, rule="lamb")
    plan = replace(facts.plan, execution=OWN)
    setup = replace(SETUP, batch=64)
    found = foresee(replace(facts, plan=plan, profile=Profile(setup, 0.0), global_batch=128, num_images=12800))
    assert found is not None
    row = device.at(64, OWN)
    assert [found.forward_s, found.update_s] == pytest.approx([row.forward_s, row.update_s])
    assert found.sources["computing"] == SHIPPED
    # LAMB keeps 4 bytes more for each parameter than LARS, by which the profile was measured.
    assert found.memory_bytes == row.memory_bytes + 4 * sum(slot.elements for slot in row.slots)
    assert found.input_rate == 2 * 500.0
    assert device.input is not None
    fast = replace(device, input=replace(device.input, device_images_s=6000.0))
    for decoder, rate in (("nvjpeg", 6000.0), ("both", 7000.0)):
        way = replace(plan, input=InputPlan(decoder, 2, 0, 0))  # type: ignore[arg-type]
        helped = foresee(replace(facts, plan=way, profile=Profile(setup, 0.0), device=fast))
        assert helped is not None
        assert helped.input_rate == rate
    derived = foresee(replace(facts, plan=plan, profile=Profile(setup, 0.0), device=replace(device, source="derived")))
    assert derived is not None
    assert derived.sources["memory"] == DERIVED


def test_a_shipped_profile_fits_device_model_precision_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "list_shipped", lambda: (("a100", "resnet50"), ("h200", "resnet50")))
    monkeypatch.setattr(foresight, "read_shipped", lambda device, model: replace(synthesize(), device=device))
    profile = Profile(SETUP, 0.0)
    found = find_device(profile, "resnet50")
    assert found is not None
    assert found.device == "h200"
    assert find_device(profile, "alexnet") is None
    for change in ({"device": "NVIDIA H100 80GB HBM3"}, {"precision": "fp32"}, {"image_size": 128}):
        assert find_device(replace(profile, setup=replace(SETUP, **change)), "resnet50") is None
    a100 = find_device(replace(profile, setup=replace(SETUP, device="NVIDIA A100-SXM4-80GB")), "resnet50")
    assert a100 is not None


@given(
    ready=st.lists(st.floats(0, 0.06), min_size=2, max_size=2).map(sorted),
    overlap=st.booleans(),
    on_gpu=st.booleans(),
    slowest=st.floats(1, 1.5),
    num_images=st.integers(1, 400),
)
def test_a_step_takes_no_less_than_computing_and_no_more_than_all_of_it(
    ready: list[float], overlap: bool, on_gpu: bool, slowest: float, num_images: int
) -> None:
    slots = tuple(replace(slot, ready_s=at) for slot, at in zip(SLOTS, ready, strict=True))
    step = replace(STEP, slots=slots, slowest_s=0.1 * slowest)
    found = foresee(make_facts(step=step, overlap=overlap, on_gpu=on_gpu, num_images=num_images))
    assert found is not None
    parts = found.input_s + found.compute_s + found.slowest_s + found.communicate_s
    assert found.step_s == pytest.approx(parts)
    fill = found.images / 100
    assert found.step_s >= 0.09 * fill + 0.01 - 1e-9
    assert found.step_s <= slowest * (0.09 * fill + (0.04 if not on_gpu and overlap else 0)) + 0.01 + 0.04 + 1e-9
    assert 0 < found.efficiency <= 1 + 1e-12
