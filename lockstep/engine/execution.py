"""How the step is executed: on a GPU by own kernels, compiled, recorded; chosen by a short measurement before step 0.

On a CPU it runs as it is, or compiled where that is asked for. Every candidate takes whole steps on all ranks,
communication included, so that a recording, which sends nothing under its backward pass, wins only where there is
little to hide. Nothing a trial does stays: weights, momentum, statistics and loss scale are put back.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts
from lockstep.engine.recorded import WARM_UP_STEPS, RecordedStep
from lockstep.engine.step import split_batch, train_step
from lockstep.engine.tune import fake_batch
from lockstep.kernels import has_triton
from lockstep.models import set_fused
from lockstep.optim.loss import cross_entropy_sum

Step = Callable[[Batch, float, bool], Tensor]
Compile = Literal["off", "whole", "stage", "block"]
TRIAL_STEPS = 5
# Compiling takes a minute or so for each way; it is tried unasked only in runs that have the time to earn it back.
WORTH_COMPILING_S = 1800.0
MAX_GRAPHS = 1024  # of one class: kinds of blocks × shapes of images
OLDEST_GPU = (8, 0)  # for the own kernels, by compute capability


@dataclass(frozen=True)
class Execution:
    """One way to execute the step."""

    fused: bool = False
    graph: bool = False
    compile: Compile = "off"

    def __str__(self) -> str:
        parts = ["own kernels"] if self.fused else []
        parts += [f"compiled {'whole' if self.compile == 'whole' else 'by ' + self.compile}"] * (self.compile != "off")
        return ", ".join(parts or ["PyTorch's kernels"]) + (
            ", as a CUDA graph" if self.graph else ", launched one by one"
        )


@dataclass(frozen=True)
class Trial:
    """One candidate's seconds per step, or why it failed."""

    execution: Execution
    seconds: float
    failure: str = ""


PLAIN = Execution()


def choose_execution(config: RunConfig, parts: Parts, world: World, num_steps: int, say: Callable[[str], None]) -> Step:
    """The quickest way to execute the step here, applied to the model; every rank comes to the same answer."""
    on_gpu = world.device.type == "cuda"
    if not on_gpu and config.train.compile in ("auto", "off"):
        return partial(train_step, parts)
    batch = fake_batch(config, world)
    count = len(batch.labels)
    start = time.perf_counter()
    trials = [_try(execution, parts, world, batch) for execution in list_executions(config, on_gpu)]
    best = pick_trial(trials)
    if config.train.compile == "auto" and num_steps * best.seconds > WORTH_COMPILING_S:
        trials += [_try(execution, parts, world, batch) for execution in list_compiled(config)]
        best = pick_trial(trials)
    for trial in trials:
        if trial.failure:
            say(f"The step with {trial.execution} was left out: {trial.failure}")
    say(describe_trials(trials, best, count, time.perf_counter() - start))
    return apply_execution(best.execution, parts, count, batch.global_size)


def describe_trials(trials: Sequence[Trial], best: Trial, count: int, seconds: float) -> str:
    """One sentence on what was chosen and what it was measured against."""
    if best not in trials:
        return f"The step runs with {best.execution}, because every other way failed."
    others = [trial for trial in trials if trial is not best and not trial.failure]
    text = (
        f"The step runs with {best.execution}: {best.seconds * 1e3:.1f} ms ({count / best.seconds:,.0f} images/s here)"
    )
    if others:
        text += "; " + ", ".join(f"{trial.execution} {trial.seconds * 1e3:.1f} ms" for trial in others)
    return f"{text}; measured in {seconds:.0f} s."


def list_executions(config: RunConfig, on_gpu: bool = True) -> list[Execution]:
    """What to try first: with and without recording, by own kernels where they may be used; pins leave fewer."""
    train = config.train
    graphs = {"auto": [False, True], "on": [True], "off": [False]}[train.cuda_graph] if on_gpu else [False]
    if train.compile in ("whole", "stage", "block"):
        return [Execution(False, graph, train.compile) for graph in graphs]
    fused = _suits_own_kernels() if train.own_kernels == "auto" else train.own_kernels == "on"
    return [Execution(fused, graph) for graph in graphs]


def _suits_own_kernels() -> bool:
    """Whether Triton is there, and a GPU that it supports and that has the shared memory the kernels take."""
    return has_triton() and torch.cuda.get_device_capability() >= OLDEST_GPU


def list_compiled(config: RunConfig) -> list[Execution]:
    """Ways to compile, each recorded unless that is ruled out; by block first, which leaves most to overlap."""
    ways: tuple[Compile, ...] = ("block", "stage", "whole")
    return [Execution(False, config.train.cuda_graph != "off", way) for way in ways]


def pick_trial(trials: Sequence[Trial]) -> Trial:
    """The quickest that works; PyTorch's kernels launched one by one where none does."""
    working = [trial for trial in trials if not trial.failure]
    return min(working, key=lambda trial: trial.seconds) if working else Trial(PLAIN, float("nan"))


