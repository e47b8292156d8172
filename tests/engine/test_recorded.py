"""The step as a CUDA graph: the weights of the step launched one by one, sums under it, and the host never waits."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.bench.standin import StandIn
from lockstep.comm.cost import FLAT
from lockstep.comm.fusion import ReductionPlan, add_tail, plan_buffers
from lockstep.comm.reducer import Sent
from lockstep.comm.topology import Link
from lockstep.comm.world import World, join_world
from lockstep.config import RunConfig
from lockstep.data.pipeline import Batch
from lockstep.engine.anchor_pass import Anchors
from lockstep.engine.apply import Step, apply_execution, apply_plan, apply_reduction, build_launched
from lockstep.engine.build import Parts, assemble, build_network, set_number_formats
from lockstep.engine.measure import fake_batch
from lockstep.engine.recorded import RecordedStep, refuse_waits
from lockstep.engine.step import LOSS, train_step
from lockstep.models import set_fused
from lockstep.optim.schedule import Schedule
from lockstep.optim.svrg import Svrg
from lockstep.plan.plan import Execution
from tests.engine.small import compile_without_a_compiler, small_config
from tests.ranks import run_ranks

OWN, RECORDED = Execution("own"), Execution("own", recorded=True)


def build(config: RunConfig, world: World, **more: Any) -> Parts:
    set_number_formats(config.precision)
    torch.use_deterministic_algorithms(False)
    return assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1), **more)


def cut_buffers(parts: Parts, *, overlap: bool, threshold: float = 100_000) -> ReductionPlan:
    """Several buffers, so that some are full long before the backward pass ends."""
    buffers = add_tail(parts.layout, plan_buffers(parts.layout.head, threshold, parts.layout.head_element_bytes))
    assert len(buffers) > 3
    return ReductionPlan(buffers, (FLAT,) * len(buffers), overlap)


def draw_batches(config: RunConfig, world: World, count: int) -> list[Batch]:
    """Another batch for every step: a replay that read the last one's would be found out."""
    batch = fake_batch(config, world)
    generator = torch.Generator(world.device).manual_seed(world.rank + 1)
    return [
        replace(
            batch,
            images=torch.randn(batch.images.shape, device=world.device, generator=generator).to(
                batch.images.dtype, memory_format=torch.channels_last
            ),
            labels=torch.randint(0, 10, batch.labels.shape, device=world.device, generator=generator),
        )
        for _ in range(count)
    ]


RATES = [0.1 / (number + 1) for number in range(8)]


def train_both_ways(config: RunConfig, world: World, rates: list[float]) -> tuple[Tensor, Tensor]:
    """The weights after a few steps, launched one by one and recorded."""
    weights, counts = [], []
    for execution in (OWN, RECORDED):
        parts = build(config, world)
        step = apply_plan(execution, parts.reducer.plan, parts, 16, 16)
        for lr, batch in zip(rates, draw_batches(config, world, len(rates)), strict=True):
            side = step(batch, lr, False)
        weights.append(parts.weights.clone())
        assert torch.isfinite(side[LOSS])
        counts.append(int(parts.rule.count))
    assert counts[0] == counts[1] > 0
    return weights[0], weights[1]


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32"])
def test_a_recording_gives_the_weights_of_launched_steps(compute: str) -> None:
    with join_world(None) as world:
        launched, recorded = train_both_ways(small_config(compute), world, RATES)
    assert (launched - recorded).norm() / launched.norm() < {"fp16": 2e-3, "bf16": 1e-2, "fp32": 1e-4}[compute]


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
@pytest.mark.parametrize("optim", ["sgd", "lars", "lamb", "adamw"])
def test_a_recorded_step_accumulates_and_clips_with_every_rule_as_a_launched_one(optim: str, compute: str) -> None:
    """Gradients have a norm of about 1.2, another one at every replay; clipping moves the weights by 1e-3 and more."""
    # A root above the gradients' own: a weight whose gradient is mere rounding would go either way.
    more = {"lamb": {"lamb_epsilon": 0.01}, "adamw": {"adamw_epsilon": 0.01}}.get(optim, {})
    rates = [lr * (0.02 if optim in ("lamb", "adamw") else 1.0) for lr in RATES]
    weights = {}
    with join_world(None) as world:
        for clip_norm in (0.0, 0.2):
            config = small_config(compute, optim={"name": optim, "clip_norm": clip_norm, **more}, accumulate=2)
            launched, recorded = train_both_ways(config, world, rates)
            assert (launched - recorded).norm() / launched.norm() < {"fp16": 2e-4, "fp32": 1e-4}[compute]
            weights[clip_norm] = recorded
    assert (weights[0.2] - weights[0.0]).norm() / weights[0.0].norm() > 5e-4


