"""Candidates on real ranks -> what a profile holds, and the pick (step 0 on the walk; `planning.py` comes before it).

For every way to execute the step: rehearsed with nothing sent, which says whether it works here, how long it takes and
when each gradient is ready; messages are measured; the fusion rules then propose reductions for those times; and each
candidate, execution and reduction together, takes whole steps on all ranks. What fails on one rank is left out on all.
Nothing a trial does stays: `state.py` lists what a step changes, and it is put back.

All of it has one budget, `comm.tune_s`, by rank 0's clock. Once a step's time is known, what does not fit into the rest
is left out: further passes of a rehearsal, messages, reductions, ways to execute the step. One rehearsal, a few
messages and one turn of the first reduction always remain, so that there is always a plan. Choosing and compiling
kernels is not what the budget is for.
"""

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

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
from lockstep.engine.messages import Budget, measure_messages
from lockstep.engine.recorded import WARM_UP_STEPS, RecordedStep
from lockstep.engine.timeline import Passes, pick_middle, time_steps
from lockstep.kernels import has_triton
from lockstep.models import has_own_kernels
from lockstep.plan.choose import (
    PLAIN,
    default_reduction,
    expect_reduction,
    keep_affordable,
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

# Where no reductions are to be compared, a GPU's ways to execute the step are all the same, within this.
USUAL_S = 20.0
# The shares of the time that is left: for passes of a rehearsal after the first, then for single messages; the rest
# tries whole steps.
REHEARSAL_SHARE, MESSAGE_SHARE = 0.2, 0.6
LEAST_FOR_MESSAGES = 0.25  # of a step
MAX_TURNS = 9
GPU_TURNS, GPU_STEPS = 3, 5  # a GPU's clock is steady, and one step is too short to time
LONG_STEP_S = 0.1  # which is not too short
READY_PASSES = 4
NO_TIME = "comm.tune_s leaves no time to try it"
OLDEST_GPU = (8, 0)  # for the own kernels, by compute capability


def suits_own_kernels(model: nn.Module) -> bool:
    """Whether the network has any, Triton is there, and a GPU that it supports with the shared memory they take."""
    can = has_triton() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST_GPU
    return can and has_own_kernels(model)


class Rehearsed(NamedTuple):
    """A pass of a rehearsal: how long its parts took, and when each gradient was ready."""

    passes: Passes
    ready_s: list[float]


class Rig:
    """What candidates are measured with: one fake batch, one budget, and what has been found so far."""

    def __init__(self, config: RunConfig, parts: Parts, world: World) -> None:
        self._config = config
        self._parts = parts
        self._world = world
        self._batch = fake_batch(config, world)
        self._budget = Budget(world, config.comm.tune_s or USUAL_S)
        self._tunes = parts.hybrid is not None and config.comm.tune_s > 0
        self.on_gpu = world.device.type == "cuda"
        self.messages: list[Timing] = []
        self.steps: list[StepTime] = []
        self.trials: list[Trial] = []
        self.reductions: list[ReductionPlan] = []  # of each trial
        self.recording: RecordedStep | None = None  # of the best trial, where it was recorded

    def measure_execution(self, execution: Execution, num_left: int = 1) -> None:
        """Rehearse one way to execute the step, then try it with every reduction worth it.

        It is the first of `num_left` ways that share what is left of the time.
        """
        if self._is_too_long(execution):
            self._note(Trial(execution, "", "", float("inf"), NO_TIME), self._usual_reduction())
            return
        failure, step_time, rehearsed = self._rehearse(execution, num_left)
        if failure or step_time is None:
            self._note(Trial(execution, "", "", float("inf"), failure), self._usual_reduction())
            return
        self.steps.append(step_time)
        self._measure_messages(step_time)
        budget = self._share_budget(num_left)
        num_steps = self._count_steps(step_time.slowest_s)
        reductions, affordable = self._propose(step_time, num_steps, budget)
        steps: dict[str, Step] = {}
        failures: dict[str, str] = {}
        pool = None
        for rule in affordable:
            apply_reduction(reductions[rule], self._parts)
            failure, step = ("", rehearsed) if rehearsed else self._build(execution, pool)
            if step is None or failure:
                failures[rule] = failure
                continue
            pool = step.pool if isinstance(step, RecordedStep) else None
            steps[rule] = step
        seconds = self._take_turns(steps, reductions, num_steps, budget)
        for rule, reduction in reductions.items():
            failure = "" if rule in seconds else failures.get(rule, NO_TIME)
            trial = Trial(execution, rule, self._describe(reduction), seconds.get(rule, float("inf")), failure)
            self._note(trial, reduction)
        self._keep(execution, steps)
        self.clean_up()

    def _is_too_long(self, execution: Execution) -> bool:
        """Whether even the least that a further way takes, at the speed of those that work, is too much; all agree."""
        if self.pick() is None or (self.on_gpu and execution.compile == "off"):
            return False  # a recording takes seconds to try, and may be worth several times the speed
        step_s = min(step.slowest_s for step in self.steps)
        rehearsed = self._steps_a_pass + (WARM_UP_STEPS + self._steps_a_pass if execution.recorded else 0)
        return not self._budget.fits((rehearsed + self._count_steps(step_s)) * step_s)

    @property
    def _steps_a_pass(self) -> int:
        """Of a rehearsal: on a GPU the second of two counts, whose launch is hidden behind the first as in a run."""
        return 2 if self.on_gpu else 1

    def _count_steps(self, step_s: float) -> int:
        """Steps of one turn."""
        return GPU_STEPS if self.on_gpu and step_s < LONG_STEP_S else 1

    def _share_budget(self, num_left: int) -> Budget:
        return Budget(self._world, self._budget.left_s / num_left)

    def _measure_messages(self, step_time: StepTime) -> None:
        """What each all-reduce costs at each size, once; two turns should fit behind it.

        There is a part of a step for it in any case: by the shortest message alone, long ones would seem endless.
        """
        parts, comm = self._parts, self._config.comm
        if not self._tunes or self.messages:
            return
        assert parts.hybrid is not None
        pinned = pin_choice(comm, parts.topology)
        choices = [pinned] if pinned else list_choices(parts.topology, str(dist.get_backend()))
        half, full = parts.reducer.flat
        array = half if half.numel() else full
        sizes = list_sizes(min(parts.hybrid.bytes_per_element, array.element_size()) * array.numel())
        step_s, left_s = step_time.slowest_s, self._budget.left_s
        turns_s = 2 * self._count_steps(step_s) * step_s
        budget_s = max(LEAST_FOR_MESSAGES * step_s, min(MESSAGE_SHARE * left_s, left_s - turns_s))
        self.messages = measure_messages(parts.hybrid, self._world, array, choices, sizes, budget_s)

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
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def _describe(self, reduction: ReductionPlan) -> str:
        """In words; nothing where nothing is sent."""
        return describe_reduction(reduction) if self._parts.hybrid else ""

    def _note(self, trial: Trial, reduction: ReductionPlan) -> None:
        self.trials.append(trial)
        self.reductions.append(reduction)

    def _rehearse(self, execution: Execution, num_left: int) -> tuple[str, StepTime | None, Step | None]:
        """A few steps with nothing sent, so that no rank waits for one that fails; when each gradient is ready.

        Alone in the world, the step that was rehearsed is the one to try, and is given back.
        """
        parts = self._parts
        is_alone = parts.hybrid is None

        def build() -> Step:
            apply_execution(execution, parts)
            if execution.recorded and is_alone:
                return build_launched(parts, len(self._batch.labels))
            return self._build_alone(execution)

        with parts.reducer.muted():
            failure, step, found = self._rehearse_watched(execution, build, num_left)
            recorded: list[Rehearsed] = []
            if not failure and execution.recorded and is_alone:
                failure, step, recorded = self._rehearse_recorded(execution, num_left)
        if failure:
            return failure, None, None
        passes, ready_s = _pick_pass(found)
        if recorded:
            # Those of the step launched one by one, shortened to the recorded one: nothing hangs on it here.
            launched_s, (passes, _) = passes.step_s, _pick_pass(recorded)
            ready_s = [ready * min(1.0, passes.step_s / launched_s) for ready in ready_s]
        return "", self._describe_step(execution, passes, ready_s), step if is_alone else None

    def _rehearse_watched(
        self, execution: Execution, build: Callable[[], Step], num_left: int
    ) -> tuple[str, Step | None, list[Rehearsed]]:
        """When each gradient is ready in this very step, which is recorded with an event for each."""
        with self._parts.reducer.watching() as watch:

            def begin() -> Step:
                step = build()
                if isinstance(step, RecordedStep):
                    step.prepare(self._batch, WARM_UP_STEPS)
                return step

            return self._rehearse_step(execution, begin, num_left, watch.ready_s)

    def _rehearse_recorded(self, execution: Execution, num_left: int) -> tuple[str, Step | None, list[Rehearsed]]:
        """The recorded step of a rank alone, whose gradients were watched in the step launched one by one.

        A recording for the events alone would be one too many: from some thousand operations on that a process has
        recorded, whether it still holds them or not, every replay's kernels start 0.35 us later, 4 % of a small step.
        """

        def begin() -> Step:
            step = self._build_alone(execution)
            assert isinstance(step, RecordedStep)
            # Its place may have a channel more than the batch: other kernels, which no recording may be first to run.
            step.prepare(self._batch, WARM_UP_STEPS)
            return step

        return self._rehearse_step(execution, begin, num_left, list)

    def _rehearse_step(
        self, execution: Execution, begin: Callable[[], Step], num_left: int, ready_s: Callable[[], list[float]]
    ) -> tuple[str, Step | None, list[Rehearsed]]:
        """A pass, and as many more as there is time for; all ranks take as many."""
        step: Step | None = None
        found: list[Rehearsed] = []

        def take(count: int) -> None:
            nonlocal step
            step = step or begin()
            for _ in range(count):
                found.append(Rehearsed(self._time_passes(step), ready_s()))

        begun = time.perf_counter()
        failure = self._attempt(lambda: take(1))
        if failure:
            return failure, None, found
        step_s = found[0].passes.step_s
        if self.on_gpu or execution.compile != "off":
            # What it took beyond such steps went into kernels.
            num_warm = WARM_UP_STEPS if isinstance(step, RecordedStep) else 0
            self._budget.excuse(time.perf_counter() - begun - (num_warm + self._steps_a_pass) * step_s)
        room = REHEARSAL_SHARE * self._share_budget(num_left).left_s / (self._steps_a_pass * max(step_s, 1e-9))
        num_more = int(self._world.broadcast_value(int(min(READY_PASSES - 1, max(0.0, room)))))
        return self._attempt(lambda: take(num_more)), step, found

    def _time_passes(self, step: Step) -> Passes:
        """The last step of a pass."""
        return time_steps(self._parts.clock, lambda: step(self._batch, 0.0, False), self._steps_a_pass)[-1]

    def _describe_step(self, execution: Execution, passes: Passes, ready_s: list[float]) -> StepTime:
        """Rank 0's passes and gradients, and how long the step took all ranks."""
        steps_s = [float(seconds) for seconds in self._world.gather_values(passes.step_s)]
        step_s, forward_s, update_s, *ready_s = map(
            float, self._world.broadcast_value([passes.step_s, passes.forward_s, passes.update_s, *ready_s])
        )
        slots = time_slots(self._parts.layout, ready_s)
        mean_s = sum(steps_s) / len(steps_s)
        return StepTime(execution, step_s, max(ready_s), slots, forward_s, update_s, mean_s, max(steps_s))

    def _usual_reduction(self) -> ReductionPlan:
        """Where there is nobody to send to, or no time."""
        backend = str(dist.get_backend()) if self._world.size > 1 else ""
        parts = self._parts
        return default_reduction(self._config.comm, parts.layout, parts.topology, self._wire_bytes, backend)

    def _propose(
        self, step_time: StepTime, num_steps: int, budget: Budget
    ) -> tuple[dict[str, ReductionPlan], list[str]]:
        """The reductions for an execution, and which of them there is time for; rank 0 says so."""
        if not self._tunes:
            return {PLAIN: self._usual_reduction()}, [PLAIN]
        layout, said = self._parts.layout, None
        if self._world.is_first:
            ready_s = [slot.ready_s for slot in step_time.slots]
            found = propose_reductions(self._config.comm, layout, ready_s, self.messages, self._wire_bytes)
            turns_s = {
                rule: num_steps * (step_time.slowest_s + expect_reduction(self.messages, plan, self._wire_bytes))
                for rule, plan in found.items()
            }
            tables = {rule: to_reduction_table(plan) for rule, plan in found.items()}
            said = [tables, keep_affordable(turns_s, budget.left_s)]
        tables, affordable = self._world.broadcast_value(said)
        return {rule: read_reduction(table, layout, self._world.size) for rule, table in tables.items()}, affordable

    @property
    def _wire_bytes(self) -> int:
        return self._parts.hybrid.bytes_per_element if self._parts.hybrid else 4

    def _build_alone(self, execution: Execution, pool: object = None) -> Step:
        count, global_size = len(self._batch.labels), self._batch.global_size
        if execution.recorded:
            return RecordedStep(self._parts, count, global_size, warn=_raise, pool=pool)
        return build_launched(self._parts, count)

    def _build(self, execution: Execution, pool: object) -> tuple[str, Step | None]:
        """A candidate's step, recorded already where it is to be, and the memory of its sums; or why it failed.

        From here on its steps are sent, and other ranks would wait for one that fails.
        """
        step: Step | None = None

        def build() -> None:
            nonlocal step
            if self._parts.hybrid is not None:
                self._parts.hybrid.reserve(self._parts.reducer.list_sums())
            step = self._build_alone(execution, pool)
            if isinstance(step, RecordedStep):
                step.prepare(self._batch)

        return self._attempt(build), step

    def _attempt(self, function: Callable[[], None]) -> str:
        """Why something failed, on whichever rank; empty where it did not. Nothing in it may wait for another rank."""
        failure = ""
        try:
            function()
        except Exception as error:  # compilers and drivers raise nearly anything; the plain step always remains
            failure = _shorten(error)
        return self._agree(failure)

    def _agree(self, failure: str) -> str:
        """What fails on one rank fails on all."""
        if self.on_gpu:
            torch.cuda.synchronize()
        if not self._world.maximum(torch.tensor([float(bool(failure))])).item():
            return ""
        reasons = enumerate(self._world.gather_values(failure))
        return next(f"{reason} (rank {rank})" if self._world.size > 1 else reason for rank, reason in reasons if reason)

    def _take_turns(
        self, steps: dict[str, Step], reductions: dict[str, ReductionPlan], num_steps: int, budget: Budget
    ) -> dict[str, float]:
        """Seconds a step under each reduction, in turns; the slowest rank's time counts.

        The first has its turn in any case. Another has one if it fits, by the longest so far; further turns are whole.
        """
        times: dict[str, list[float]] = {}
        for turn in range(GPU_TURNS if self.on_gpu else MAX_TURNS):
            if turn and not (times and budget.fits(num_steps * sum(map(median, times.values())))):
                break
            for rule in list(times) if turn else steps:
                if not turn and times and not budget.fits(num_steps * max(map(max, times.values()))):
                    break
                apply_reduction(reductions[rule], self._parts)
                seconds = self._time(steps[rule], num_steps)
                slowest = self._world.maximum(torch.tensor([seconds], dtype=torch.float64)).item()
                times.setdefault(rule, []).append(slowest)
        return {rule: median(values) for rule, values in times.items()}

    def _time(self, step: Step, count: int) -> float:
        """Seconds a step, by the device's clock."""
        begun = take_moment(on_gpu=self.on_gpu)
        for _ in range(count):
            step(self._batch, 0.0, False)
        done = take_moment(on_gpu=self.on_gpu)
        wait_for(done)
        return seconds_between(begun, done) / count


def _pick_pass(found: Sequence[Rehearsed]) -> Rehearsed:
    """The one to go by; the first warms up, and counts if it is alone."""
    return pick_middle(found[1:] or found, lambda one: one.passes.step_s)


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