def _try(execution: Execution, parts: Parts, world: World, batch: Batch) -> Trial:
    """Seconds per step of one candidate, the slowest rank's; what fails on one rank fails on all."""
    seconds, failure = float("inf"), ""
    with _put_back(parts):
        if execution.compile != "off":
            failure = _compile(execution, parts, batch)
            parts.clock.take()
            if world.maximum(torch.tensor([float(bool(failure))])).item():
                return Trial(execution, seconds, failure or "it failed on another rank.")
        try:
            step = apply_execution(execution, parts, len(batch.labels), batch.global_size)
            for _ in range(WARM_UP_STEPS + 1):
                step(batch, 0.0, False)
            seconds = _time(step, batch)
        except Exception as error:  # compilers and drivers raise nearly anything; the plain step always remains
            if world.size > 1:
                raise  # the other ranks are in the middle of a step
            failure = _shorten(error)
        parts.clock.take()
    slowest = world.maximum(torch.tensor([seconds], dtype=torch.float64)).item()
    return Trial(execution, slowest, failure)


def _compile(execution: Execution, parts: Parts, batch: Batch) -> str:
    """Have both passes compiled, alone, so that no other rank waits for one that fails; returns why it does."""
    by_size = {part.stop - part.start: part for part, _ in split_batch(len(batch.labels), parts.max_batch_per_rank)}
    try:
        apply_execution(execution, parts, len(batch.labels), batch.global_size)
        for part in by_size.values():
            logits = parts.model(batch.images[part].to(parts.dtype))
            loss = cross_entropy_sum(logits, batch.labels[part], parts.label_smoothing)
            torch.autograd.grad(loss, list(parts.model.parameters()))  # no hooks: nothing is sent
    except Exception as error:
        return _shorten(error)
    return ""


def _shorten(error: Exception) -> str:
    """The first line of what it says; what compilers add is for those who write them."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return next(filter(None, lines), type(error).__name__)[:200]


def _time(step: Step, batch: Batch) -> float:
    times = []
    for _ in range(3):
        _wait(batch)
        start = time.perf_counter()
        for _ in range(TRIAL_STEPS):
            step(batch, 0.0, False)
        _wait(batch)
        times.append((time.perf_counter() - start) / TRIAL_STEPS)
    return median(times)


def _wait(batch: Batch) -> None:
    """Until the device that has the batch is idle."""
    if batch.images.is_cuda:
        torch.cuda.synchronize()


def apply_execution(execution: Execution, parts: Parts, count: int, global_size: int) -> Step:
    """Set the model up for one way to execute it, and only that."""
    model = parts.model
    set_fused(model, execution.fused)
    for module in model.modules():
        module._compiled_call_impl = None
    for module in _modules_to_compile(model, execution.compile):
        _compile_for_training(module)
    if not execution.graph:
        return partial(train_step, parts)
    if parts.hybrid is not None:  # nothing can be sent from within a recording
        parts.reducer.follow(replace(parts.reducer.plan, overlap=False))
    return RecordedStep(parts, count, global_size)


def _compile_for_training(module: nn.Module) -> None:
    """Compile a module for each shape it trains on; validation, whose shapes are others, runs it as it is."""
    from torch._dynamo import config

    # Blocks of one class share their code, and beyond a few kinds and shapes of them the compiler gives up.
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MAX_GRAPHS)
    module.compile(dynamic=False)  # or the second shape makes it turn to kernels for any
    compiled = module._compiled_call_impl
    assert compiled is not None

    def call(*arguments: Tensor) -> object:
        return (compiled if module.training else module._call_impl)(*arguments)

    module._compiled_call_impl = call


def _modules_to_compile(model: nn.Module, way: Compile) -> list[nn.Module]:
    """The whole model, its stages, or their blocks."""
    if way == "off":
        return []
    if way == "whole":
        return [model]
    stages: list[nn.Module] = [stage for stage in model.children() if isinstance(stage, nn.Sequential)]
    return stages if way == "stage" else [block for stage in stages for block in stage.children()]


@contextmanager
def _put_back(parts: Parts) -> Iterator[None]:
    """Whatever steps change within, changes back; the plan too."""
    scale = parts.loss_scale
    arrays = [parts.weights, parts.half_weights, *parts.rule.state().values(), *parts.model.buffers()]
    arrays += [scale.state, scale.overflows, scale.firsts] if scale else []
    # Kept on the host, so that a trial needs no more device memory than the run.
    before, count, plan = [array.to("cpu", copy=True) for array in arrays], parts.rule.step_count, parts.reducer.plan
    try:
        yield
    finally:
        for array, value in zip(arrays, before, strict=True):
            array.copy_(value)
        parts.rule.step_count = count
        parts.reducer.follow(plan)
