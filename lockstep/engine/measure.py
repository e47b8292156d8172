"""Candidates on real ranks -> what a profile holds, and the pick (step 0 on the walk; `planning.py` comes before it).

For every way to execute the step: rehearsed with nothing sent, which says whether it works here and when each gradient
is ready; the fusion rules then propose reductions for those times and the messages measured before; and each candidate,
execution and reduction together, takes whole steps on all ranks. What fails on one rank is left out on all. Nothing a
trial does stays: `state.py` lists what a step changes, and it is put back.
"""

import gc
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.cost import Timing
from lockstep.comm.fusion import ReductionPlan
from lockstep.comm.moment import seconds_between, take_moment, wait_for
from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Cursor, share
from lockstep.data.pipeline import Batch
from lockstep.engine.apply import Step, apply_execution, apply_reduction, build_launched
from lockstep.engine.build import HALF, Parts
from lockstep.engine.messages import measure_messages
from lockstep.engine.recorded import WARM_UP_STEPS, RecordedStep
from lockstep.engine.timeline import Passes, time_steps
from lockstep.kernels import has_triton
from lockstep.models import has_own_kernels
from lockstep.plan.choose import (
    PLAIN,
    default_reduction,
    list_choices,
    list_sizes,
    pick_trial,
    pin_choice,
    propose_reductions,
)
from lockstep.plan.plan import (
    Execution,
    describe_reduction,
    read_reduction,
    to_reduction_table,
)
from lockstep.plan.profile import StepTime, Trial, time_slots

# The share of the time for measuring that goes to single messages; the rest tries whole steps.
MESSAGE_SHARE = 0.6
MAX_TURNS = 9
GPU_TURNS, GPU_STEPS = 3, 5  # a GPU's clock is steady, and one step is too short to time
READY_PASSES = 4
OLDEST_GPU = (8, 0)  # for the own kernels, by compute capability


def suits_own_kernels(model: nn.Module) -> bool:
    """Whether the network has any, Triton is there, and a GPU that it supports with the shared memory they take."""
    can = has_triton() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST_GPU
    return can and has_own_kernels(model)


