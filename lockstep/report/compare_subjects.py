"""What is to be compared, by its path: a run's folder or log, a benchmark's JSON file, a sweep's folder or file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.events import LOG_NAME, read_events
from lockstep.files import read_small
from lockstep.report.compare_rows import RowFile, read_bench_row
from lockstep.report.compare_runs import Run
from lockstep.report.compare_sweeps import read_sweep
from lockstep.report.history import History

LARGEST_FILE = 64 << 20  # bytes of a file of rows
SWEEP = "sweep.json"


def read_subjects(paths: Sequence[Path]) -> list[Run] | list[RowFile]:
    """All of them, of one kind."""
    if len(paths) < 2:
        raise LockstepError("A comparison needs at least two runs, or two JSON files of benchmarks or sweeps.")
    subjects = [_read(name, path) for name, path in zip(_name_apart(paths), paths, strict=True)]
    first = subjects[0]
    for other in subjects:
        if other.kind != first.kind:
            raise LockstepError(
                f"{first.name} is a {first.kind} and {other.name} a {other.kind}; runs compare with runs, benchmarks "
                "with benchmarks and sweeps with sweeps: give only one kind."
            )
    runs = [one for one in subjects if isinstance(one, Run)]
    return runs or [one for one in subjects if isinstance(one, RowFile)]


def _read(name: str, path: Path) -> Run | RowFile:
    try:
        if path.is_dir() and (path / SWEEP).is_file() and not (path / LOG_NAME).exists():
            path /= SWEEP
        if path.suffix == ".json" and not path.is_dir():
            return _read_file(name, path)
        return Run(name, History(read_events(path)))
    except OSError as error:
        raise LockstepError(f"Cannot read {path}: {error.strerror}; check its permissions and disk.") from None


def _read_file(name: str, path: Path) -> RowFile:
    """A file of rows, known by its form: a benchmark's is a list, a sweep's a table of cells."""
    wanted = "give a file that `lockstep bench … --json` or `lockstep sweep` wrote"
    try:
        found: Any = json.loads(read_small(path, LARGEST_FILE))
    except (ValueError, RecursionError):
        raise LockstepError(f"{path} is no JSON; {wanted}.") from None
    if isinstance(found, dict) and "cells" in found:
        return read_sweep(name, path, found)
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise LockstepError(f"{path} holds no rows; {wanted}.")
    return RowFile(name, "benchmark", [read_bench_row(row, position) for position, row in enumerate(found)])


def _name_apart(paths: Sequence[Path]) -> list[str]:
    """Short names: the folder's in front where two are the same, and a number where that is the same, too."""
    whole = [path.resolve() for path in paths]
    whole = [path.parent if path.name in (LOG_NAME, SWEEP) else path for path in whole]
    short = [path.name for path in whole]
    longer = [path.name if short.count(path.name) == 1 else f"{path.parent.name}/{path.name}" for path in whole]
    names: list[str] = []
    for place, name in enumerate(longer):
        times = longer[: place + 1].count(name)
        names.append(name if times == 1 else f"{name} ({times})")
    return names
