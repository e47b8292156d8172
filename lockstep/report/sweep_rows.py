"""What came of a sweep: a row for each trial, and for each place of its table the best of them (docs/sweeps.md)."""

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from lockstep.files import read_small, write_whole
from lockstep.recipe_values import show
from lockstep.recipes.sweep_file import TO_TARGET, SweepFile
from lockstep.recipes.trials import Trial
from lockstep.report.compare import NONE, build_rich
from lockstep.report.history import number
from lockstep.report.page.charts import Numbers

GIB = 1 << 30
MAX_BYTES = 1 << 20  # of a summary, or of a trial's last word
WORD = "trial.json"  # in a trial's folder: how it ended
Status = Literal["pending", "finished", "diverged", "failed"]


@dataclass(frozen=True)
class Row:
    """What one trial gave; None is what it did not reach."""

    trial: Trial
    status: Status = "pending"
    reason: str = ""
    top1: float | None = None
    average_top1: float | None = None  # of the averaged weights, or of the weights of a trial without an average
    best_top1: float | None = None
    steps_to: float | None = None
    epochs_to: float | None = None
    images_to: float | None = None
    seconds_to: float | None = None  # from the first step on, with evaluations
    steps: float | None = None
    images_per_second: float | None = None
    memory_bytes: float | None = None  # of a GPU
    wall_s: float | None = None

    @property
    def is_settled(self) -> bool:
        return self.status != "pending"


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, and how far they lie apart."""

    mean: float | None
    deviation: float | None  # of a sample; None for less than two
    count: int  # seeds that have a value
    asked: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread":
        known = [value for value in values if value is not None]
        mean = statistics.fmean(known) if known else None
        return cls(mean, statistics.stdev(known) if len(known) > 1 else None, len(known), len(values))

    def phrase(self, factor: float = 1.0, digits: int = 2) -> str:
        """92.31 ± 0.12; with the share of seeds where some have no value."""
        if self.mean is None:
            return NONE
        text = f"{factor * self.mean:,.{digits}f}"
        text += f" ± {factor * self.deviation:,.{digits}f}" if self.deviation is not None else ""
        return text + (f" ({self.count} of {self.asked})" if self.count < self.asked else "")


@dataclass(frozen=True)
class Place:
    """One cell at one point of the grid."""

    cell: str
    point: tuple[tuple[str, Any], ...]
    num_trials: int  # that competed
    num_bad: int  # runs among them that diverged or failed
    best: Trial | None
    is_confirmed: bool  # whether the numbers are of other seeds than those that chose the best
    seeds: tuple[int, ...]
    accuracy: Spread
    steps_to: Spread
    epochs_to: Spread
    images_to: Spread
    seconds_to: Spread
    images_per_second: Spread
    memory_bytes: Spread
    wall_s: Spread


def write_word(folder: Path, status: Status, reason: str = "") -> None:
    """Leave in a trial's folder how it ended; OSError where that cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WORD, json.dumps({"status": status, "reason": reason}, ensure_ascii=False) + "\n")


