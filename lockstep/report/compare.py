"""Runs beside each other, or benchmarks beside each other: what differs in settings and in results."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lockstep.errors import LockstepError
from lockstep.events import RunEnded, StepDone, read_events
from lockstep.files import read_small
from lockstep.report.history import History, number
from lockstep.report.page.charts import Numbers, tell_time
from lockstep.report.page.run_page import flatten
from lockstep.report.phrases import count, percent

LARGEST_FILE = 64 << 20  # bytes of a benchmark's rows
# What says which row of a benchmark is which; everything else in a row was measured, or is a remark.
IDENTITY = (
    *("case", "model", "network", "batch", "ranks", "topology", "precision", "side", "name", "pass", "way", "stage"),
    *("algorithm", "group_size", "bytes", "channels", "kind", "victim", "phase", "setting_name", "seed"),
)
NONE = "–"


@dataclass(frozen=True)
class Run:
    """One of several runs."""

    name: str
    history: History


@dataclass(frozen=True)
class Benchmark:
    """One of several files of rows."""

    name: str
    rows: list[dict[str, Any]]


def read_subjects(paths: Sequence[Path]) -> list[Run] | list[Benchmark]:
    """What is to be compared: runs by their folders or logs, or benchmarks by their JSON files."""
    if len(paths) < 2:
        raise LockstepError("A comparison needs at least two runs, or two JSON files of benchmarks.")
    are_files = [path.is_file() and path.suffix == ".json" for path in paths]
    if any(are_files) != all(are_files):
        raise LockstepError("Runs compare with runs and benchmarks with benchmarks; give only one kind.")
    names = _name_apart(paths)
    if all(are_files):
        return [Benchmark(name, read_rows(path)) for name, path in zip(names, paths, strict=True)]
    return [Run(name, History(read_events(path))) for name, path in zip(names, paths, strict=True)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a benchmark's JSON file."""
    try:
        rows = json.loads(read_small(path, LARGEST_FILE))
    except OSError as error:
        raise LockstepError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise LockstepError(f"{path} is no JSON; give a file that `lockstep bench … --json` wrote.") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise LockstepError(f"{path} holds no rows; give a file that `lockstep bench … --json` wrote.")
    return rows


def _name_apart(paths: Sequence[Path]) -> list[str]:
    """Short names, with a number where two are the same."""
    names: list[str] = []
    for path in paths:
        name = path.resolve().parent.name if path.name == "events.jsonl" else path.resolve().name
        names.append(name if name not in names else f"{name} ({sum(one.startswith(name) for one in names) + 1})")
    return names


def compare_settings(runs: Sequence[Run]) -> Numbers | None:
    """The settings that are not the same everywhere; None where all are."""
    flat = [flatten(run.history.start.config) for run in runs]
    for one, run in zip(flat, runs, strict=True):
        start = run.history.start
        one |= {"ranks": f"{start.world_size:,}", "device": start.device}
        one |= {f"version of {name}": str(version) for name, version in start.versions.items()}
    rows = _differing(flat)
    return Numbers(["setting", *(run.name for run in runs)], rows) if rows else None


