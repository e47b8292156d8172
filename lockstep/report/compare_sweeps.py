"""A sweep's `sweep.json` as rows to compare: one for each cell at each point of the grid. Nothing in it is trusted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import LockstepError
from lockstep.recipe_values import show
from lockstep.recipes.sweep_file import TO_TARGET
from lockstep.report.compare import NONE
from lockstep.report.compare_rows import Measured, Row, RowFile
from lockstep.report.history import number
from lockstep.report.quantities import SHARES

MOST_CELLS = 5000  # as many as a sweep may have trials
MOST_SETTINGS = 500
LONGEST_NAME = 500  # characters of a cell's name, or of a setting with its value
MEASURES = ("top1", *TO_TARGET, "images_per_second", "memory_bytes", "wall_s")

Kind = TypeVar("Kind")


def read_sweep(name: str, path: Path, table: Mapping[str, Any]) -> RowFile:
    """The rows of a sweep; LockstepError for what no sweep has written."""
    try:
        cells: list[Any] = _take(table, "cells", list, "it has no list of cells")
        _require(0 < len(cells) <= MOST_CELLS, f"its cells are not 1 to {MOST_CELLS:,}")
        _require(all(isinstance(cell, dict) for cell in cells), "a cell is no table")
        words = _find_words(table)
        rows = [Row(_identify(cell), _read_measures(cell, words)) for cell in cells]
        facts = _list_facts(table)
        for row, cell in zip(rows, cells, strict=True):
            facts[f"best of {', '.join(row.identity)}"] = _phrase_settings(cell.get("best"))
    except ValueError as error:
        raise LockstepError(f"{path} is not as `lockstep sweep` wrote it: {error}; run the sweep again.") from None
    return RowFile(name, "sweep", rows, facts)


def _require(is_so: bool, fault: str) -> None:
    if not is_so:
        raise ValueError(fault)


def _take(table: Mapping[str, Any], key: str, kind: type[Kind], fault: str) -> Kind:
    found = table.get(key)
    if not isinstance(found, kind):
        raise ValueError(fault)
    return found


def _find_words(table: Mapping[str, Any]) -> dict[str, str]:
    """What each measure is called: sweeps judged by another accuracy, or with another target, have others in common."""
    measure, target = _take(table, "measure", str, "it has no measure"), table.get("target")
    _require(measure in (*SHARES, *TO_TARGET), "its measure is unknown")
    _require(target is None or number(target) is not None, "its target is no number")
    words = {key: key for key in MEASURES}
    words["top1"] = measure if measure in SHARES else "top1"
    for key in TO_TARGET:
        words[key] = f"{key.removesuffix('_to')} to {_phrase_target(target)}"
    return words


def _phrase_target(target: object) -> str:
    goal = number(target)
    return NONE if goal is None else f"{100 * goal:g} %"


def _identify(cell: Mapping[str, Any]) -> tuple[str, ...]:
    name = _take(cell, "cell", str, "a cell has no name")
    point: dict[str, Any] = _take(cell, "point", dict, "a cell has no point of the grid")
    told = (*([name] if name else []), *_name_settings(point))
    _require(all(len(part) <= LONGEST_NAME for part in told), "a cell's name or setting is too long")
    return told or ("all",)


def _name_settings(settings: Mapping[str, Any]) -> list[str]:
    """Settings by the last part of their names, or by the whole where two have the same."""
    tails = [key.rpartition(".")[2] for key in settings]
    return [
        f"{tail if tails.count(tail) == 1 else key} {_show(value)}"
        for tail, (key, value) in zip(tails, settings.items(), strict=True)
    ]


def _show(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.4g}" if isinstance(value, float) else show(value)


def _read_measures(cell: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Measured]:
    seeds: list[Any] = _take(cell, "seeds", list, "a cell has no seeds")
    measures = {}
    for key, called in words.items():
        found: dict[str, Any] = _take(cell, key, dict, f"a cell has no {key}")
        mean, deviation, count = (_read_number(found.get(part), key) for part in ("mean", "deviation", "count"))
        if mean is not None:
            note = f" ({count:.0f} of {len(seeds)})" if count is not None and count < len(seeds) else ""
            measures[called] = Measured(mean, deviation, note)
    if (failed := _read_number(cell.get("bad"), "bad")) is not None:
        measures["bad"] = Measured(failed, is_count=True)
    return measures


def _read_number(value: object, key: str) -> float | None:
    found = number(value)
    _require(value is None or found is not None, f"{key} of a cell is no number")
    return found


def _list_facts(table: Mapping[str, Any]) -> dict[str, str]:
    told = {key: table.get(key) for key in ("recipe", "measure", "commit")}
    facts = {key: value[:LONGEST_NAME] for key, value in told.items() if isinstance(value, str) and value}
    settings = table.get("set", [])  # which sweeps of older versions did not tell
    _require(isinstance(settings, list) and all(isinstance(one, str) for one in settings), "its settings are no text")
    pairs = (setting[:LONGEST_NAME].partition("=") for setting in settings[:MOST_SETTINGS])
    return facts | {"target": _phrase_target(table.get("target"))} | {key: value for key, _, value in pairs}


def _phrase_settings(best: object) -> str:
    _require(best is None or isinstance(best, dict), "the best settings of a cell are no table")
    return ", ".join(_name_settings(best))[:LONGEST_NAME] if isinstance(best, dict) and best else NONE
