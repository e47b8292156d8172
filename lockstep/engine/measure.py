"""Before step 0: candidates on real ranks -> a profile -> the plan, chosen as a whole.

For every way to execute the step: rehearsed with nothing sent, which says whether it works here and when each gradient
is ready; the fusion rules then propose reductions for those times and the messages measured before; and each candidate,
execution and reduction together, takes whole steps on all ranks. What fails on one rank is left out on all. Nothing a
trial does stays: `state.py` lists what a step changes, and it is put back.
"""

import contextlib
import gc
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from lockstep import __version__
from lockstep.comm.cost import Timing
from lockstep.comm.fusion import ReductionPlan
from lockstep.comm.moment import seconds_between, take_moment, wait_for
from lockstep.comm.topology import GUESSED_INTER, GUESSED_INTRA, Topology
from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.generated import default_cache
from lockstep.data.order import Cursor, share
from lockstep.data.pipeline import Batch
from lockstep.engine.apply import Step, apply_execution, apply_reduction, build_launched
from lockstep.engine.build import HALF, Parts, assemble, build_network, open_sources, plan_input, set_number_formats
from lockstep.engine.messages import measure_messages
from lockstep.engine.recorded import WARM_UP_STEPS, RecordedStep
from lockstep.engine.state import put_back
from lockstep.errors import LockstepError, SharedError
from lockstep.kernels import has_triton
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import (
    PLAIN,
    default_reduction,
    is_worth_compiling,
    list_choices,
    list_compiled,
    list_executions,
    list_sizes,
    pick_trial,
    pin_choice,
    propose_reductions,
)
from lockstep.plan.files import read_plan, write_plan
from lockstep.plan.plan import (
    Execution,
    Plan,
    describe_reduction,
    from_toml,
    read_reduction,
    to_reduction_table,
    to_toml,
)
from lockstep.plan.profile import Profile, Setup, StepTime, Trial, from_json, read_setup, time_slots, to_json

# The share of the time for measuring that goes to single messages; the rest tries whole steps.
MESSAGE_SHARE = 0.6
MAX_TURNS = 9
GPU_TURNS, GPU_STEPS = 3, 5  # a GPU's clock is steady, and one step is too short to time
READY_PASSES = 4
OLDEST_GPU = (8, 0)  # for the own kernels, by compute capability

Source = Literal["measured", "remembered", "default"]


@dataclass(frozen=True)
class Chosen:
    """The plan, what it was chosen by, and where that comes from."""

    plan: Plan
    profile: Profile
    source: Source


def choose_plan(
    config: RunConfig,
    parts: Parts,
    world: World,
    places: Sequence[Path] = (),
    *,
    num_steps: int = 1,
    again: bool = False,
) -> Chosen:
    """The best plan for this run, remembered or measured now; every rank comes to the same answer.

    `places` are folders that may hold a plan, the first preferred; a folder that is no run's keeps one for each setup.
    What is chosen goes to all of them.
    """
    setup = read_setup(world.broadcast_value(asdict(describe_setup(config, parts, world))))
    folders = [place if place.name != CACHE else place / setup.name for place in places]
    plan = Plan(Execution(), parts.reducer.plan, plan_input(config, world))
    chosen = Chosen(plan, Profile(setup, 0.0), "default")
    if not _has_choice(config, parts, world):
        return chosen
    found = None
    if world.is_first and not again:
        found = next((f for f in (_recall(folder, setup, parts, config, num_steps) for folder in folders) if f), None)
    found = _share_plan(world, parts, found)
    if found:
        chosen = Chosen(replace(found[0], input=plan.input), found[1], "remembered")
    else:
        chosen = measure_plan(config, parts, world, setup, plan, num_steps)
    if world.is_first:
        for folder in folders:
            with contextlib.suppress(LockstepError):  # a full disk costs the memory of it, not the run
                write_plan(folder, chosen.plan, chosen.profile)
    return chosen