class Rig:
    """What candidates are measured with: one fake batch, one budget, and what has been found so far."""

    def __init__(self, config: RunConfig, parts: Parts, world: World) -> None:
        self._config = config
        self._parts = parts
        self._world = world
        self._batch = fake_batch(config, world)
        self._end = time.perf_counter() + config.comm.tune_s
        self._tunes = parts.hybrid is not None and config.comm.tune_s > 0
        self.on_gpu = world.device.type == "cuda"
        self.messages: list[Timing] = []
        self.steps: list[StepTime] = []
        self.trials: list[Trial] = []
        self.reductions: list[ReductionPlan] = []  # of each trial
        self.recording: RecordedStep | None = None  # of the best trial, where it was recorded

    def measure_messages(self) -> None:
        """What each all-reduce costs at each size."""
        parts, comm = self._parts, self._config.comm
        if not self._tunes:
            return
        assert parts.hybrid is not None
        pinned = pin_choice(comm, parts.topology)
        choices = [pinned] if pinned else list_choices(parts.topology, str(dist.get_backend()))
        half, full = parts.reducer.flat
        array = half if half.numel() else full
        sizes = list_sizes(min(parts.hybrid.bytes_per_element, array.element_size()) * array.numel())
        budget_s = MESSAGE_SHARE * comm.tune_s
        self.messages = measure_messages(parts.hybrid, self._world, array, choices, sizes, budget_s)

    def measure_execution(self, execution: Execution) -> None:
        """Rehearse one way to execute the step, then try it with every reduction worth it."""
        failure, step_time, rehearsed = self._rehearse(execution)
        reductions = self._propose(step_time)
        if failure:
            self._note(Trial(execution, "", "", float("inf"), failure), next(iter(reductions.values())))
            return
        assert step_time is not None
        self.steps.append(step_time)
        steps: dict[str, Step] = {}
        pool = None
        for rule, reduction in reductions.items():
            apply_reduction(reduction, self._parts)
            failure, step = ("", rehearsed) if rehearsed else self._build(execution, pool)
            if step is None or failure:
                self._note(Trial(execution, rule, self._describe(reduction), float("inf"), failure), reduction)
                continue
            pool = step.pool if isinstance(step, RecordedStep) else None
            steps[rule] = step
        for rule, seconds in self._take_turns(steps, reductions).items():
            self._note(Trial(execution, rule, self._describe(reductions[rule]), seconds), reductions[rule])
        self._keep(execution, steps)
        self.clean_up()

    def pick(self) -> Trial | None:
        return pick_trial(self.trials)

    def _keep(self, execution: Execution, steps: dict[str, Step]) -> None:
        """Of the recordings only the best stays, for the run: the more a process has made, the slower all replay."""
        best = self.pick()
        if best is not None and best.execution == execution:
            step = steps.get(best.rule)
            self.recording = step if isinstance(step, RecordedStep) else None

    def clean_up(self) -> None:
        """Give back what trials took, before anything else takes it."""
        self._parts.clock.take()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _describe(self, reduction: ReductionPlan) -> str:
        """In words; nothing where nothing is sent."""
        return describe_reduction(reduction) if self._parts.hybrid else ""

    def _note(self, trial: Trial, reduction: ReductionPlan) -> None:
        self.trials.append(trial)
        self.reductions.append(reduction)

    def _rehearse(self, execution: Execution) -> tuple[str, StepTime | None, Step | None]:
        """A few steps with nothing sent, so that no rank waits for one that fails; when each gradient is ready.

        Alone in the world, the step that was rehearsed is the one to try, and is given back.
        """
        parts, failure, step = self._parts, "", None
        ready_s, passes = [0.0], Passes(0.0, 0.0, 0.0)
        try:
            apply_execution(execution, parts)
            step = self._build_alone(execution)
            with parts.reducer.muted():
                if isinstance(step, RecordedStep) and parts.hybrid is None:
                    ready_s, passes = self._rehearse_launched(step)
                else:
                    ready_s, passes = self._rehearse_watched(step)
        except Exception as error:  # compilers and drivers raise nearly anything; the plain step always remains
            failure = _shorten(error)
        failure = self._agree(failure)
        if failure:
            return failure, None, None
        return "", self._describe_step(execution, passes, ready_s), step if parts.hybrid is None else None

    def _rehearse_watched(self, step: Step) -> tuple[list[float], Passes]:
        """When each gradient is ready in this very step, which is recorded with an event for each."""
        rows, passes = [], []
        with self._parts.reducer.watching() as watch:
            if isinstance(step, RecordedStep):
                step.prepare(self._batch, WARM_UP_STEPS)
            for _ in range(READY_PASSES):
                passes.append(self._time_passes(step))
                rows.append(watch.ready_s())
        return [median(values) for values in zip(*rows[1:], strict=True)], _take_medians(passes[1:])

    def _rehearse_launched(self, step: RecordedStep) -> tuple[list[float], Passes]:
        """The same by the step launched one by one, shortened to the recorded one: nothing hangs on it here.

        A recording for the events alone would be one too many: from some thousand operations on that a process has
        recorded, whether it still holds them or not, every replay's kernels start 0.35 us later, 4 % of a small step.
        """
        launched = build_launched(self._parts, len(self._batch.labels))
        ready_s, before = self._rehearse_watched(launched)
        # Its place may have a channel more than the batch: other kernels, which no recording may be the first to run.
        step.prepare(self._batch, WARM_UP_STEPS)
        passes = _take_medians([self._time_passes(step) for _ in range(READY_PASSES)][1:])
        return [ready * min(1.0, passes.step_s / before.step_s) for ready in ready_s], passes

    def _time_passes(self, step: Step) -> Passes:
        """One step; on a GPU the second of two, whose launch is hidden behind the first as in a run."""
        count = 2 if self.on_gpu else 1
        return time_steps(self._parts.clock, lambda: step(self._batch, 0.0, False), count)[-1]

    def _describe_step(self, execution: Execution, passes: Passes, ready_s: list[float]) -> StepTime:
        """Rank 0's passes and gradients, and how long the step took all ranks."""
        steps_s = [float(seconds) for seconds in self._world.gather_values(passes.step_s)]
        step_s, forward_s, update_s, *ready_s = map(
            float, self._world.broadcast_value([passes.step_s, passes.forward_s, passes.update_s, *ready_s])
        )
        slots = time_slots(self._parts.layout, ready_s)
        mean_s = sum(steps_s) / len(steps_s)
        return StepTime(execution, step_s, max(ready_s), slots, forward_s, update_s, mean_s, max(steps_s))

    def _propose(self, step_time: StepTime | None) -> dict[str, ReductionPlan]:
        """The reductions to try with an execution; the usual one where there is nobody to send to, or no time."""
        config, parts = self._config, self._parts
        if not self._tunes or step_time is None:
            backend = str(dist.get_backend()) if self._world.size > 1 else ""
            usual = default_reduction(config.comm, parts.layout, parts.topology, self._wire_bytes, backend)
            return {PLAIN: usual}
        ready_s = [slot.ready_s for slot in step_time.slots]
        found = propose_reductions(config.comm, parts.layout, ready_s, self.messages, self._wire_bytes)
        tables = self._world.broadcast_value({rule: to_reduction_table(plan) for rule, plan in found.items()})
        return {rule: read_reduction(table, parts.layout, self._world.size) for rule, table in tables.items()}

    @property
    def _wire_bytes(self) -> int:
        return self._parts.hybrid.bytes_per_element if self._parts.hybrid else 4

    def _build_alone(self, execution: Execution, pool: object = None) -> Step:
        count, global_size = len(self._batch.labels), self._batch.global_size
        if execution.recorded:
            return RecordedStep(self._parts, count, global_size, warn=_raise, pool=pool)
        return build_launched(self._parts, count)

    def _build(self, execution: Execution, pool: object) -> tuple[str, Step | None]:
        """A candidate's step, recorded already where it is to be; why it failed, on whichever rank."""
        failure, step = "", None
        try:
            step = self._build_alone(execution, pool)
            if isinstance(step, RecordedStep):
                step.prepare(self._batch)
        except Exception as error:
            failure = _shorten(error)
        return self._agree(failure), step

    def _agree(self, failure: str) -> str:
        """What fails on one rank fails on all."""
        if self.on_gpu:
            torch.cuda.synchronize()
        if not self._world.maximum(torch.tensor([float(bool(failure))])).item():
            return ""
        reasons = enumerate(self._world.gather_values(failure))
        return next(f"{reason} (rank {rank})" if self._world.size > 1 else reason for rank, reason in reasons if reason)

    def _take_turns(self, steps: dict[str, Step], reductions: dict[str, ReductionPlan]) -> dict[str, float]:
        """Seconds a step under each reduction, in turns; the slowest rank's time counts."""
        times: dict[str, list[float]] = {rule: [] for rule in steps}
        begun = time.perf_counter()
        for turn in range(GPU_TURNS if self.on_gpu else MAX_TURNS):
            for rule, step in steps.items():
                apply_reduction(reductions[rule], self._parts)
                seconds = self._time(step, GPU_STEPS if self.on_gpu else 1)
                times[rule].append(self._world.maximum(torch.tensor([seconds], dtype=torch.float64)).item())
            next_end = time.perf_counter() + (time.perf_counter() - begun) / (turn + 1)
            # A GPU takes all its turns where there is nothing else to spend the time on.
            if self._tunes and not self._world.broadcast_value(next_end < self._end):
                break
        return {rule: median(values) for rule, values in times.items()}

    def _time(self, step: Step, count: int) -> float:
        """Seconds a step, by the device's clock."""
        begun = take_moment(on_gpu=self.on_gpu)
        for _ in range(count):
            step(self._batch, 0.0, False)
        done = take_moment(on_gpu=self.on_gpu)
        wait_for(done)
        return seconds_between(begun, done) / count


