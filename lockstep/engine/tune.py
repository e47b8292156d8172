"""Before step 0: measure the world, then choose cut points, all-reduce and overlap for this model on it.

Backward passes over an empty batch tell when each gradient is ready; the tuner tells what a message costs; the fusion
rules propose plans; and the plans are tried on real backward passes, because what overlaps is not free.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from lockstep.comm.cost import Sample
from lockstep.comm.fusion import Buffer, ReductionPlan, add_tail, plan_buffers, plan_merged, plan_two_segments
from lockstep.comm.hybrid import FLAT, Hybrid
from lockstep.comm.tuner import (
    MARGIN,
    Trial,
    Tuning,
    assign_choices,
    describe_model,
    list_choices,
    list_sizes,
    measure_choices,
    pick_choice,
    read_tuning,
    tuning_name,
    write_tuning,
)
from lockstep.comm.world import World
from lockstep.config import CommConfig, RunConfig
from lockstep.data.generated import default_cache
from lockstep.data.order import Cursor, share
from lockstep.data.pipeline import Batch
from lockstep.engine.build import HALF, Parts, assemble, build_network, open_sources, pinned_choice
from lockstep.engine.step import run_passes
from lockstep.errors import LockstepError, SharedError
from lockstep.layout import Layout
from lockstep.optim.schedule import Schedule

# The share of the time for tuning that goes to single messages; the rest tries whole plans.
MESSAGE_SHARE = 0.6
TRIAL_ROUNDS = 9
PLAIN = "PyTorch's own all-reduce by the threshold rule, under backward"


def tune_parts(
    config: RunConfig, parts: Parts, world: World, places: Sequence[Path], *, again: bool = False
) -> Tuning | None:
    """Let the reducer follow the best plan, remembered or measured now; None where there is nothing to tune.

    `places` are files or folders that may hold an earlier tuning, the first preferred; what is measured goes to all.
    """
    hybrid, topology = parts.hybrid, parts.topology
    if hybrid is None or config.comm.tune_s <= 0:
        return None
    backend = dist.get_backend()
    name = tuning_name(topology, backend, parts.layout, _pins(config.comm))
    files = [place if place.suffix else place / f"{name}.toml" for place in places]
    found: Tuning | None = None
    if world.is_first and not again:
        found = next((t for t in map(read_tuning, files) if t and t.name == name), None)
    tuning: Tuning | None = world.broadcast_object(found)
    if tuning is None:
        tuning = measure_tuning(config, parts, hybrid, world, name)
    if world.is_first:
        for file in files:
            with contextlib.suppress(LockstepError):  # a full disk costs the memory of it, not the run
                write_tuning(file, tuning)
    hybrid.prepare(tuning.plan.choices)
    parts.reducer.follow(tuning.plan)
    return tuning


def tune_recipe(config: RunConfig, world: World) -> tuple[Tuning, Path]:
    """Measure anew for a recipe; returns where the result is kept."""
    classes: int = world.broadcast_object(len(open_sources(config.data).train.classes) if world.is_first else 0)
    schedule = Schedule("constant", config.optim.lr, total_steps=1)
    parts = assemble(config, world, build_network(config, classes), schedule)
    tuning = tune_parts(config, parts, world, [default_tuning_folder()], again=True)
    if tuning is None:
        raise SharedError("comm.tune_s = 0 leaves no time to measure; give some seconds.")
    return tuning, default_tuning_folder() / f"{tuning.name}.toml"


def default_tuning_folder() -> Path:
    """Where tunings are kept between runs."""
    return default_cache() / "tuning"


def _pins(comm: CommConfig) -> str:
    """What the recipe pins, as part of the name under which a tuning is remembered."""
    defaults = CommConfig()
    keys = ("algorithm", "group_size", "fusion", "buffer_mb", "overlap", "wire", "division")
    pins = [f"{key}={getattr(comm, key)}" for key in keys if getattr(comm, key) != getattr(defaults, key)]
    return ",".join(pins)


def describe_tuning(tuning: Tuning) -> str:
    """One sentence on what was chosen and how long it took."""
    return f"Gradients travel in {describe_plan(tuning.plan)}, measured in {tuning.seconds:.1f} s on {tuning.topology}."


def describe_plan(plan: ReductionPlan) -> str:
    """Buffers, algorithms and overlap in a few words."""
    total = len(plan.buffers)
    counts = [f"{plan.choices.count(choice)} by {choice}" for choice in dict.fromkeys(plan.choices)]
    how = counts[0].split(" ", 1)[1] if len(counts) == 1 else ", ".join(counts)
    when = "under" if plan.overlap else "after"
    return f"{total} buffer{'s' if total > 1 else ''} {when} the backward pass ({how})"


def measure_tuning(config: RunConfig, parts: Parts, hybrid: Hybrid, world: World, name: str) -> Tuning:
    """Measure messages, then plans; every rank takes part and gets rank 0's answer."""
    start = time.perf_counter()
    topology = parts.topology
    budget_s = config.comm.tune_s
    batch = fake_batch(config, world)
    statistics = [buffer.clone() for buffer in parts.model.buffers()]
    pinned = pinned_choice(config, topology)
    choices = [pinned] if pinned else list_choices(topology)
    weight = hybrid.bytes_per_element
    half, full = parts.reducer.flat
    array = half if half.numel() else full
    sizes = list_sizes(min(weight, array.element_size()) * array.numel())
    samples = measure_choices(hybrid, world, array, choices, sizes, MESSAGE_SHARE * budget_s)
    ready_s = world.broadcast_object(_measure_ready(parts, batch))
    plans = propose_plans(config.comm, parts.layout, ready_s, tuple(samples), weight)
    plans = world.broadcast_object(plans)
    left_s = world.broadcast_object(budget_s - (time.perf_counter() - start))
    trials = _try_plans(parts, hybrid, world, batch, plans, left_s)
    for buffer, before in zip(parts.model.buffers(), statistics, strict=True):
        buffer.copy_(before)  # noise is no statistics
    best = pick_trial(trials)
    tuning = Tuning(
        name=name,
        topology=topology.key(),
        backend=dist.get_backend(),
        model=describe_model(parts.layout),
        seconds=time.perf_counter() - start,
        samples=tuple(samples),
        trials=tuple(trials),
        plan=plans[best.name],
    )
    return world.broadcast_object(tuning)  # type: ignore[no-any-return]


