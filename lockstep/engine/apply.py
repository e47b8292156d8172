"""From a plan to a step that follows it: kernels, compiler, recording, buffers (before step 6 on the walk)."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from lockstep.comm.fusion import ReductionPlan
from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts
from lockstep.engine.compiler import guard_compiled
from lockstep.engine.recorded import RecordedStep, take_odd_step
from lockstep.engine.step import Asked, train_step
from lockstep.models import set_fused
from lockstep.plan.plan import Compile, Execution


class Step(Protocol):
    """A weight update; see `train_step`."""

    def __call__(self, batch: Batch, lr: float, stop: bool = False, asked: Asked | None = None) -> Tensor: ...


Warn = Callable[[str], None]
MAX_GRAPHS = 1024  # of one class: kinds of blocks × shapes of images


def apply_plan(
    execution: Execution,
    reduction: ReductionPlan,
    parts: Parts,
    num_samples: int,
    global_size: int,
    warn: Warn = lambda text: None,
    recording: RecordedStep | None = None,
) -> Step:
    """The step under a plan, for batches of `num_samples` on this rank; every rank must call it.

    `recording` is that very step, where a trial has recorded it.
    """
    apply_reduction(reduction, parts)
    apply_execution(execution, parts)
    if not execution.recorded:
        return build_launched(parts, num_samples)
    if recording is not None and recording.sizes == (num_samples, global_size):
        recording.warn = warn
        return recording
    return RecordedStep(parts, num_samples, global_size, warn)


def apply_reduction(reduction: ReductionPlan, parts: Parts) -> None:
    """Let the reducer follow these buffers; every rank must call it."""
    if parts.hybrid is not None:
        parts.hybrid.prepare(reduction.choices)
    parts.reducer.follow(reduction)


def apply_execution(execution: Execution, parts: Parts) -> None:
    """Set the model up for one way to execute it, and only that."""
    model = parts.model
    set_fused(model, execution.kernels == "own")
    for module in model.modules():
        module._compiled_call_impl = None
    for module in _modules_to_compile(model, execution.compile):
        _compile_for_training(module)


def build_launched(parts: Parts, num_samples: int) -> Step:
    """The step launched one by one."""

    def step(batch: Batch, lr: float, stop: bool = False, asked: Asked | None = None) -> Tensor:
        take = train_step if len(batch.labels) == num_samples else take_odd_step
        return take(parts, batch, lr, stop, asked)

    return step


def _compile_for_training(module: nn.Module) -> None:
    """Compile a module for each shape of usual steps; validation and odd steps, with other shapes, run it as it is."""
    from torch._dynamo import config

    guard_compiled()
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
