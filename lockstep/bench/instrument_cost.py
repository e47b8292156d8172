"""What a run's instruments cost: the same steps with and without them, in turns, on all ranks.

A turn is ten steps that end with a record, as in training. A run measures its layers at about a hundred records and
draws two timelines, whatever its length. Here both happen at every record, which is the most that they can cost; the
last column says what is left of it in a run of ten thousand steps.

On a CPU the pieces are timed by themselves too, in CPU seconds of their thread beside those of a step: a fraction of a
percent cannot be told from the noise of whole turns.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from lockstep.bench.results import check_files, write_rows
from lockstep.comm.world import World, join_world, read_membership
from lockstep.config import DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.data.pipeline import Batch
from lockstep.engine.apply import Step, apply_plan
from lockstep.engine.build import Parts, assemble, build_network, set_number_formats
from lockstep.engine.instruments import MOST_MEASURED, Cadence, Instruments
from lockstep.engine.launch import launch_ranks
from lockstep.engine.measure import fake_batch
from lockstep.engine.planning import choose_plan
from lockstep.engine.template import Template
from lockstep.engine.timeline import NUM_STEPS
from lockstep.engine.timing import KINDS
from lockstep.events import Event
from lockstep.optim.schedule import Schedule

TURN_STEPS = 10
RUN_STEPS = 10_000
PIECE_ROUNDS, PIECE_TURNS = 15, 1000
CLASSES = 100
OFF, CUTS, LAYERS, TIMELINE = "off", "on, nothing due", "layers and noise", "timeline"


class _Every(Cadence):
    """Something is due at every record, or nothing ever."""

    def __init__(self, due: str) -> None:
        super().__init__(0, RUN_STEPS, TURN_STEPS)
        self._due = due

    def is_measured(self, step: int) -> bool:
        return self._due == LAYERS and step % TURN_STEPS == 0

    def begins_timeline(self, step: int) -> bool:
        return self._due == TIMELINE and (step + NUM_STEPS - 1) % TURN_STEPS == 0

    def ends_timeline(self, step: int) -> bool:
        return self._due == TIMELINE and step % TURN_STEPS == 0


class _Nobody:
    """Hears everything and keeps nothing."""

    def emit(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Row:
    """One side: seconds a step, and the median of its ratios to the turn without instruments beside it."""

    side: str
    step_s: float
    ratio: float
    cpu_s: float  # of all threads of a rank; other programs on the machine disturb it less than the clock
    cpu_ratio: float
    cpu_share_of_run: float  # what it adds to a run of ten thousand steps


def run_parent(
    ranks: int, *, model: str, batch: int, image_size: int, rounds: int, json_file: Path | None = None
) -> None:
    """Start the ranks, or be one of them."""
    check_files(json_file, None)
    membership = read_membership(os.environ)
    if membership is None and ranks > 1:
        arguments = ["bench", "instruments", f"--model={model}", f"--batch={batch}", f"--image-size={image_size}"]
        arguments += [f"--rounds={rounds}", *([f"--json={json_file}"] if json_file else [])]
        with Template() as template:
            sys.exit(launch_ranks(template, (ranks, ranks), arguments))
    with join_world(membership) as world:
        rows, pieces = measure(world, model, batch, image_size, rounds)
    if world.is_first:
        console = Console()
        title = f"{model}, {world.size} × {batch} images of {image_size} pixels, {rounds} turns"
        console.print(build_table(rows, title))
        for name, seconds in pieces.items():
            console.print(f"{1e3 * seconds:10.4f} ms of its thread's CPU  {name}", highlight=False)
        if json_file:
            write_rows(json_file, [*(asdict(row) for row in rows), {"piece_cpu_s": pieces}])


def measure(world: World, model: str, batch: int, image_size: int, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """All sides in turns, and their pieces by themselves; every rank must call it."""
    config = RunConfig(
        data=DataConfig(image_size=image_size),
        model=ModelConfig(name=model),
        optim=OptimConfig(name="lars", lr=0.1),
        precision=PrecisionConfig(compute="fp16" if world.device.type == "cuda" else "fp32"),
        train=TrainConfig(global_batch=batch * world.size, duration="1ep", max_batch_per_rank=batch),  # type: ignore[arg-type]
    )
    set_number_formats(config.precision)
    parts = assemble(config, world, build_network(config, CLASSES), Schedule("constant", 0.1, total_steps=1))
    chosen = choose_plan(config, parts, world)
    step = apply_plan(
        chosen.plan.execution, chosen.plan.reduction, parts, batch, batch * world.size, recording=chosen.recording
    )
    images = fake_batch(config, world)
    sides = {OFF: None} | {due: Instruments(parts, world, _Nobody(), _Every(due)) for due in (CUTS, LAYERS, TIMELINE)}
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, instruments in sides.items():
            seconds = _take_turn(parts, step, images, instruments)
            if number:  # the first is for kernels to be chosen, and for the recording
                times[side].append(seconds)
    pieces = measure_pieces(parts, world, step, images) if world.device.type == "cpu" and world.size == 1 else {}
    if parts.hybrid:
        parts.hybrid.close()
    return build_rows(times), pieces


def measure_pieces(parts: Parts, world: World, step: Step, images: Batch) -> dict[str, float]:
    """CPU seconds of what instruments do, each by itself, on one thread beside a step on one thread."""
    idle, timeline = (Instruments(parts, world, _Nobody(), _Every(due)) for due in (CUTS, TIMELINE))
    slots = parts.rule.segments.split(parts.weights)

    def do_nothing() -> None:
        for _ in range(PIECE_TURNS):
            idle.begin_step(1)
            parts.clock.cut("forward")
            parts.clock.cut("backward")

    def draw() -> None:
        timeline.begin_step(TURN_STEPS - NUM_STEPS + 1)
        for _ in range(NUM_STEPS):
            for kind in KINDS:
                parts.clock.mark(kind)
        parts.clock.take()
        timeline.report(TURN_STEPS, images)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a thread's seconds are all there are then
    try:
        return {
            "a step": _time_cpu(lambda: step(images, 0.01, False)),
            "what every step pays, nothing being due": _time_cpu(do_nothing) / PIECE_TURNS,
            "norms of all layers, where the rule has none of its own": _time_cpu(
                lambda: [parts.rule.segments.norms(slots) for _ in range(2)]
            ),
            "a timeline": _time_cpu(draw),
        }
    finally:
        torch.set_num_threads(threads)


def _time_cpu(work: Callable[[], object]) -> float:
    """The median of a few."""
    seconds = []
    for _ in range(PIECE_ROUNDS):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return median(seconds)


def _take_turn(parts: Parts, step: Step, images: Batch, instruments: Instruments | None) -> tuple[float, float]:
    """Seconds a step of ten that end with a record, by the clock and of the CPU."""
    parts.clock.take()
    start, cpu_start = time.perf_counter(), time.process_time()
    for number in range(1, TURN_STEPS + 1):
        if instruments:
            instruments.begin_step(number)
        parts.clock.mark("input")
        step(images, 0.01, False)
        if number == TURN_STEPS:
            parts.clock.take()
            if instruments:
                instruments.report(number, images)
        parts.clock.mark("other")
    return (time.perf_counter() - start) / TURN_STEPS, (time.process_time() - cpu_start) / TURN_STEPS


def build_rows(times: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """The medians, each side against the turns without instruments."""
    often = {OFF: 0.0, CUTS: 1.0, LAYERS: MOST_MEASURED * TURN_STEPS / RUN_STEPS, TIMELINE: 2 * TURN_STEPS / RUN_STEPS}
    rows = []
    for side, turns in times.items():
        pairs = list(zip(turns, times[OFF], strict=True))
        ratio, cpu_ratio = (median(turn[i] / off[i] for turn, off in pairs) for i in (0, 1))
        step_s, cpu_s = (median(turn[i] for turn in turns) for i in (0, 1))
        rows.append(Row(side, step_s, ratio, cpu_s, cpu_ratio, (cpu_ratio - 1) * often[side]))
    return rows


def build_table(rows: Sequence[Row], title: str) -> Table:
    """The rows for people."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("instruments", no_wrap=True)
    for heading in ("ms a step", "ratio", "CPU ms", "CPU ratio", f"CPU of {RUN_STEPS:,} steps"):
        table.add_column(heading, justify="right")
    for row in rows:
        wall, cpu = (f"{1e3 * seconds:.2f}" for seconds in (row.step_s, row.cpu_s))
        share = f"{100 * row.cpu_share_of_run:+.2f} %"
        table.add_row(row.side, wall, f"{row.ratio:.4f}", cpu, f"{row.cpu_ratio:.4f}", share)
    return table