def pick_trial(trials: Sequence[Trial]) -> Trial:
    """The quickest plan; what is not PyTorch's own must beat it by more than noise."""
    best = min(trials, key=lambda trial: trial.seconds)
    plain = next((trial for trial in trials if trial.name == PLAIN), best)
    return plain if best.seconds > (1 - MARGIN) * plain.seconds else best


def propose_plans(
    comm: CommConfig, layout: Layout, ready_s: Sequence[float], samples: Sequence[Sample], bytes_per_element: int = 4
) -> dict[str, ReductionPlan]:
    """The plans worth trying, by name: what each fusion rule gives, under backward and after it."""
    threshold, weight = comm.buffer_mb * 2**20, bytes_per_element

    def predict(num_bytes: int) -> float:
        return pick_choice(samples, num_bytes)[1]

    head, width = layout.head, min(layout.head_element_bytes, weight)
    ready_s = ready_s[: len(head.slots)]
    rules: dict[str, Callable[[], tuple[Buffer, ...]]] = {
        "merged": lambda: plan_merged(head, ready_s, predict, width),
        "two-segments": lambda: plan_two_segments(head, ready_s, predict, width),
        "threshold": lambda: plan_buffers(head, threshold, width),
    }
    plans: dict[str, ReductionPlan] = {}
    if comm.algorithm == "auto" and comm.fusion == "auto" and comm.overlap != "off":
        buffers = add_tail(layout, rules["threshold"]())
        plans[PLAIN] = ReductionPlan(buffers, (FLAT,) * len(buffers), overlap=True)
    if comm.overlap != "on" and comm.fusion == "auto":
        whole = add_tail(layout, plan_buffers(head, float("inf")))
        plans["one buffer, after backward"] = assign_choices(whole, samples, overlap=False, bytes_per_element=weight)
    for name, rule in rules.items():
        if comm.fusion not in ("auto", name):
            continue
        buffers = add_tail(layout, rule())
        for overlap in (True, False):
            if (comm.overlap == "on" and not overlap) or (comm.overlap == "off" and overlap):
                continue
            if not overlap and comm.fusion == "auto":
                continue  # nothing to overlap: the one buffer above saves every start-up but one
            plan = assign_choices(buffers, samples, overlap=overlap, bytes_per_element=weight)
            if plan not in plans.values():
                plans[f"{name}, {'under' if overlap else 'after'} backward"] = plan
    return plans


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


def _run_backward(parts: Parts, batch: Batch) -> None:
    """A step without an update."""
    run_passes(parts, batch.images, batch.labels, batch.global_size)
    parts.reducer.finish()


def _measure_ready(parts: Parts, batch: Batch) -> list[float]:
    """When each slot's gradient is ready in the backward pass, with nothing sent meanwhile: the median of a few."""
    plan = parts.reducer.plan
    parts.reducer.follow(replace(plan, overlap=False))
    rows = []
    for _ in range(4):
        _run_backward(parts, batch)
        rows.append(list(parts.reducer.ready_s))
    parts.reducer.follow(plan)
    return [median(values) for values in zip(*rows[1:], strict=True)]


def _try_plans(
    parts: Parts, hybrid: Hybrid, world: World, batch: Batch, plans: dict[str, ReductionPlan], left_s: float
) -> list[Trial]:
    """Seconds of a whole step without update under each plan, in turns; the slowest rank's time counts."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    start = time.perf_counter()
    for turn in range(TRIAL_ROUNDS):
        for name, plan in plans.items():
            hybrid.prepare(plan.choices)
            parts.reducer.follow(plan)
            begun = time.perf_counter()
            _run_backward(parts, batch)
            if batch.images.is_cuda:
                torch.cuda.synchronize()
            taken = world.maximum(torch.tensor([time.perf_counter() - begun], dtype=torch.float64))
            times[name].append(taken.item())
        spent = time.perf_counter() - start
        if not world.broadcast_object(spent * (turn + 2) / (turn + 1) < left_s):
            break
    return [Trial(name, median(values)) for name, values in times.items()]