def take_anchored_steps(config: RunConfig, world: World, execution: Execution) -> dict[str, Tensor]:
    """The weights before and after two anchors with eight steps behind each, and the last full gradient."""
    parts = build(config, world)
    start = parts.weights.clone()
    batches = draw_batches(config, world, 8)
    samples = np.split(np.arange(16 * len(batches)), len(batches))
    epoch = [replace(batch, samples=part) for batch, part in zip(batches, samples, strict=True)]
    step = apply_plan(execution, parts.reducer.plan, parts, 16, 16, pytest.fail)

    def take(summing: Parts) -> Step:
        return RecordedStep(summing, 16, 16, pytest.fail) if execution.recorded else build_launched(summing, 16)

    anchors = Anchors(parts, world, 16 * len(epoch), len(epoch), take)
    for number in (0, len(epoch)):
        assert anchors.take(epoch, number, 0, lambda: False) is not None
        for lr, batch in zip(RATES, epoch, strict=True):
            step(batch, lr, False)
    assert isinstance(parts.rule, Svrg)
    return {"start": start, "weights": parts.weights, "full gradient": parts.rule.full_gradient}


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optim", [{"name": "svrg"}, {"name": "halp", "bits": 16, "mu": 10.0}], ids=["svrg", "halp"])
def test_recorded_steps_and_anchors_are_the_launched_ones(optim: dict[str, Any], accumulate: int) -> None:
    """The first three of either are launched, and what an anchor's replays add up is what later steps move by."""
    config = small_config("fp32", optim=optim, accumulate=accumulate)
    with join_world(None) as world:
        launched, recorded = (take_anchored_steps(config, world, execution) for execution in (OWN, RECORDED))
    moved = (launched["weights"] - launched["start"]).norm()
    assert moved > 1e-3 * launched["start"].norm()
    assert (launched["weights"] - recorded["weights"]).norm() < 0.02 * moved
    difference = (launched["full gradient"] - recorded["full gradient"]).norm()
    assert difference < 0.02 * launched["full gradient"].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_muons_products_are_recorded_too(compute: str) -> None:
    """It brings up weak directions, and with them the order of cuDNN's sums: the way is the same, not every digit."""
    config = small_config(compute, optim={"name": "muon"})
    with join_world(None) as world:
        start = build(config, world).weights.clone()
        launched, recorded = train_both_ways(config, world, [0.02 * lr for lr in RATES])
    assert (launched - recorded).norm() < 0.2 * (launched - start).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_every_replay_keeps_the_squares_of_its_own_first_pass(compute: str) -> None:
    config = small_config(compute, accumulate=2)
    with join_world(None) as world:
        squares = []
        for execution in (OWN, RECORDED):
            parts = build(config, world)
            parts.reducer.measures = True
            step = apply_plan(execution, parts.reducer.plan, parts, 16, 16)
            found = []
            for batch in draw_batches(config, world, 8):  # three are launched before the rest is replayed
                step(batch, 0.0, False)
                found.append(parts.reducer.first_square.item())
            squares.append(found)
    assert squares[1] == pytest.approx(squares[0], rel=0.02 if compute == "fp16" else 1e-3)
    assert len({f"{square:.6g}" for square in squares[1]}) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("execution", [OWN, RECORDED], ids=str)
def test_the_host_never_waits_for_the_device(execution: Execution) -> None:
    config = small_config("fp16")
    with join_world(None) as world:
        parts = build(config, world)
        step = apply_plan(execution, parts.reducer.plan, parts, 16, 16)
        batch = fake_batch(config, world)
        for _ in range(6):
            step(batch, 0.1, False)
        with refuse_waits():
            for _ in range(3):
                step(batch, 0.1, False)


@pytest.mark.gpu
def test_an_odd_batch_between_replays_is_taken_as_usual_and_searches_no_kernels() -> None:
    config = small_config("fp32")
    with join_world(None) as world:
        weights = []
        for execution in (OWN, RECORDED):
            parts = build(config, world)
            step = apply_plan(execution, parts.reducer.plan, parts, 16, 16)
            for number, batch in enumerate(draw_batches(config, world, 9)):
                odd = replace(batch, images=batch.images[:5], labels=batch.labels[:5], global_size=5)
                step(odd if number == 6 else batch, 0.05, False)
            weights.append(parts.weights.clone())
            assert torch.backends.cudnn.benchmark
    assert (weights[0] - weights[1]).norm() / weights[0].norm() < 1e-4


@pytest.mark.gpu
def test_a_recording_that_cannot_be_made_in_mid_run_says_so_and_the_step_is_launched() -> None:
    config, said = small_config("fp16"), list[str]()
    with join_world(None) as world, pytest.MonkeyPatch.context() as patch:
        parts = build(config, world)
        step = apply_plan(RECORDED, parts.reducer.plan, parts, 16, 16, said.append)
        patch.setattr(torch.cuda, "graph", raise_out_of_memory)
        losses = [step(batch, 0.05, False)[LOSS].item() for batch in draw_batches(config, world, 7)]
    assert said == ["The step could not be recorded and is launched one by one: CUDA out of memory."]
    assert all(loss > 0 for loss in losses)


