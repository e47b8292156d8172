"""The planner beside reality: step times predicted for a virtual cluster, and measured on it.

One rank is profiled, by itself and on one thread, while all other cores compute by themselves, too: cores that are all
at work share caches, memory and clocks. It is watched once more where every core has two at work: what it loses beyond
its turns, and how unevenly its steps come. On each cluster, all-reduces are measured one by one; the
planner is told these, the profile and how many ranks share how many cores, and nothing of whole steps. The steps are
then measured, by the real program over a real network, in every setting of buffers and algorithm.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lockstep.bench.forecast_ranks import (
    CLASSES,
    QUIET,
    Case,
    Message,
    Setting,
    StepMeasured,
    build_lone_step,
    read_busy,
)
from lockstep.bench.results import check_files, write_rows
from lockstep.bench.virtual import VirtualCluster
from lockstep.comm.cost import Choice, Timing
from lockstep.comm.world import count_cores, join_world
from lockstep.engine.build import build_layout, build_network
from lockstep.engine.profiling import measure_batches
from lockstep.errors import LockstepError
from lockstep.layout import Layout
from lockstep.plan.choose import pick_choice
from lockstep.plan.device import BatchTime
from lockstep.plan.shared_cores import Cores, Crowd, Sum, share_cores
from lockstep.plan.simulate import StepParts, simulate

CUTS = (
    (0.5, True),
    (4.0, True),
    (4.0, False),
    (1024.0, False),
)  # MB of a buffer, and whether it is sent under backward
MOST_RANKS = 64
PROFILES = 5  # at most, each time, until one was taken while nobody else worked
WATCHED_S = 4.0  # of a rank among others


@dataclass(frozen=True)
class Row:
    """One setting on one cluster; `error` is predicted over measured, less one."""

    nodes: int
    ranks_per_node: int
    setting: str
    measured_s: float
    spread_s: float
    others: float  # what other programs had of the cores meanwhile, as a share
    predicted_s: float
    error: float
    compute_s: float  # as predicted, here and below
    exposed_s: float
    messages_s: float


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """`1x2,4x4` -> nodes and ranks per node of each."""
    try:
        shapes = [(int(nodes), int(ranks)) for nodes, ranks in (part.split("x") for part in text.split(","))]
    except ValueError:
        shapes = [(0, 0)]
    if any(nodes < 1 or ranks < 1 or not 2 <= nodes * ranks <= MOST_RANKS for nodes, ranks in shapes):
        raise LockstepError(f"--shapes {text} is no list of NODESxRANKS with 2 to {MOST_RANKS} ranks; write 1x2,4x4.")
    return shapes


def list_settings(nodes: int, ranks_per_node: int) -> list[Setting]:
    """Every cut by every all-reduce."""
    size = ranks_per_node if nodes > 1 else nodes * ranks_per_node
    names = ["flat", "doubling", *([f"hierarchical/{size}"] if size > 1 else [])]
    return [Setting(buffer_mb, name, overlap) for name in names for buffer_mb, overlap in CUTS]


def run(
    shapes: Sequence[tuple[int, int]],
    *,
    case: Case,
    gbit_per_s: float | None,
    rounds: int,
    patience_s: float,
    json_file: Path | None,
    console: Console,
) -> list[Row]:
    """Profile one rank, then measure and predict each cluster; prints a table."""
    check_files(json_file, None)
    profiles, crowds = [profile_alone(case)], [watch_crowd(case)]
    found: list[tuple[tuple[int, int], list[Message], list[StepMeasured]]] = []
    for nodes, ranks in shapes:
        with VirtualCluster.open(nodes, ranks, gbit_per_s) as cluster:
            console.print(cluster.describe(), highlight=False)
            found.append(
                ((nodes, ranks), *measure_cluster(cluster, case, list_settings(nodes, ranks), rounds, patience_s))
            )
        profiles.append(profile_alone(case))  # again and again, as a machine that others use changes
        crowds.append(watch_crowd(case))
    alone = sorted(profiles, key=lambda row: row.step_s)[(len(profiles) - 1) // 2]
    spread = [profile.step_s for profile in profiles]
    console.print(
        f"one rank, one thread, the other cores at work: {1e3 * alone.step_s:.1f} ms a step "
        f"({1e3 * min(spread):.1f} to {1e3 * max(spread):.1f} over {len(spread)} profiles)",
        highlight=False,
        soft_wrap=True,
    )
    crowd = Crowd(*(statistics.median(values) for values in zip(*map(astuple, crowds), strict=True)))
    console.print(
        f"two ranks on a core lose {100 * crowd.loss:.1f} % beyond their turns; steps vary by "
        f"{100 * crowd.jitter:.1f} %, and by {100 * crowd.turn_jitter:.1f} % in turns",
        highlight=False,
        soft_wrap=True,
    )
    layout = build_case_layout(case)
    rows = [
        build_row(shape, step, alone, crowd, messages, layout) for shape, messages, steps in found for step in steps
    ]
    console.print(build_table(rows))
    for line in describe_errors(rows):
        console.print(line, highlight=False, soft_wrap=True)
    if json_file is not None:
        write_rows(json_file, [asdict(row) for row in rows])
    return rows


def profile_alone(case: Case) -> BatchTime:
    """One rank on one thread, nothing sent, on a machine whose other cores compute the same; quiet, if that comes."""
    threads = torch.get_num_threads()
    found: list[tuple[float, BatchTime]] = []
    with join_world(None) as world, keep_company(case, count_cores() - 1) as company:
        torch.set_num_threads(1)
        alone = replace(world, num_threads=1)
        try:
            while len(found) < PROFILES and (not found or min(others for others, _ in found) > QUIET):
                start, cpu_start, busy_start = time.perf_counter(), _read_own(company), read_busy()
                row = measure_batches(case.build_config(1), alone, CLASSES, [case.batch])[0]
                own, busy = _read_own(company) - cpu_start, read_busy() - busy_start
                others = max(0.0, busy - own) / (count_cores() * (time.perf_counter() - start))
                found.append((others, row))
        finally:
            torch.set_num_threads(threads)
    return min(found, key=lambda each: each[0])[1]


def watch_crowd(case: Case) -> Crowd:
    """One rank on one thread, step by step: every core has one at work, then two."""
    threads = torch.get_num_threads()
    with join_world(None) as world:
        torch.set_num_threads(1)
        try:
            step = build_lone_step(case, replace(world, num_threads=1))
            seconds = []
            for each in (1, 2):  # on a core
                with keep_company(case, each * count_cores() - 1):
                    seconds.append(_watch_steps(step))
        finally:
            torch.set_num_threads(threads)
    alone, crowded = seconds
    return Crowd(
        loss=max(0.0, statistics.mean(crowded) / (2 * statistics.mean(alone)) - 1),
        jitter=statistics.stdev(alone) / statistics.mean(alone),
        turn_jitter=statistics.stdev(crowded) / statistics.mean(crowded),
    )


def _watch_steps(step: Callable[[], object]) -> list[float]:
    seconds: list[float] = []
    step()
    while sum(seconds) < WATCHED_S or len(seconds) < 3:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


@contextmanager
def keep_company(case: Case, count: int) -> Iterator[list[int]]:
    """While inside, so many other processes take steps of their own; gives their numbers."""
    code = f"from {__name__} import compute_on; compute_on()"
    argv = [sys.executable, "-c", code, json.dumps(asdict(case))]
    company = [subprocess.Popen(argv, stdout=subprocess.PIPE) for _ in range(max(0, count))]
    try:
        for process in company:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield [process.pid for process in company]
    finally:
        for process in company:
            process.kill()
            process.communicate()


def compute_on() -> None:
    """Take steps on one thread for as long as the parent lives."""
    case, parent = Case(**json.loads(sys.argv[1])), os.getppid()
    with join_world(None) as world:
        torch.set_num_threads(1)
        measure_batches(case.build_config(1), replace(world, num_threads=1), CLASSES, [case.batch])
        print("begun", flush=True)
        while os.getppid() == parent:
            measure_batches(case.build_config(1), replace(world, num_threads=1), CLASSES, [case.batch])


def _read_own(company: Sequence[int]) -> float:
    """Seconds of the processor that this process and its company have had."""
    ticks = 0
    for pid in company:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def build_case_layout(case: Case) -> Layout:
    """Where gradients lie: sizes and order of what is sent."""
    config = case.build_config(1)
    with torch.device("meta"):
        model: nn.Module = build_network(config, CLASSES)
    return build_layout(config, model)


def measure_cluster(
    cluster: VirtualCluster, case: Case, settings: Sequence[Setting], rounds: int, patience_s: float
) -> tuple[list[Message], list[StepMeasured]]:
    """What the ranks measure."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        options = {
            "case": asdict(case),
            "settings": [asdict(each) for each in settings],
            "rounds": rounds,
            "patience_s": patience_s,
            "file": str(file),
        }
        argv = [sys.executable, "-m", "lockstep.bench.forecast_ranks", json.dumps(options)]
        cluster.wait(cluster.start(argv, one_per_node=True))
        table: dict[str, Any] = json.loads(file.read_text())
    messages = [Message(**each) for each in table["messages"]]
    steps = [StepMeasured(Setting(**each.pop("setting")), **each) for each in table["steps"]]
    return messages, steps