def read_row(root: Path, trial: Trial, sweep: SweepFile) -> Row:
    """What a trial has left in its folder; nothing in it is trusted."""
    word = _read(root / trial.folder / WORD)
    status = word.get("status")
    if status not in ("finished", "diverged", "failed"):
        return Row(trial)
    summary = _read(root / trial.folder / "summary.json")
    best = summary.get("best")
    steps, epochs = number(summary.get("steps")), number(summary.get("epochs"))
    reached, wall_s = _find_reached(summary, sweep)
    epochs_to = reached * epochs / steps if reached is not None and steps and epochs else None
    startup_s = None if summary.get("resumed") else number(summary.get("startup_s"))
    num_train = number(summary.get("num_train"))
    is_good = status == "finished"
    return Row(
        trial,
        status,
        str(word.get("reason", ""))[:1000],
        top1=number(summary.get("top1")) if is_good else None,
        average_top1=number(summary.get("average_top1", summary.get("top1"))) if is_good else None,
        best_top1=number(best.get("top1")) if is_good and isinstance(best, dict) else None,
        steps_to=reached,
        epochs_to=epochs_to,
        images_to=None if epochs_to is None or num_train is None else epochs_to * num_train,
        seconds_to=None if wall_s is None or startup_s is None else wall_s - startup_s,
        steps=steps,
        images_per_second=number(summary.get("images_per_second")),
        memory_bytes=number(summary.get("memory_bytes")),
        wall_s=number(summary.get("wall_s")),
    )


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_small(path, MAX_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


def _find_reached(summary: Mapping[str, Any], sweep: SweepFile) -> tuple[float | None, float | None]:
    """Step and seconds of the first evaluation that reached the target."""
    points = summary.get("time_to_accuracy")
    if sweep.measure == "average_top1":
        points = summary.get("average_time_to_accuracy", points)
    for point in points if sweep.target is not None and isinstance(points, list) else ():
        if isinstance(point, dict) and (top1 := number(point.get("top1"))) is not None and top1 >= (sweep.target or 0):
            return number(point.get("step")), number(point.get("wall_s"))
    return None, None


def choose_best(rows: Sequence[Row], measure: str) -> Trial | None:
    """The trial of one place whose draw did best by the mean over its seeds; None while no draw has ended well.

    Where the measure is a target that none has reached, accuracy decides; the first of equals wins.
    """
    draws: dict[int, list[Row]] = {}
    for row in rows:
        if not row.trial.is_confirming:
            draws.setdefault(row.trial.number, []).append(row)
    scores: dict[int, tuple[float, float]] = {}
    for key, draw in draws.items():
        values = [getattr(row, measure) for row in draw]
        accuracies = [row.top1 for row in draw if row.top1 is not None]
        if len(accuracies) < len(draw):  # a seed diverged: such settings are not for a recommendation
            continue
        reached = all(value is not None for value in values)
        score = statistics.fmean(values) if reached else float("inf") if measure in TO_TARGET else float("-inf")
        scores[key] = (-score if measure in TO_TARGET else score, statistics.fmean(accuracies))
    if not scores:
        return None
    return draws[max(scores, key=lambda key: (scores[key], -key))][0].trial


def find_places(rows: Sequence[Row], measure: str) -> list[Place]:
    """The table of a sweep, in the order of its trials."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.trial.place, []).append(row)
    return [_judge(group, measure) for group in groups.values()]


def _judge(rows: Sequence[Row], measure: str) -> Place:
    first = rows[0].trial
    best = choose_best(rows, measure)
    confirming = [row for row in rows if row.trial.is_confirming and row.is_settled]
    own = [row for row in rows if best and not row.trial.is_confirming and row.trial.number == best.number]
    counted = confirming or own
    accuracy = "top1" if measure in TO_TARGET else measure
    told = (accuracy, *TO_TARGET, "images_per_second", "memory_bytes", "wall_s")
    return Place(
        first.cell,
        first.point,
        len({row.trial.number for row in rows if not row.trial.is_confirming}),
        sum(row.status in ("diverged", "failed") for row in rows),
        best,
        bool(confirming),
        tuple(row.trial.seed for row in counted),
        *(Spread.of([getattr(row, key) for row in counted]) for key in told),
    )


def tabulate(sweep: SweepFile, places: Sequence[Place]) -> Numbers:
    """The table that a terminal and the page show."""
    keys = list(sweep.grid)
    heads = ["cell", *(key.rpartition(".")[2] for key in keys), "trials", "bad", "best settings", "seeds", "top-1, %"]
    if sweep.target is not None:
        heads += [f"{unit} to {100 * sweep.target:g} %" for unit in ("steps", "epochs", "seconds")]
    has_memory = any(place.memory_bytes.mean is not None for place in places)
    heads += ["images/s", "seconds a run", *(["GiB of a GPU"] if has_memory else [])]
    rows = []
    for place in places:
        row = [place.cell, *(show_value(value) for _, value in place.point), str(place.num_trials), str(place.num_bad)]
        row += [phrase_settings(place.best), ", ".join(map(str, place.seeds)) or NONE, place.accuracy.phrase(100)]
        if sweep.target is not None:
            row += [
                place.steps_to.phrase(digits=0),
                place.epochs_to.phrase(digits=1),
                place.seconds_to.phrase(digits=1),
            ]
        row += [_phrase_mean(place.images_per_second), _phrase_mean(place.wall_s, digits=1)]
        row += [_phrase_mean(place.memory_bytes, 1 / GIB, digits=1)] if has_memory else []
        rows.append(row)
    return Numbers(heads, rows)


def _phrase_mean(spread: Spread, factor: float = 1.0, digits: int = 0) -> str:
    return NONE if spread.mean is None else f"{factor * spread.mean:,.{digits}f}"


def phrase_settings(trial: Trial | None) -> str:
    """What was drawn for a trial; a dash where nothing was."""
    if trial is None or not trial.drawn:
        return NONE
    return ", ".join(f"{key.rpartition('.')[2]} {show_value(value)}" for key, value in trial.drawn)


def show_value(value: object) -> str:
    """A setting's value as tables of a sweep have it."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else show(value)


def build_table(sweep: SweepFile, places: Sequence[Place], name: str) -> Table:
    """The same for a terminal."""
    return build_rich(tabulate(sweep, places), name)


def to_json(
    name: str,
    sweep: SweepFile,
    rows: Sequence[Row],
    commit: str,
    shared: Mapping[str, Any] | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """All of a sweep's results, as `sweep.json` holds them.

    `shared` are the settings of all trials; their `own`, by folder, are what else `sweep_told.py` knows each by.
    """
    places = find_places(rows, sweep.measure)
    return json.dumps(
        {
            "sweep": name,
            "commit": commit,
            "recipe": sweep.recipe,
            "measure": sweep.measure,
            "target": sweep.target,
            "set": _list_shared(rows),
            "cells": [
                {
                    "cell": place.cell,
                    "point": dict(place.point),
                    "trials": place.num_trials,
                    "bad": place.num_bad,
                    "best": dict(place.best.drawn) if place.best else None,
                    "folder": place.best.folder if place.best else None,
                    "confirmed": place.is_confirmed,
                    "seeds": place.seeds,
                    **{
                        key: {"mean": spread.mean, "deviation": spread.deviation, "count": spread.count}
                        for key, spread in (
                            ("top1", place.accuracy),
                            ("steps_to", place.steps_to),
                            ("epochs_to", place.epochs_to),
                            ("images_to", place.images_to),
                            ("seconds_to", place.seconds_to),
                            ("images_per_second", place.images_per_second),
                            ("memory_bytes", place.memory_bytes),
                            ("wall_s", place.wall_s),
                        )
                    },
                }
                for place in places
            ],
            "settings": shared or {},
            "rows": [_to_table(row) | dict((own or {}).get(row.trial.folder, {})) for row in rows],
        },
        indent=1,
        ensure_ascii=False,
    )


def _list_shared(rows: Sequence[Row]) -> list[str]:
    """The settings, as key=value, that all trials have."""
    others = [set(row.trial.settings) for row in rows]
    return [setting for setting in (rows[0].trial.settings if rows else ()) if all(setting in one for one in others)]


def _to_table(row: Row) -> dict[str, Any]:
    trial = row.trial
    told = {"cell": trial.cell, "point": dict(trial.point), "trial": trial.number, "seed": trial.seed}
    told |= {"confirms": trial.is_confirming, "drawn": dict(trial.drawn), "ranks": trial.ranks, "folder": trial.folder}
    return told | {key: value for key, value in vars(row).items() if key != "trial"}