@pytest.mark.parametrize("waits", [False, True])
def test_the_last_step_before_a_recording_may_not_wait_for_the_device(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits inside a recording breaks it off, and PyTorch does not clean up behind it."""
    modes: list[int | str] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(RecordedStep, "_record", lambda step, place: seen.append("recorded"))
    seen: list[int | str] = []
    config = small_config("fp32")
    with join_world(None) as world:
        parts = build(config, world)

        def look(*_: object) -> None:
            seen.append(modes[-1])
            if waits and modes[-1] == "error":
                raise RuntimeError("called a synchronizing CUDA operation")

        parts.model.register_forward_pre_hook(look)
        step = RecordedStep(parts, 16, 16, pytest.fail)
        with pytest.raises(RuntimeError, match="synchronizing") if waits else nullcontext():
            step.prepare(fake_batch(config, world), 3)
    assert seen == [0, 0, "error", *([] if waits else ["recorded"])]
    assert modes == [0, "error", 0]


def raise_out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def take_steps(world: World) -> dict[str, tuple[Tensor, list[float]]]:
    """Weights and losses after a few steps on one of several ranks, each step on another batch, in three ways."""
    config, found = small_config("fp16"), {}
    for way, execution, overlap in (("launched", OWN, True), ("after", RECORDED, False), ("under", RECORDED, True)):
        parts = build(config, world)
        batches = draw_batches(config, world, 8)
        step = apply_plan(execution, cut_buffers(parts, overlap=overlap), parts, len(batches[0].labels), 16)
        losses = [step(batch, 0.05, False)[LOSS].item() for batch in batches]
        found[way] = parts.weights.cpu(), losses
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("nccl", 2), ("nccl", 4)])
def test_several_ranks_record_their_passes_and_send_under_them_or_after(backend: Any, size: int) -> None:
    results = run_ranks(take_steps, size, backend=backend)
    launched, losses = results[0]["launched"]
    for way in ("after", "under"):
        recorded, same_losses = results[0][way]
        assert all(torch.equal(recorded, other[way][0]) for other in results)
        assert losses == pytest.approx(same_losses, rel=2e-2)
        assert (launched - recorded).norm() / launched.norm() < 5e-3


def draw_timeline(overlap: bool) -> list[Sent]:
    """One recorded step over a stand-in for the network that takes as long for each buffer as a tenth of a step."""
    config = small_config("fp16")
    with join_world(None) as world:
        standin = StandIn(world.device, Link(1e-4, 1e12))
        parts = build(config, world, hybrid=standin)
        apply_execution(RECORDED, parts)
        apply_reduction(cut_buffers(parts, overlap=overlap), parts)
        standin.channel.times = True
        with parts.reducer.watching() as watch:
            step = RecordedStep(parts, 16, 16, pytest.fail)
            for batch in draw_batches(config, world, 8):
                step(batch, 0.05)
            torch.cuda.synchronize()
            return watch.sent_s()


@pytest.mark.gpu
def test_a_recording_that_overlaps_sends_full_buffers_before_its_backward_pass_ends() -> None:
    timeline = draw_timeline(overlap=True)
    end_s = timeline[-1].full_s
    assert all(sent.full_s <= sent.begun_s < sent.done_s for sent in timeline)
    assert timeline[0].done_s < end_s
    assert [sent.full_s for sent in timeline] == sorted(sent.full_s for sent in timeline)
    after = draw_timeline(overlap=False)
    assert after[0].begun_s >= after[-1].full_s


@pytest.mark.gpu
def test_a_recordings_ready_times_are_the_devices_own() -> None:
    config = small_config("fp16")
    with join_world(None) as world:
        parts = build(config, world)
        set_fused(parts.model, True)
        with parts.reducer.watching() as watch:
            step = RecordedStep(parts, 16, 16, pytest.fail)
            for batch in draw_batches(config, world, 6):
                step(batch, 0.05)
            torch.cuda.synchronize()
            first = watch.ready_s()
    names = [slot.name for slot in parts.layout.slots]
    assert first[names.index("fc.weight")] < first[names.index("layer4.0.conv1.weight")]
    assert first[names.index("layer4.0.conv1.weight")] < first[names.index("conv1.weight")] < 0.5
    assert all(ready > 0 for ready in first)


@pytest.mark.gpu
def test_each_replays_sums_wait_for_their_own_replay() -> None:
    """The stand-in keeps the first value of every buffer it is given: it must be this step's gradient."""
    config = small_config("fp32")
    seen: list[list[float]] = []

    class Looking(StandIn):
        def run(self, buffer: Tensor, choice: Any, num_exact: int = 0) -> None:
            kept[-1].append(buffer[:4].clone())

    with join_world(None) as world:
        for execution in (OWN, RECORDED):
            kept: list[list[Tensor]] = []
            parts = build(config, world, hybrid=Looking(world.device, Link(0.0, 1e12)))
            plan = cut_buffers(parts, overlap=True)
            step = apply_plan(execution, plan, parts, 16, 16)
            for batch in draw_batches(config, world, 10):
                kept.append([])
                step(batch, 0.05, False)
            torch.cuda.synchronize()
            seen.append([value for step_values in kept for part in step_values for value in part.tolist()])
    torch.testing.assert_close(torch.tensor(seen[1]), torch.tensor(seen[0]), rtol=1e-2, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of the tracer's own
@pytest.mark.parametrize(("way", "count"), [("whole", 1), ("stage", 4), ("block", 8)])
def test_compiled_whole_by_stage_or_by_block_it_is_the_same_step(
    way: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[nn.Module] = []

    def compile_eagerly(module: nn.Module, **options: Any) -> None:
        compiled.append(module)
        compile_without_a_compiler(module, **options)

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    config = small_config("fp32")
    weights = []
    with join_world(None) as world:
        for execution in (Execution(), Execution(compile=way)):
            parts = build(config, world)
            step = apply_plan(execution, parts.reducer.plan, parts, 16, 16)
            step(fake_batch(config, world), 0.1, False)
            weights.append(parts.weights)
            apply_execution(Execution(), parts)
            assert all(module._compiled_call_impl is None for module in parts.model.modules())
    assert len(compiled) == count
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The inputs of every graph that is compiled from here on, by a compiler that only counts."""
    found: list[list[Any]] = []

    def count_graphs(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(inputs)
        return graph.forward

    def compile_and_count(module: nn.Module, **options: Any) -> None:
        compile_without_a_compiler(module, **options, backend=count_graphs)

    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", compile_and_count)
    return found


@pytest.mark.filterwarnings("ignore")  # of the tracer's own
def test_every_shape_of_a_block_is_compiled_for_itself_and_validation_compiles_nothing(graphs: list[list[Any]]) -> None:
    config = small_config("fp32")
    with join_world(None) as world:
        parts = build(config, world)
        step = apply_plan(Execution(compile="block"), parts.reducer.plan, parts, 16, 16)
        batch = fake_batch(config, world)
        step(batch, 0.1, False)
        step(replace(batch, images=batch.images[:, :, :32, :32]), 0.1, False)
        # Of eight blocks the first two are alike; the others change the number of channels or not.
        assert len(graphs) == 2 * 7
        assert not any(isinstance(value, torch.SymInt) for inputs in graphs for value in inputs)
        parts.model.eval()
        parts.model(batch.images[:5])
        assert len(graphs) == 2 * 7


@pytest.mark.filterwarnings("ignore")  # of the tracer's own
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("way", ["whole", "stage", "block"])
def test_an_odd_step_is_the_same_step_and_compiles_nothing(way: Any, recorded: bool, graphs: list[list[Any]]) -> None:
    """The steps before a recording are launched one by one: a CPU can take them."""
    config = small_config("fp32")
    weights, nums_graphs = [], []
    with join_world(None) as world:
        first, odd, last = draw_batches(config, world, 3)
        odd = replace(odd, images=odd.images[:5], labels=odd.labels[:5], global_size=5)
        for execution in (Execution(), Execution(compile=way, recorded=recorded)):
            parts = build(config, world)
            step = apply_plan(execution, parts.reducer.plan, parts, 16, 16)
            calls = [module._compiled_call_impl for module in parts.model.modules()]
            for batch in (first, odd, last):
                step(batch, 0.01, False)
                nums_graphs.append(len(graphs))
            assert [module._compiled_call_impl for module in parts.model.modules()] == calls
            weights.append(parts.weights)
    assert nums_graphs[:3] == [0, 0, 0]
    assert nums_graphs[3] > 0
    assert nums_graphs[3:] == nums_graphs[3:4] * 3
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


def test_a_launched_step_of_an_odd_size_searches_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("fp32")
    with join_world(None) as world:
        parts = build(config, world)
        searched: list[bool] = []
        parts.model.register_forward_hook(lambda *_: searched.append(torch.backends.cudnn.benchmark))
        step = build_launched(parts, 16)
        batch = fake_batch(config, world)
        step(batch, 0.1, False)
        step(replace(batch, images=batch.images[:5], labels=batch.labels[:5], global_size=5), 0.1, False)
        train_step(parts, batch, 0.1)
    assert searched == [True, False, True]