def _differing(flat: Sequence[Mapping[str, str]]) -> list[list[str]]:
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [[name, *(one.get(name, NONE) for one in flat)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def compare_results(runs: Sequence[Run]) -> Numbers:
    """What came out, a row for each quantity that any of them has."""
    summaries = [run.history.summary for run in runs]
    reached = [one["best"]["top1"] for one in summaries if one["best"]]
    rows = [["status", *(str(one["status"]) for one in summaries)]]
    rows.append(_row("top-1", summaries, lambda one: one["top1"], percent))
    rows.append(_row("top-5", summaries, lambda one: one["top5"], percent))
    rows.append(_row("top-1, averaged weights", summaries, lambda one: one.get("average_top1"), percent))
    rows.append(_row("best top-1", summaries, lambda one: one["best"] and one["best"]["top1"], percent))
    if reached:
        goal = min(reached)
        rows.append(_row(f"time to {percent(goal)}", summaries, lambda one: _time_to(one, goal), tell_time))
    rows.append(_row("running time", summaries, lambda one: one["wall_s"], tell_time))
    rows.append(_row("steps", summaries, lambda one: one["steps"], lambda value: f"{value:,.0f}"))
    rows.append(_row("epochs", summaries, lambda one: one["epochs"], lambda value: f"{value:.4g}"))
    rows.append(_row("T, images/s", summaries, lambda one: one["T"], count))
    rows.append(_row("S, images/s of one rank", summaries, lambda one: one["S"], count))
    rows.append(_row("N, ranks", summaries, lambda one: one["N"], lambda value: f"{value:,.0f}"))
    rows.append(_row("e, efficiency", summaries, lambda one: one["e"], percent))
    steps = [_measure_step_ms(run.history) for run in runs]
    rows.append(["ms a step, median", *(NONE if value is None else f"{value:,.2f}" for value in steps)])
    for name, key in (("computing", "share_compute"), ("communication", "share_comm"), ("waiting", "share_input")):
        rows.append(_row(f"{name}, of the time", summaries, itemgetter(key), percent))
    energy = [_sum_energy(run.history) for run in runs]
    rows.append(["energy, kJ", *(NONE if value is None else count(value / 1e3) for value in energy)])
    shown = [row for row in rows if set(row[1:]) != {NONE}]
    return Numbers(["result", *(run.name for run in runs)], shown)


def _row(
    name: str, summaries: Sequence[Mapping[str, Any]], choose: Callable[[Any], object], show: Callable[[float], str]
) -> list[str]:
    values = [number(choose(one)) for one in summaries]
    return [name, *(NONE if value is None else show(value) for value in values)]


def _time_to(summary: Mapping[str, Any], goal: float) -> float | None:
    return next((point["wall_s"] for point in summary["time_to_accuracy"] if point["top1"] >= goal), None)


def _measure_step_ms(history: History) -> float | None:
    steps = [step.step_s for step in history.parts[-1] if isinstance(step, StepDone) and math.isfinite(step.step_s)]
    return statistics.median(steps) * 1e3 if steps else None


def _sum_energy(history: History) -> float | None:
    told = [energy for ended in history.all(RunEnded) if (energy := number(ended.energy_j)) is not None]
    return sum(told) if told else None


def compare_rows(benchmarks: Sequence[Benchmark]) -> list[tuple[str, str, list[float | None]]]:
    """(row, quantity, its value in each file) for everything measured in at least two of the files."""
    found: dict[tuple[str, str], list[float | None]] = {}
    counts: set[str] = set()  # quantities that are whole numbers, such as rounds: of interest where they differ
    for place, benchmark in enumerate(benchmarks):
        for position, row in enumerate(benchmark.rows):
            name = _identify(row, position)
            for quantity, value in row.items():
                if quantity in IDENTITY or isinstance(value, bool) or (measured := number(value)) is None:
                    continue
                counts |= {quantity} if isinstance(value, int) else set()
                values = found.setdefault((name, quantity), [None] * len(benchmarks))
                if values[place] is None:
                    values[place] = measured
    return [
        (name, quantity, values)
        for (name, quantity), values in found.items()
        if sum(value is not None for value in values) > 1 and not (quantity in counts and len(set(values)) == 1)
    ]


def _identify(row: Mapping[str, Any], position: int) -> str:
    """Which row it is, in words; its place where nothing says it."""
    told = [f"{key} {row[key]}" if isinstance(row[key], int) else str(row[key]) for key in IDENTITY if key in row]
    told = [part for part in told if part and part != "None"]
    return ", ".join(told) or f"row {position + 1}"


def tabulate_rows(benchmarks: Sequence[Benchmark]) -> Numbers:
    """Every quantity side by side, and how many times the first's the last's is."""
    rows = compare_rows(benchmarks)
    if not rows:
        raise LockstepError("These files have no row in common; compare files of the same benchmark.")
    heads = ["row", "quantity", *(benchmark.name for benchmark in benchmarks), "last / first"]
    table = []
    for name, quantity, values in rows:
        first, last = values[0], values[-1]
        ratio = f"{last / first:.3f}" if first and last is not None else NONE
        table.append([name, quantity, *(NONE if value is None else f"{value:,.5g}" for value in values), ratio])
    return Numbers(heads, table)


def build_rich(numbers: Numbers, title: str) -> Table:
    """The same table for a terminal; what a run says is printed as text, control characters left out."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold", pad_edge=False)
    for place, head in enumerate(numbers.heads):
        table.add_column(clean(head), justify="right" if place else "left", overflow="fold")
    for row in numbers.rows:
        table.add_row(*(Text(clean(cell), style="" if place else "cyan") for place, cell in enumerate(row)))
    return table


def clean(text: str) -> str:
    """Text that cannot steer a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
