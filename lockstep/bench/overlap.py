"""How much of the network's time a step hides, on one GPU with a stand-in for the network (`standin.py`).

The plan is measured and chosen as before any run: executions and reductions together. Then the four ways that matter
take turns: recorded with nothing to send, the step launched one by one with overlap, the recording that sends after its
backward pass, and the recording that overlaps. A timeline of the last shows when each buffer was full and when it was
sent, by the device's own clock.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lockstep.bench.results import check_files, write_rows
from lockstep.bench.standin import StandIn
from lockstep.bench.torchvision_peers import CLASSES, IMAGE_SIZE, LR, MOMENTUM, WEIGHT_DECAY
from lockstep.bench.turns import time_steps
from lockstep.comm.fusion import ReductionPlan
from lockstep.comm.reducer import Sent
from lockstep.comm.topology import Link
from lockstep.comm.world import World, join_world
from lockstep.config import CommConfig, DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.data.pipeline import Batch
from lockstep.engine.apply import Step, apply_execution, apply_reduction, build_launched
from lockstep.engine.build import Parts, assemble, build_network, set_number_formats
from lockstep.engine.measure import fake_batch
from lockstep.engine.planning import Chosen, choose_plan
from lockstep.engine.recorded import RecordedStep
from lockstep.errors import LockstepError
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import explain_choice, pick_trial, propose_reductions
from lockstep.plan.plan import Execution
from lockstep.plan.profile import Profile
from lockstep.report.phrases import describe_trials

TUNE_S = 20.0
TURN_STEPS = 20
ALONE, LAUNCHED, AFTER, OVERLAP = "recorded, nothing sent", "launched, overlap", "recorded, after", "recorded, overlap"
LANE_WIDTH = 72


@dataclass(frozen=True)
class Row:
    """One way at one batch size."""

    model: str
    batch: int
    way: str
    step_s: float
    spread_s: float
    images_per_second: float
    ratio: float  # its step's time over that of the recording that overlaps
    buffers: int
    network_s: float  # that all sums of a step took
    hidden_share: float | None  # of what can be hidden, by the timeline; of the recording that overlaps alone
    gained_share: float | None  # the same by step times: what is sent beside kernels also slows them down
    timeline: list[dict[str, float]]  # of each buffer: full, begun, done, seconds after backward began


def run(
    *, model: str, batches: Sequence[int], link: Link, rounds: int, console: Console, json_file: Path | None = None
) -> None:
    """Measure every batch size; print tables and timelines, write the rows."""
    check_files(json_file, None)
    if not torch.cuda.is_available():
        raise LockstepError("`bench overlap` needs a GPU, and this machine shows none.")
    rows: list[Row] = []
    with join_world(None) as world:
        for batch in batches:
            rows += measure(model, batch, link, rounds, world, console)
            if json_file is not None:
                write_rows(json_file, [asdict(row) for row in rows])
    console.print(build_table(rows))


def measure(model: str, batch: int, link: Link, rounds: int, world: World, console: Console) -> list[Row]:
    """The four ways at one batch size, in turns."""
    config = _configure(model, batch)
    set_number_formats(config.precision)
    standin = StandIn(world.device, link)
    schedule = Schedule("constant", LR, total_steps=1)
    parts = assemble(config, world, build_network(config, CLASSES), schedule, hybrid=standin)
    chosen = choose_plan(config, parts, world)
    console.print(f"{model}, batch {batch}:", highlight=False)
    for line in describe_trials(explain_choice(chosen.profile.trials), batch):
        console.print(line, highlight=False, soft_wrap=True)
    images = fake_batch(config, world)
    ways = _build_ways(config, parts, chosen, images)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (step, reduction) in ways.items():
            apply_reduction(reduction, parts)
            times[name].append(_time(step, images, parts, muted=name == ALONE))
    timeline = _draw_timeline(config, parts, ways[OVERLAP][1], images)
    parts.reducer.close()
    standin.close()
    rows = _build_rows(model, batch, times, {name: plan for name, (_, plan) in ways.items()}, timeline)
    for line in draw_lanes(timeline):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return rows


def _configure(model: str, batch: int) -> RunConfig:
    return RunConfig(
        data=DataConfig(image_size=IMAGE_SIZE),
        model=ModelConfig(name=model),
        optim=OptimConfig(name="lars", lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        precision=PrecisionConfig(compute="fp16"),
        comm=CommConfig(algorithm="flat", tune_s=TUNE_S),
        train=TrainConfig(global_batch=batch, duration="1ep", max_batch_per_rank=batch),  # type: ignore[arg-type]
    )


def _build_ways(
    config: RunConfig, parts: Parts, chosen: Chosen, images: Batch
) -> Mapping[str, tuple[Step, ReductionPlan]]:
    """Each way with the reduction that served it best in the trials."""
    count, kernels = len(images.labels), chosen.plan.execution.kernels
    ways: dict[str, tuple[Step, ReductionPlan]] = {}
    for name, recorded, overlap in ((LAUNCHED, False, True), (AFTER, True, False), (OVERLAP, True, True)):
        execution = Execution(kernels, recorded)
        reduction = _pick_reduction(config, parts, chosen.profile, execution, overlap)
        apply_reduction(reduction, parts)
        apply_execution(execution, parts)
        if recorded:
            step = RecordedStep(parts, count, count, _fail)
            step.prepare(images)
            ways[name] = (step, reduction)
        else:
            ways[name] = (build_launched(parts, count), reduction)
    with parts.reducer.muted():
        alone = RecordedStep(parts, count, count, _fail)
        alone.prepare(images)
    ways[ALONE] = (alone, parts.reducer.plan)
    return ways


def _fail(text: str) -> None:
    raise LockstepError(text)


def _pick_reduction(
    config: RunConfig, parts: Parts, profile: Profile, execution: Execution, overlap: bool
) -> ReductionPlan:
    """The reduction that was quickest with an execution in the trials, among those that overlap or do not."""
    (step,) = (step for step in profile.steps if step.execution == execution)
    ready_s = [slot.ready_s for slot in step.slots]
    proposed = propose_reductions(config.comm, parts.layout, ready_s, profile.messages)
    fitting = {rule: plan for rule, plan in proposed.items() if plan.overlap == overlap}
    best = pick_trial([t for t in profile.trials if t.execution == execution and t.rule in fitting])
    if best is None:
        raise LockstepError(f"The step {execution} could not be measured with buffers sent this way, as said above.")
    return fitting[best.rule]


def _time(step: Step, images: Batch, parts: Parts, *, muted: bool) -> float:
    """Seconds a step over one turn."""

    def take() -> None:
        step(images, 0.0, False)

    if muted:
        with parts.reducer.muted():
            return time_steps(take, TURN_STEPS)
    return time_steps(take, TURN_STEPS)


def _draw_timeline(config: RunConfig, parts: Parts, reduction: ReductionPlan, images: Batch) -> list[Sent]:
    """When each buffer of a recorded step was full, and when its sum began and ended."""
    assert parts.hybrid is not None
    apply_reduction(reduction, parts)
    parts.hybrid.channel.times = True
    with parts.reducer.watching() as watch:
        step = RecordedStep(parts, len(images.labels), len(images.labels), _fail)
        step.prepare(images)
        for _ in range(3):
            step(images, 0.0, False)
        torch.cuda.synchronize()
        return watch.sent_s()


def ideal_exposed_s(timeline: Sequence[Sent]) -> float:
    """Seconds that these sums must outlast the backward pass, each begun the moment it can be."""
    done = 0.0
    for sent in timeline:
        done = max(done, sent.full_s) + sent.done_s - sent.begun_s
    return done - timeline[-1].full_s


def share_hidden(timeline: Sequence[Sent], exposed_s: float) -> float:
    """How much of what can be hidden is hidden, when the network keeps a step waiting for `exposed_s`."""
    network_s = sum(sent.done_s - sent.begun_s for sent in timeline)
    return (network_s - exposed_s) / (network_s - ideal_exposed_s(timeline))


def _build_rows(
    model: str,
    batch: int,
    times: Mapping[str, list[float]],
    plans: Mapping[str, ReductionPlan],
    timeline: Sequence[Sent],
) -> list[Row]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    network_s = sum(sent.done_s - sent.begun_s for sent in timeline)
    rows = []
    for name, values in times.items():
        quartiles = statistics.quantiles(values, n=4)
        ratios = [theirs / ours for theirs, ours in zip(values, times[OVERLAP], strict=True)]
        is_overlap = name == OVERLAP
        rows.append(
            Row(
                model=model,
                batch=batch,
                way=name,
                step_s=medians[name],
                spread_s=quartiles[2] - quartiles[0],
                images_per_second=batch / medians[name],
                ratio=statistics.median(ratios),
                buffers=0 if name == ALONE else len(plans[name].buffers),
                network_s=network_s if is_overlap else 0.0,
                hidden_share=share_hidden(timeline, timeline[-1].done_s - timeline[-1].full_s) if is_overlap else None,
                gained_share=share_hidden(timeline, medians[OVERLAP] - medians[ALONE]) if is_overlap else None,
                timeline=[sent._asdict() for sent in timeline] if is_overlap else [],
            )
        )
    return rows


def build_table(rows: Sequence[Row]) -> Table:
    """A line for each way."""
    table = Table(box=None, header_style="bold")
    for column in ("way", "batch", "ms", "images/s", "ratio", "buffers", "network", "hidden", "gained"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.way,
            str(row.batch),
            f"{row.step_s * 1e3:.2f}",
            f"{row.images_per_second:,.0f}",
            f"{row.ratio:.2f}",
            str(row.buffers),
            f"{row.network_s * 1e3:.2f} ms" if row.network_s else "",
            *("" if share is None else f"{100 * share:.0f} %" for share in (row.hidden_share, row.gained_share)),
        )
    table.caption = (
        "ratio: to the recording that overlaps. Of what can be hidden of the network's time: hidden by the timeline, "
        "gained by step times, in which kernels are also slowed down by what is sent beside them."
    )
    return table


def draw_lanes(timeline: Sequence[Sent]) -> list[str]:
    """The backward pass above, one lane for each buffer's sum below it; | marks where the buffer was full."""
    end = max(sent.done_s for sent in timeline)

    def column(seconds: float) -> int:
        return min(LANE_WIDTH, round(LANE_WIDTH * seconds / end))

    passed = column(timeline[-1].full_s)
    lines = [f"  backward  {'=' * passed:{LANE_WIDTH}}  {timeline[-1].full_s * 1e3:.2f} ms"]
    for number, sent in enumerate(timeline):
        lane = [" "] * (LANE_WIDTH + 1)
        for place in range(column(sent.begun_s), column(sent.done_s)):
            lane[place] = "#"
        lane[column(sent.full_s)] = "|"
        times = f"full {sent.full_s * 1e3:.2f}, sent {sent.begun_s * 1e3:.2f} to {sent.done_s * 1e3:.2f}"
        lines.append(f"  buffer {number:<2} {''.join(lane)} {times}")
    return lines