def predict(
    setting: Setting, alone: BatchTime, messages: Sequence[Message], layout: Layout, cores: Cores
) -> tuple[StepParts, float]:
    """The planner's step, and the seconds of its messages alone."""
    choice = Choice.parse(setting.choice)
    own = [each for each in messages if each.choice == setting.choice]
    seconds = [Timing(choice, each.num_bytes, each.seconds) for each in own]
    cpu_s = [Timing(choice, each.num_bytes, max(each.cpu_s, 1e-9)) for each in own]
    plan = setting.plan(layout)
    sums = []
    for buffer in plan.buffers:
        took = pick_choice(seconds, buffer.num_bytes)[1]
        share = min(1.0, pick_choice(cpu_s, buffer.num_bytes)[1] / (took * cores.num_cores))
        ready_s = max(slot.ready_s for slot in alone.slots[buffer.first : buffer.last])
        sums.append(Sum(ready_s, took, share))
    costs = share_cores(alone, sums, cores, overlap=plan.overlap)
    return simulate(costs).parts, sum(each.seconds for each in sums)


def build_row(
    shape: tuple[int, int],
    step: StepMeasured,
    alone: BatchTime,
    crowd: Crowd,
    messages: Sequence[Message],
    layout: Layout,
) -> Row:
    """Predicted beside measured."""
    nodes, ranks = shape
    parts, messages_s = predict(step.setting, alone, messages, layout, Cores(nodes * ranks, count_cores(), crowd))
    return Row(
        nodes=nodes,
        ranks_per_node=ranks,
        setting=str(step.setting),
        measured_s=step.step_s,
        spread_s=step.spread_s,
        others=step.others,
        predicted_s=parts.step_s,
        error=parts.step_s / step.step_s - 1,
        compute_s=parts.forward_s + parts.backward_s + parts.update_s,
        exposed_s=parts.communicate_s,
        messages_s=messages_s,
    )


