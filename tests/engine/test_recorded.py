"""The step as a CUDA graph: the same weights as the step launched one by one, and the host never waits."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.world import World, join_world
from lockstep.config import DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.engine.build import Parts, assemble, build_network, set_number_formats
from lockstep.engine.execution import (
    Execution,
    Trial,
    apply_execution,
    choose_execution,
    describe_trials,
    list_executions,
    pick_trial,
)
from lockstep.engine.recorded import RecordedStep
from lockstep.engine.step import LOSS, train_step
from lockstep.engine.tune import fake_batch
from lockstep.models import set_fused
from lockstep.optim.schedule import Schedule
from tests.ranks import run_ranks


def compile_without_a_compiler(module: nn.Module, *, dynamic: bool | None = None, backend: Any = "eager") -> None:
    """Traced as it would be, with nothing behind."""
    module._compiled_call_impl = torch.compile(module._call_impl, backend=backend, dynamic=dynamic)


def tiny(compute: Any, **train: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(image_size=64),
        model=ModelConfig(name="resnet18", width=16),
        optim=OptimConfig(name="lars", lr=0.1),
        precision=PrecisionConfig(compute=compute),
        train=TrainConfig(global_batch=16, duration="1ep", **train),  # type: ignore[arg-type]
    )


def test_pins_leave_only_what_was_asked_for() -> None:
    (only,) = list_executions(tiny("fp32", cuda_graph="on", own_kernels="off"))
    assert (only.graph, only.fused, only.compile) == (True, False, "off")
    launched, recorded = list_executions(tiny("fp32", compile="block"))
    assert (launched.compile, launched.graph, recorded.graph) == ("block", False, True)


@pytest.mark.parametrize(("capability", "fused"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_own_kernels_are_for_gpus_that_triton_supports(
    capability: tuple[int, int], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert {execution.fused for execution in list_executions(tiny("fp16"))} == {fused}
    assert list_executions(tiny("fp16", own_kernels="on"))[0].fused


def test_where_every_way_fails_the_plain_step_remains_and_says_so() -> None:
    failed = [Trial(Execution(fused=True), float("inf"), "no driver"), Trial(Execution(graph=True), 0.1, "no memory")]
    best = pick_trial(failed)
    assert best.execution == Execution()
    assert describe_trials(failed, best, 16, 2.0).endswith("because every other way failed.")
    working = [*failed, Trial(Execution(fused=True, graph=True), 0.002)]
    said = describe_trials(working, pick_trial(working), 16, 2.0)
    assert said.startswith("The step runs with own kernels, as a CUDA graph: 2.0 ms (8,000 images/s here); measured in")


def test_on_a_cpu_the_step_is_the_plain_one() -> None:
    with join_world(None) as world:
        config = tiny("fp32")
        parts = assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))
        said: list[str] = []
        step = choose_execution(config, parts, world, 10, said.append)
        side = step(fake_batch(config, world), 0.1, True)
    assert side[LOSS] > 0
    assert said == []


@pytest.mark.filterwarnings("ignore")  # of the tracer's own
def test_on_a_cpu_it_is_compiled_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", compile_without_a_compiler)
    config = tiny("fp32", compile="block")
    said: list[str] = []
    with join_world(None) as world:
        parts = build(config, world)
        before = parts.weights.clone()
        step = choose_execution(config, parts, world, 10, said.append)
        assert torch.equal(parts.weights, before)
        assert any(module._compiled_call_impl is not None for module in parts.model.modules())
        assert step(fake_batch(config, world), 0.1, False)[LOSS] > 0
    assert said[0].startswith("The step runs with compiled by block, launched one by one: ")


def compile_on_rank_0_only(module: nn.Module, **options: Any) -> None:
    if torch.distributed.get_rank() > 0:
        raise_for_want_of_a_compiler(module)
    else:
        compile_without_a_compiler(module, **options)


def raise_for_want_of_a_compiler(module: nn.Module, **_: Any) -> None:
    def call(*_: Any) -> None:
        raise RuntimeError("\nno  C++ compiler was found\nset THIS for a stack trace")

    module._compiled_call_impl = call  # type: ignore[assignment]


def raise_at_once(module: nn.Module, **_: Any) -> None:
    raise RuntimeError("not on this platform")


def test_a_compiler_that_cannot_even_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", raise_at_once)
    config, said = tiny("fp32", compile="whole"), list[str]()
    with join_world(None) as world:
        parts = build(config, world)
        step = choose_execution(config, parts, world, 10, said.append)
        assert step(fake_batch(config, world), 0.1, False)[LOSS] > 0
    assert said[0] == "The step with compiled whole, launched one by one was left out: not on this platform"


def choose_where_one_rank_cannot_compile(world: World) -> tuple[list[str], float]:
    config, said = tiny("fp32", compile="block"), list[str]()
    parts = build(config, world)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(nn.Module, "compile", compile_on_rank_0_only)
        step = choose_execution(config, parts, world, 10, said.append)
    return said, step(fake_batch(config, world), 0.1, False)[LOSS].item()


def test_where_one_rank_cannot_compile_none_does_and_each_says_why() -> None:
    (first, loss), (second, same_loss) = run_ranks(choose_where_one_rank_cannot_compile, 2)
    left_out = "The step with compiled by block, launched one by one was left out: "
    assert first[0] == left_out + "it failed on another rank."
    assert second[0] == left_out + "no C++ compiler was found"
    assert first[1] == second[1]
    assert first[1].startswith("The step runs with PyTorch's kernels, launched one by one, because")
    assert loss == same_loss > 0


def build(config: RunConfig, world: Any) -> Parts:
    set_number_formats(config.precision)
    torch.use_deterministic_algorithms(False)
    return assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32"])
def test_a_recording_gives_the_weights_of_launched_steps(compute: str) -> None:
    config = tiny(compute)
    with join_world(None) as world:
        weights = []
        for recorded in (False, True):
            parts = build(config, world)
            set_fused(parts.model, True)
            batch = fake_batch(config, world)
            step = RecordedStep(parts, 16, 16) if recorded else None
            for number in range(8):
                lr = 0.1 / (number + 1)
                side = step(batch, lr) if step else train_step(parts, batch, lr)
            weights.append(parts.weights.clone())
            assert torch.isfinite(side[LOSS])
    difference = (weights[0] - weights[1]).norm() / weights[0].norm()
    assert difference < {"fp16": 2e-3, "bf16": 1e-2, "fp32": 1e-4}[compute]


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_the_host_never_waits_for_the_device(recorded: bool) -> None:
    config = tiny("fp16")
    with join_world(None) as world:
        parts = build(config, world)
        set_fused(parts.model, True)
        batch = fake_batch(config, world)
        step = RecordedStep(parts, 16, 16)
        for _ in range(6):
            step(batch, 0.1) if recorded else train_step(parts, batch, 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it may miss some
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                step(batch, 0.1) if recorded else train_step(parts, batch, 0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_choice_leaves_no_trace_and_says_what_it_measured() -> None:
    config = tiny("fp16")
    with join_world(None) as world:
        parts = build(config, world)
        before = [array.clone() for array in (parts.weights, parts.half_weights, *parts.model.buffers())]
        said: list[str] = []
        choose_execution(config, parts, world, 10, said.append)
        after = [parts.weights, parts.half_weights, *parts.model.buffers()]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert parts.rule.step_count == 0
    assert "measured in" in said[-1]


def take_steps(world: World, recorded: bool) -> tuple[Tensor, list[float]]:
    """Weights and losses after a few steps on one of several ranks."""
    config = tiny("fp16")
    parts = build(config, world)
    set_fused(parts.model, True)
    parts.reducer.follow(replace(parts.reducer.plan, overlap=False))
    batch = fake_batch(config, world)
    step = RecordedStep(parts, len(batch.labels), 16) if recorded else partial(train_step, parts)
    losses = [step(batch, 0.05, False)[LOSS].item() for _ in range(7)]
    return parts.weights.cpu(), losses


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_record_their_passes_and_send_after_them() -> None:
    (launched, losses), (recorded, same_losses) = (run_ranks(take_steps, 2, kind)[0] for kind in (False, True))
    assert losses == pytest.approx(same_losses, rel=2e-2)
    assert (launched - recorded).norm() / launched.norm() < 5e-3


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
    config = tiny("fp32")
    weights = []
    with join_world(None) as world:
        for execution in (Execution(), Execution(compile=way)):
            parts = build(config, world)
            step = apply_execution(execution, parts, 16, 16)
            step(fake_batch(config, world), 0.1, False)
            weights.append(parts.weights)
            apply_execution(Execution(), parts, 16, 16)
            assert all(module._compiled_call_impl is None for module in parts.model.modules())
    assert len(compiled) == count
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the tracer's own
def test_every_shape_of_a_block_is_compiled_for_itself_and_validation_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs: list[list[Any]] = []

    def count_graphs(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(inputs)
        return graph.forward

    def compile_and_count(module: nn.Module, **options: Any) -> None:
        compile_without_a_compiler(module, **options, backend=count_graphs)

    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", compile_and_count)
    config = tiny("fp32")
    with join_world(None) as world:
        parts = build(config, world)
        step = apply_execution(Execution(compile="block"), parts, 16, 16)
        batch = fake_batch(config, world)
        step(batch, 0.1, False)
        step(replace(batch, images=batch.images[:12], labels=batch.labels[:12]), 0.1, False)
        # Of eight blocks the first two are alike; the others change the number of channels or not.
        assert len(graphs) == 2 * 7
        assert not any(isinstance(value, torch.SymInt) for inputs in graphs for value in inputs)
        parts.model.eval()
        parts.model(batch.images[:5])
        assert len(graphs) == 2 * 7
