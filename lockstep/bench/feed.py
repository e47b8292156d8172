"""A training step fed from images beside the same step on data in memory: does the input keep up?

Both run on one rank in one process, as a training run would: the pipeline and the way to execute the step are those a
run chooses, and nothing decoded stays on the device. The step on data in memory is measured before and after, because
a device that has become warm is slower.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

import torch
from rich.console import Console

from lockstep.bench.photos import CLASSES, Repeated
from lockstep.bench.results import check_files, write_rows
from lockstep.comm.world import World, join_world
from lockstep.config import DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.data.sources import Source
from lockstep.data.workshop import DecoderName
from lockstep.engine.apply import Step, apply_plan
from lockstep.engine.build import (
    assemble,
    build_network,
    build_train_pipeline,
    count_decode_threads,
    set_number_formats,
)
from lockstep.engine.measure import fake_batch
from lockstep.engine.planning import choose_plan
from lockstep.errors import LockstepError
from lockstep.models import RESNET_DEPTHS
from lockstep.optim.schedule import Schedule

LR = 1e-3
# Steps the host may be ahead of the device: a training loop that reads its loss now and then is not further ahead.
STEPS_AHEAD = 2
# Of the time asked for: how long the step on data in memory runs before and after, and the pipeline before it counts.
MEMORY_SHARE, WARM_UP_SHARE = 0.25, 0.1
SAMPLES_IN_EPOCH = 1_281_167  # as in ImageNet: epochs do not end during the measurement

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What is trained, on how much of what, for how long."""

    model: str
    batch: int
    image_size: int
    seconds: float
    threads: int | None = None  # None: as many as a run would use
    decoder: DecoderName = "auto"
    read_processes: int = DataConfig().read_processes


@dataclass(frozen=True)
class Row:
    """One side: the step on data in memory, or fed by the pipeline."""

    name: str
    stage: str  # "train in memory" or "train"
    images_per_second: float
    threads: int
    seconds: float
    share: float  # of the speed on data in memory
    model: str
    batch: int
    setting: str


def measure_feed(source: Source, wanted: Wanted, world: World, say: Say = lambda line: None) -> list[Row]:
    """The step on data in memory, fed for so many seconds, and in memory again."""
    config, seconds = _configure(wanted, world), wanted.seconds
    set_number_formats(config.precision)
    parts = assemble(config, world, build_network(config, CLASSES), Schedule("constant", LR, total_steps=1))
    chosen = choose_plan(config, parts, world)
    plan = chosen.plan
    say(f"The step: {plan.execution}.")
    step = apply_plan(plan.execution, plan.reduction, parts, wanted.batch, wanted.batch, recording=chosen.recording)
    in_memory = repeat(fake_batch(config, world))
    _run(step, in_memory, MEMORY_SHARE * seconds / 2, world)  # kernels are chosen, and the device becomes warm
    before = _run(step, in_memory, MEMORY_SHARE * seconds, world)
    say(f"In memory: {before:,.0f} images/s.")
    with build_train_pipeline(config, world, Repeated(source, SAMPLES_IN_EPOCH), Cursor(), plan.input) as pipeline:
        _run(step, pipeline, WARM_UP_SHARE * seconds, world)
        fed = _run(step, pipeline, seconds, world)
        setting = pipeline.describe()
    say(f"Fed for {seconds:.0f} s: {fed:,.0f} images/s. {setting}")
    after = _run(step, in_memory, MEMORY_SHARE * seconds, world)
    say(f"In memory again: {after:,.0f} images/s.")

    def build_row(stage: str, rate: float, over_s: float) -> Row:
        threads = count_decode_threads(config, world, wanted.decoder)
        share = 2 * rate / (before + after)
        return Row("lockstep", stage, rate, threads, over_s, share, wanted.model, wanted.batch, setting)

    return [
        build_row("train in memory", (before + after) / 2, 2 * MEMORY_SHARE * seconds),
        build_row("train", fed, seconds),
    ]


def _configure(wanted: Wanted, world: World) -> RunConfig:
    if wanted.model not in ("alexnet", *RESNET_DEPTHS):
        raise LockstepError(f"--train {wanted.model} is unknown; choose alexnet or {', '.join(RESNET_DEPTHS)}.")
    data = DataConfig(
        image_size=wanted.image_size,
        decoder=wanted.decoder,
        resident="off",
        decode_threads=wanted.threads or 0,
        read_processes=wanted.read_processes,
    )
    return RunConfig(
        data=data,
        model=ModelConfig(name=wanted.model),
        optim=OptimConfig(name="lars", lr=LR),
        precision=PrecisionConfig(compute="fp16" if world.device.type == "cuda" else "fp32"),
        train=TrainConfig(global_batch=wanted.batch, duration="1ep", max_batch_per_rank=wanted.batch),  # type: ignore[arg-type]
    )


def _run(step: Step, batches: Iterator[Batch], seconds: float, world: World) -> float:
    """Images per second over at least so many seconds and one step, from an idle device to an idle device."""
    on_gpu = world.device.type == "cuda"
    behind: deque[torch.cuda.Event] = deque()
    num_images, start = 0, time.perf_counter()
    while not num_images or time.perf_counter() - start < seconds:
        batch = next(batches)
        step(batch, LR, False)
        num_images += len(batch.labels)
        if on_gpu:
            behind.append(torch.cuda.current_stream().record_event())
            if len(behind) > STEPS_AHEAD:
                behind.popleft().synchronize()
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return num_images / (time.perf_counter() - start)


def describe(rows: list[Row]) -> str:
    """What a person wants to know."""
    memory, fed = rows
    return (
        f"{fed.model}, batch {fed.batch}: {fed.images_per_second:,.0f} images/s from these images over "
        f"{fed.seconds:.0f} s, {100 * fed.share:.1f} % of the {memory.images_per_second:,.0f} on data in memory."
    )


def run(source: Source, wanted: Wanted, console: Console, json_file: Path | None = None) -> None:
    """Measure, say what came out and write the rows."""
    check_files(json_file, None)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    with join_world(None) as world:
        rows = measure_feed(source, wanted, world, say)
    say(describe(rows))
    if json_file is not None:
        write_rows(json_file, [asdict(row) for row in rows])