def tune_recipe(config: RunConfig, world: World) -> tuple[Chosen, Path]:
    """Measure anew for a recipe; returns where the result is kept."""
    set_number_formats(config.precision)
    classes = int(world.broadcast_value(len(open_sources(config.data).train.classes) if world.is_first else 0))
    schedule = Schedule("constant", config.optim.lr, total_steps=1)
    parts = assemble(config, world, build_network(config, classes), schedule)
    chosen = choose_plan(config, parts, world, [default_plan_folder()], again=True)
    if chosen.source == "default":
        raise SharedError("comm.tune_s = 0 leaves no time to measure; give some seconds.")
    return chosen, default_plan_folder() / chosen.profile.setup.name


CACHE = "plans"


def default_plan_folder() -> Path:
    """Where plans are kept between runs, a folder for each setup."""
    return default_cache() / CACHE


def _has_choice(config: RunConfig, parts: Parts, world: World) -> bool:
    """Whether there is anything to measure: a GPU, a compiler that is asked for, or others to send to."""
    is_asked = config.train.compile not in ("auto", "off")
    return world.device.type == "cuda" or is_asked or (parts.hybrid is not None and config.comm.tune_s > 0)


def _recall(folder: Path, setup: Setup, parts: Parts, config: RunConfig, num_steps: int) -> tuple[Plan, Profile] | None:
    """What an earlier run chose in the same setup, if it looked at all that this one would look at."""
    found = read_plan(folder, parts.layout, parts.topology.num_ranks)
    if found is None or found[1].setup != setup:
        return None
    trials = found[1].trials
    best = pick_trial(trials)
    on_gpu = parts.weights.is_cuda
    lacks = best is not None and is_worth_compiling(config.train, num_steps, best.seconds, on_gpu=on_gpu)
    return None if lacks and all(trial.execution.compile == "off" for trial in trials) else found


def describe_setup(config: RunConfig, parts: Parts, world: World) -> Setup:
    """What a measurement made now is true of."""
    on_gpu, topology = world.device.type == "cuda", parts.topology
    start, stop = share(config.train.global_batch, 0, world.size)
    layout = parts.layout
    return Setup(
        device=torch.cuda.get_device_name(world.device) if on_gpu else f"{platform.machine()} CPU",
        topology=topology.key(),
        links=_describe_links(topology),
        backend=_describe_backend() if world.size > 1 else "",
        precision=config.precision.compute,
        batch=stop - start,
        max_batch=config.train.max_batch_per_rank,
        image_size=config.data.image_size,
        model=f"{config.model.name}: {len(layout.slots)} gradients, {layout.numel} elements, {layout.split} half",
        pins=_describe_pins(config),
        versions=f"lockstep {__version__}, torch {torch.__version__}",
    )


def _describe_links(topology: Topology) -> str:
    is_guessed = (topology.intra, topology.inter) == (GUESSED_INTRA, GUESSED_INTER)
    return "" if is_guessed else f"{topology.intra}, {topology.inter}"


def _describe_backend() -> str:
    name = str(dist.get_backend())
    return f"{name} {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" else name


def _describe_pins(config: RunConfig) -> str:
    """What the recipe leaves no choice in, and what decides the update."""
    pins = []
    for section, keys in (
        (config.comm, ("algorithm", "group_size", "fusion", "buffer_mb", "overlap", "wire", "division", "tune_s")),
        (config.train, ("own_kernels", "cuda_graph", "compile")),
    ):
        defaults = type(section).model_fields
        pins += [f"{key}={value}" for key in keys if (value := getattr(section, key)) != defaults[key].default]
    return ", ".join([config.optim.name, *pins])


def measure_plan(config: RunConfig, parts: Parts, world: World, setup: Setup, plan: Plan, num_steps: int) -> Chosen:
    """Measure messages, then candidates; rank 0's pick is everybody's."""
    begun = time.perf_counter()
    rig = Rig(config, parts, world)
    rig.measure_messages()
    with put_back(parts):
        for execution in list_executions(config.train, on_gpu=rig.on_gpu, has_own_kernels=suits_own_kernels()):
            rig.measure_execution(execution)
        best = rig.pick()
        if best and world.broadcast_value(is_worth_compiling(config.train, num_steps, best.seconds, on_gpu=rig.on_gpu)):
            for execution in list_compiled(config.train):
                rig.measure_execution(execution)
            best = rig.pick()
    rig.clean_up()
    profile = Profile(
        setup,
        time.perf_counter() - begun,
        steps=tuple(rig.steps),
        messages=tuple(rig.messages),
        trials=tuple(rig.trials),
    )
    if best:
        plan = replace(plan, execution=best.execution, reduction=rig.reductions[rig.trials.index(best)])
    shared = _share_plan(world, parts, (plan, profile))
    assert shared is not None
    return Chosen(*shared, "measured")


