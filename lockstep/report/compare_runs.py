"""Runs beside each other: what differs in settings and in results."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.events import RunEnded, StepDone
from lockstep.report.compare import NONE, head_changes, list_differing, tell_changes
from lockstep.report.history import History, number
from lockstep.report.page.charts import Numbers, tell_time
from lockstep.report.page.run_page import flatten
from lockstep.report.phrases import brief, count, percent


@dataclass(frozen=True)
class Run:
    """One of several runs."""

    name: str
    history: History
    kind: str = "run"


class Result(NamedTuple):
    """One line of the table of results."""

    name: str
    choose: Callable[[Run], object]  # what is no number is left out
    show: Callable[[float], str]
    is_share: bool = False  # differs by points, not by a factor


def compare_settings(runs: Sequence[Run]) -> Numbers | None:
    """The settings that are not the same everywhere; None where all are."""
    flat = [flatten(run.history.start.config) for run in runs]
    for one, run in zip(flat, runs, strict=True):
        start = run.history.start
        one |= {"ranks": f"{start.world_size:,}", "device": start.device}
        one |= {f"version of {name}": str(version) for name, version in start.versions.items()}
    rows = list_differing(flat)
    return Numbers(["setting", *(run.name for run in runs)], rows) if rows else None


def compare_results(runs: Sequence[Run]) -> Numbers:
    """What came out, a row for each quantity that any of them has, and how each run's differs from the first's."""
    rows = []
    for result in _list_results(runs):
        values = [number(result.choose(run)) for run in runs]
        if any(value is not None for value in values):
            shown = [NONE if value is None else result.show(value) for value in values]
            rows.append([result.name, *shown, *tell_changes(values, result.is_share)])
    names = [run.name for run in runs]
    return Numbers(["result", *names, *head_changes(names)], rows)


def split_changes(results: Numbers, num_runs: int) -> list[Numbers]:
    """Of two runs one table; of more, what came out and how it differs apart: no screen is as wide as both."""
    if num_runs < 3:
        return [results]
    first, *others = results.heads[1 : 1 + num_runs]
    values = Numbers(results.heads[: 1 + num_runs], [row[: 1 + num_runs] for row in results.rows])
    changes = [[row[0], *row[1 + num_runs :]] for row in results.rows]
    told = [row for row in changes if set(row[1:]) != {NONE}]
    return [values, Numbers([results.heads[0], *others], told, caption=f"Against {first}")]


def list_status(runs: Sequence[Run]) -> list[str]:
    """How each run ended."""
    return ["predicted" if run.history.is_predicted else str(run.history.summary["status"]) for run in runs]


def _list_results(runs: Sequence[Run]) -> list[Result]:
    results = [
        Result("top-1", _tell("top1"), percent, is_share=True),
        Result("top-5", _tell("top5"), percent, is_share=True),
        Result("top-1, averaged weights", _tell("average_top1"), percent, is_share=True),
        Result("best top-1", _find_best, percent, is_share=True),
    ]
    reached = [best for run in runs if (best := number(_find_best(run)))]  # none right is reached by every run
    if reached:
        goal = min(reached)
        results.append(Result(f"time to {percent(goal)}", lambda run: _time_to(run.history.summary, goal), tell_time))
    return [
        *results,
        Result("running time", _tell("wall_s"), tell_time),
        Result("steps", _tell("steps"), lambda value: f"{value:,.0f}"),
        Result("epochs", _tell("epochs"), brief),
        Result("T, images/s", _tell("T"), count),
        Result("S, images/s of one rank", _tell("S"), count),
        Result("N, ranks", _tell("N"), lambda value: f"{value:,.0f}"),
        Result("e, efficiency", _tell("e"), percent, is_share=True),
        Result("ms a step, median", lambda run: _measure_step_ms(run.history), lambda value: f"{value:,.2f}"),
        Result("computing, of the time", _tell("share_compute"), percent, is_share=True),
        Result("communication and waiting for other ranks, of the time", _tell("share_comm"), percent, is_share=True),
        Result("waiting for input, of the time", _tell("share_input"), percent, is_share=True),
        Result("energy, kJ", lambda run: _sum_energy_kj(run.history), count),
    ]


def _tell(key: str) -> Callable[[Run], object]:
    return lambda run: run.history.summary.get(key)


def _find_best(run: Run) -> object:
    best = run.history.summary["best"]
    return best and best["top1"]


def _time_to(summary: Mapping[str, Any], goal: float) -> float | None:
    return next((point["wall_s"] for point in summary["time_to_accuracy"] if point["top1"] >= goal), None)


def _measure_step_ms(history: History) -> float | None:
    steps = [step.step_s for step in history.parts[-1] if isinstance(step, StepDone) and math.isfinite(step.step_s)]
    return statistics.median(steps) * 1e3 if steps else None


def _sum_energy_kj(history: History) -> float | None:
    told = [energy for ended in history.all(RunEnded) if (energy := number(ended.energy_j)) is not None]
    return sum(told) / 1e3 if told else None
