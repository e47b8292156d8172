"""Start or go on: which run a command means, by what name and with what settings (step 0 on the walk). Torch-free.

A run's folder says itself how it was started: its configuration is `config.toml`, with paths that hold from any
directory, and the name of its recipe is in the first record of its log.
"""

import contextlib
import errno
import json
import os
import shlex
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.config import KEYS, SECTIONS, RunConfig
from lockstep.errors import LockstepError
from lockstep.events import LOG_NAME, RunStarted, decode, list_full_parts
from lockstep.files import read_small
from lockstep.recipe_values import show
from lockstep.recipes.read import is_packaged, load_recipe
from lockstep.restarts import count_restarts, is_started_by_agent, name_job, read_agent_start

Resume = Literal["no", "yes", "auto"]

# Settings that may be files or folders of this machine.
PATHS = ("data.path", "comm.cluster", "model.weights")
MAX_SUMMARY_BYTES = 1 << 20
MAX_LINE_BYTES = 4 << 20  # of a log, where it is looked through for a name
MAX_LINES = 100  # before the record that opens a run come a few notices at most
STAMP = "%Y%m%d-%H%M%S"
CLOCK_S = 1.0  # by which a file system's clock may differ from the machine's

_num_unnamed: Counter[str] = Counter()  # runs of this process whose folder nobody gave, by that folder's name


@dataclass(frozen=True)
class Start:
    """What a command means."""

    name: str  # of the recipe
    folder: Path
    config: RunConfig
    resume: bool


def plan_start(target: str, settings: list[str], out: Path | None, resume: Resume) -> Start:
    """The run to start, or to go on with: on a resume with the configuration it was started with, and `settings`."""
    if out is not None:
        check_name(out)
    if resume == "auto":
        return _start_or_go_on(target, settings, out)
    if resume == "yes":
        return go_on(out or (Path(target) if os.path.isdir(target) else find_last_run(target)), settings)
    if out is None:
        if not is_packaged(target) and is_begun(Path(target)):
            raise LockstepError(
                f"{target} is a run's folder; add --resume to go on with it, or --out to start another run with its "
                "configuration."
            )
        return _start_in_job(target, settings)
    if is_begun(out) and _is_own(out):
        return go_on(out, settings)
    return start_anew(target, settings, out)


def start_anew(target: str, settings: list[str], out: Path | None) -> Start:
    """A new run of a recipe."""
    name, wanted = load_recipe(target, settings)
    folder = out or Path("runs") / f"{name}-{time.strftime(STAMP)}"
    return Start(name, folder, make_absolute(wanted), resume=False)


def go_on(folder: Path, settings: list[str]) -> Start:
    """A run that is there already."""
    if not is_begun(folder):
        raise LockstepError(
            phrase_unconfigured(folder)
            if has_log(folder)
            else f"{folder} is not a run's folder, so there is nothing to resume; start without --resume."
        )
    _, wanted = load_recipe(str(folder), settings)
    return Start(read_recipe_name(folder), folder, make_absolute(wanted), resume=True)


def _start_in_job(target: str, settings: list[str]) -> Start:
    """A run whose folder nobody gave: one that may be started again has its job's name, and is found by that alone."""
    dated = start_anew(target, settings, None)
    job, restarts = name_job(os.environ), count_restarts(os.environ)
    if not job and restarts:
        raise LockstepError(
            f"This run of {dated.name} was started again, and nothing tells which folder under runs/ is its own; give "
            "--out, and it goes on by itself."
        )
    if not job:
        return dated
    name = f"{dated.name}-{job}"
    _num_unnamed[name] += 1
    # A program that trains several times does so in the same order when it is started again.
    number = f"-{_num_unnamed[name]}" if _num_unnamed[name] > 1 else ""
    start = replace(dated, folder=Path("runs") / f"{name}{number}")
    if not is_begun(start.folder):
        return start
    if _is_own(start.folder):
        return _go_on_alike(start, "Give --out.")
    # The next command of a Slurm job starts another run. Under torchrun it may be this one: a node that has joined it
    # does not know of it, and where no rank does, the folder is refused, as one of another job by the same name.
    return dated if job.startswith("slurm") and not restarts else start


def _is_own(folder: Path) -> bool:
    """Whether the run in a folder is the one that these ranks were started for before.

    torchrun's agent does not count that it has started them again because a node has come, and it starts them again
    where another's folder was refused: what tells is whether the run was begun, or gone on with, under this agent.
    """
    started_s = read_agent_start() if is_started_by_agent(os.environ) else 0.0
    return not _is_older(folder, started_s) if started_s else count_restarts(os.environ) > 0


def _is_older(folder: Path, when_s: float) -> bool:
    """Whether a run was begun, or last gone on with, before that time."""
    return (folder / "config.toml").stat().st_mtime < when_s - CLOCK_S


def _start_or_go_on(target: str, settings: list[str], out: Path | None) -> Start:
    """The same command every time: what it asks for must be what the run was started with."""
    folder = out or Path(target)
    if out is None and not is_begun(folder):
        raise LockstepError("--resume=auto needs --out, the folder to start the run in and to find it in again.")
    start = start_anew(target, settings, folder)
    if not is_begun(folder):
        return start
    known = shlex.quote(str(folder))
    return _go_on_alike(
        start, f"Go on with these by lockstep train {known} --resume and --set, or choose another --out."
    )


def _go_on_alike(start: Start, advice: str) -> Start:
    """The run in a folder, if it was started with the settings that are asked for."""
    before = go_on(start.folder, [])
    if changes := list_changes(before.config, settle_like(start.config, before.config)):
        raise LockstepError(f"{start.folder} holds a run with other settings: {'; '.join(changes)}. {advice}")
    return before