def _share_plan(world: World, parts: Parts, found: tuple[Plan, Profile] | None) -> tuple[Plan, Profile] | None:
    """Rank 0's plan and profile on every rank, in the formats that their files have."""
    if world.size == 1:
        return found
    texts = world.broadcast_value([to_toml(found[0]), to_json(found[1])] if found and world.is_first else None)
    return (from_toml(texts[0], parts.layout, world.size), from_json(texts[1])) if texts else None


def suits_own_kernels() -> bool:
    """Whether Triton is there, and a GPU that it supports and that has the shared memory the kernels take."""
    return has_triton() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST_GPU


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
        failure, step_time = self._rehearse(execution)
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
            failure, step = self._build(execution, pool)
            if step is None or failure:
                self._note(Trial(execution, rule, self._describe(reduction), float("inf"), failure), reduction)
                continue
            pool = step.pool if isinstance(step, RecordedStep) else None
            steps[rule] = step
        for rule, seconds in self._take_turns(steps, reductions).items():
            self._note(Trial(execution, rule, self._describe(reductions[rule]), seconds), reductions[rule])
        self.clean_up()

    def pick(self) -> Trial | None:
        return pick_trial(self.trials)

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

    def _rehearse(self, execution: Execution) -> tuple[str, StepTime | None]:
        """A few steps with nothing sent, so that no rank waits for one that fails; when each gradient is ready."""
        parts, failure, rows, step_s = self._parts, "", [], 0.0
        reducer = parts.reducer
        try:
            apply_execution(execution, parts)
            with reducer.muted(), reducer.watching() as watch:
                step = self._build_alone(execution)
                if isinstance(step, RecordedStep):
                    step.prepare(self._batch, WARM_UP_STEPS)
                for _ in range(READY_PASSES):
                    step_s = self._time(step, 1)
                    rows.append(watch.ready_s())
        except Exception as error:  # compilers and drivers raise nearly anything; the plain step always remains
            failure = _shorten(error)
        failure = self._agree(failure)
        if failure:
            return failure, None
        ready_s = [median(values) for values in zip(*rows[1:], strict=True)]
        step_s, *ready_s = map(float, self._world.broadcast_value([step_s, *ready_s]))
        return "", self._describe_step(execution, step_s, ready_s)

    def _describe_step(self, execution: Execution, step_s: float, ready_s: list[float]) -> StepTime:
        return StepTime(execution, step_s, max(ready_s), time_slots(self._parts.layout, ready_s))

    def _propose(self, step_time: StepTime | None) -> dict[str, ReductionPlan]:
        """The reductions to try with an execution; the usual one where there is nobody to send to, or no time."""
        config, parts = self._config, self._parts
        if not self._tunes or step_time is None:
            usual = default_reduction(config.comm, parts.layout, parts.topology, self._wire_bytes)
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


def _raise(text: str) -> None:
    raise RuntimeError(text)


def _shorten(error: Exception) -> str:
    """The first line of what it says; what compilers add is for those who write them."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return next(filter(None, lines), type(error).__name__)[:200]


def fake_batch(config: RunConfig, world: World) -> Batch:
    """A batch like this rank's, in the precision the pipeline gives, of noise: a GPU runs faster on empty images."""
    start, stop = share(config.train.global_batch, world.rank, world.size)
    size = config.data.image_size
    generator = torch.Generator(world.device).manual_seed(world.rank)
    images = torch.randn(stop - start, 3, size, size, device=world.device, generator=generator)
    images = images.to(HALF.get(config.precision.compute, torch.float32), memory_format=torch.channels_last)
    return Batch(
        images=images,
        labels=torch.zeros(stop - start, dtype=torch.int64, device=world.device),
        global_size=config.train.global_batch,
        epoch=0,
        samples=np.arange(stop - start),
        cursor=Cursor(),
    )