def describe_errors(rows: Sequence[Row]) -> list[str]:
    """How far off, on average and at worst: of all, and of those that nobody disturbed where they are not all."""
    quiet = [row for row in rows if row.others <= QUIET]
    lines = [f"{len(rows)} settings: {_describe_error(rows)}"]
    if quiet and len(quiet) < len(rows):
        share = f"others had at most {100 * QUIET:.0f} % of the cores"
        lines.append(f"the {len(quiet)} of them in which {share}: {_describe_error(quiet)}")
    return lines


def _describe_error(rows: Sequence[Row]) -> str:
    errors = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    return (
        f"predicted and measured differ by {100 * statistics.mean(errors):.1f} % on average, "
        f"{100 * statistics.median(errors):.1f} % in the middle and {100 * max(errors):.1f} % at worst "
        f"({worst.nodes}x{worst.ranks_per_node}, {worst.setting})"
    )


def build_table(rows: Sequence[Row]) -> Table:
    """A line for each setting, in milliseconds."""
    table = Table(box=None, pad_edge=False, header_style="bold", title="milliseconds of a step", title_justify="left")
    table.add_column("cluster", no_wrap=True)
    table.add_column("setting", no_wrap=True)
    for heading in ("measured", "others", "predicted", "error"):  # as many as fit 80 letters; the file has the rest
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.nodes}x{row.ranks_per_node}",
            row.setting,
            f"{1e3 * row.measured_s:.0f}",
            f"{100 * row.others:.0f} %",
            f"{1e3 * row.predicted_s:.0f}",
            f"{100 * row.error:+.0f} %",
        )
    return table