def settle_like(asked: RunConfig, known: RunConfig) -> RunConfig:
    """`asked` with what a run has settled on wherever `asked` leaves that to the run, and `known` says it."""
    changed: dict[str, Any] = {}
    if asked.precision.compute == "auto" != known.precision.compute:
        changed["precision"] = asked.precision.settle(known.precision.compute)
    if not asked.train.max_batch_per_rank and known.train.max_batch_per_rank and not asked.train.accumulate:
        changed["train"] = asked.train.model_copy(update={"max_batch_per_rank": known.train.max_batch_per_rank})
    return asked.model_copy(update=changed)


def is_begun(folder: Path) -> bool:
    """Whether a run has left its configuration in a folder."""
    return os.path.isfile(folder / "config.toml")  # of a name that no folder can have it says no, where pathlib raises


def check_name(folder: Path) -> None:
    """Refuse a name that no folder can have."""
    try:
        os.lstat(folder)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise LockstepError(
                f"--out is too long for a folder's name ({len(os.fsencode(folder)):,} bytes); choose a shorter one."
            ) from None


def has_log(folder: Path) -> bool:
    """Whether a run has left its log in a folder, or only the log's full parts."""
    return any(folder.glob("events*.jsonl"))


def find_last_run(target: str) -> Path:
    """The newest run of a recipe under runs/."""
    name, _ = load_recipe(target)
    patterns = ("[0-9]*-[0-9]*", "job-*", "slurm-*")
    files = [file for pattern in patterns for file in Path("runs").glob(f"{name}-{pattern}/config.toml")]
    runs = [file.parent for file in sorted(files, key=lambda file: _date(file, name))]
    if not runs:
        raise LockstepError(f"No run of {name} lies under runs/; start without --resume, or give --out.")
    # One that ended before its first checkpoint is gone on with only if there is no other.
    return next((run for run in reversed(runs) if any(run.glob("checkpoints/step-*/manifest.json"))), runs[-1])


def _date(file: Path, name: str) -> str:
    """When a run was started, by its folder's name; one that has its job's name, by its configuration's age."""
    date = file.parent.name.removeprefix(f"{name}-")
    return date if date[0].isdigit() else time.strftime(STAMP, time.localtime(file.stat().st_mtime))


def make_absolute(config: RunConfig) -> RunConfig:
    """The same with paths that hold from any directory; a name that is no file here stays as it is."""
    changed: dict[str, Any] = {}
    for section, _, key in (path.partition(".") for path in PATHS if path in KEYS):
        table = changed.get(section, getattr(config, section))
        given = getattr(table, key)
        path = Path(given).expanduser().absolute()
        if given and (key == "path" or path.exists()):
            changed[section] = table.model_copy(update={key: str(path)})
    return config.model_copy(update=changed)


def list_changes(before: RunConfig, now: RunConfig) -> list[str]:
    """What differs between two configurations, setting by setting."""
    was, wanted = (_flatten(tree) for tree in (before, now))
    return [f"{key} was {show(was[key])} and is {show(wanted[key])}" for key in wanted if was[key] != wanted[key]]


def _flatten(config: RunConfig) -> dict[str, object]:
    """Every setting by its whole name."""
    tables = {name: getattr(config, name) for name in SECTIONS}
    return {f"{name}.{key}": getattr(table, key) for name, table in tables.items() for key in type(table).model_fields}


def read_recipe_name(folder: Path) -> str:
    """The recipe that a run was started from, as its log's first record has it; else the folder's own name."""
    log = folder / LOG_NAME
    for part in (*list_full_parts(log), log):
        with contextlib.suppress(OSError, TypeError, ValueError):
            if part.is_file() and (name := _find_name(part)):
                return name
    return folder.absolute().name


def _find_name(part: Path) -> str:
    """The recipe in the first record of a file that opens a run; empty where none of its first lines does."""
    with part.open(encoding="utf-8", errors="replace") as file:
        for _ in range(MAX_LINES):
            event = decode(file.readline(MAX_LINE_BYTES))
            if isinstance(event, RunStarted):
                return event.recipe
    return ""


def has_finished(folder: Path) -> bool:
    """Whether a run has said its last word, which is its summary; one killed before that has it still to say."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return bool(json.loads(read_small(folder / "summary.json", MAX_SUMMARY_BYTES))["status"] == "finished")
    return False


def phrase_finished(folder: Path) -> str:
    """What there is to say of a run that may be finished, and is."""
    return f"{folder} is finished, and nothing is left to do; a longer train.duration goes on with it."


def phrase_unconfigured(folder: Path) -> str:
    """What there is to say of a folder that can be neither gone on with nor started in."""
    return (
        f"{folder} holds a run whose config.toml is missing; put that back and add --resume, or choose another --out."
    )


def phrase_last_good(checkpoint: Path | None) -> str:
    """The end of a sentence on a run that diverged: where to go on once it is put right."""
    return (
        f"go on from the last good checkpoint, {checkpoint}, with --resume." if checkpoint else "start the run again."
    )


def phrase_go_on(folder: Path, ranks: str | None, restarts: int = 0, log: str = "") -> str:
    """The command that goes on with a run; without `ranks` others start them, and know how."""
    words = ["lockstep", "train", str(folder), "--resume"]
    words += ["--ranks", ranks] if ranks else []
    words += ["--restarts", str(restarts)] if restarts else []
    words += ["--log", log] if log else []
    return f"{'' if ranks else 'started as before, with: '}{shlex.join(words)}"