def _take_medians(found: Sequence[Passes]) -> Passes:
    return Passes(*(median(values) for values in zip(*found, strict=True)))


def _raise(text: str) -> None:
    raise RuntimeError(text)


def _shorten(error: Exception) -> str:
    """The first line of what it says; what compilers add is for those who write them."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return next(filter(None, lines), type(error).__name__)[:200]


def fake_batch(config: RunConfig, world: World, count: int | None = None) -> Batch:
    """A batch like this rank's, in the precision the pipeline gives, of noise: a GPU runs faster on empty images.

    With `count` it has so many samples instead of this rank's share.
    """
    start, stop = (0, count) if count else share(config.train.global_batch, world.rank, world.size)
    size = config.data.image_size
    generator = torch.Generator(world.device).manual_seed(world.rank)
    images = torch.randn(stop - start, 3, size, size, device=world.device, generator=generator)
    images = images.to(HALF.get(config.precision.compute, torch.float32), memory_format=torch.channels_last)
    shape, dtype = ((stop - start, 3), torch.float32) if config.augment.mixes else ((stop - start,), torch.int64)
    return Batch(
        images=images,
        labels=torch.zeros(shape, dtype=dtype, device=world.device),
        global_size=config.train.global_batch,
        epoch=0,
        samples=np.arange(stop - start),
        cursor=Cursor(),
    )
