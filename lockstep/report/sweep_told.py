"""What a sweep's `sweep.json` tells of trials whose own folders are gone, as on a machine that it was carried to.

A row has every setting of its trial, those that all rows share beside them, and a hash of the labels it was trained on:
from these `sweeps.py` sees whether it is the trial that is asked for now. Nothing in the file is trusted.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.config import SECTIONS, RunConfig
from lockstep.files import read_small
from lockstep.recipes.sweep_file import TO_TARGET, SweepFile
from lockstep.recipes.trials import Trial
from lockstep.report.history import number
from lockstep.report.sweep_rows import Row

MAX_BYTES = 64 << 20  # of a file that tells of the most trials there can be
GOOD = ("finished", "diverged")  # what a trial need not be run again after
NUMBERS = [field.name for field in fields(Row) if field.name not in ("trial", "status", "reason")]


@dataclass(frozen=True)
class Told:
    """One trial that need not be run again."""

    row: Mapping[str, Any]
    config: RunConfig
    ranks: object
    labels: str  # a hash of those it was trained on; empty where nobody knows
    has_target: bool  # whether it says when the target that is asked for now was reached

    def make_row(self, trial: Trial) -> Row:
        known = {key: number(self.row.get(key)) for key in NUMBERS if self.has_target or key not in TO_TARGET}
        return Row(trial, self.row["status"], str(self.row.get("reason", ""))[:1000], **known)


def read_told(path: Path, sweep: SweepFile) -> dict[str, Told]:
    """The trials that need not be run again, by folder."""
    found: Any = None
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_small(path, MAX_BYTES))
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        return {}
    shared = found.get("settings")
    asked = (sweep.target, sweep.measure == "average_top1")
    has_target = (number(found.get("target")), found.get("measure") == "average_top1") == asked
    told: dict[str, Told] = {}
    for row in found["rows"]:
        if not isinstance(row, dict) or row.get("status") not in GOOD:
            continue
        config = _build_config(shared, row.get("settings"))
        if config and isinstance(folder := row.get("folder"), str):
            labels = row.get("labels")
            told[folder] = Told(row, config, row.get("ranks"), labels if isinstance(labels, str) else "", has_target)
    return told


def _build_config(*parts: object) -> RunConfig | None:
    """The configuration that settings by their whole names make; None for what is none, or of another version."""
    tables: dict[str, dict[str, Any]] = {"optim": {}, "train": {}}
    for part in parts:
        if not isinstance(part, dict):
            return None
        for name, value in part.items():
            section, _, key = name.partition(".")
            tables.setdefault(section, {})[key] = value
    with suppress(ValidationError, RecursionError):
        return RunConfig.model_validate(tables)
    return None


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every setting by its whole name, as JSON has it."""
    tables = config.model_dump(mode="json", include=set(SECTIONS))
    return {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}


def split_settings(configs: Mapping[str, RunConfig]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings that all trials share, and by folder the others of each."""
    tables = {folder: flatten(config) for folder, config in configs.items()}
    first = next(iter(tables.values()), {})
    shared = {key: value for key, value in first.items() if all(table[key] == value for table in tables.values())}
    own = {folder: {key: table[key] for key in table if key not in shared} for folder, table in tables.items()}
    return shared, own
