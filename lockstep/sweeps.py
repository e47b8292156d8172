"""A sweep: trials one after the other in this process, or one on each GPU at a time (docs/sweeps.md).

Each trial is a run in a folder of its own, and leaves word there of how it ended (`report/sweep_rows.py`); `sweep.json`
tells of those whose folders are gone (`report/sweep_told.py`). Nothing else is remembered: whoever finds a trial of
which neither tells takes it, or goes on with it. So the same command goes on with a sweep, on another machine too, and
several processes share one by taking hold of trials, each by a lock.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lockstep.commit import read_commit
from lockstep.config import DataConfig, RunConfig, to_toml
from lockstep.engine.starting import PATHS, go_on, is_begun, list_changes, make_absolute, settle_like
from lockstep.errors import Diverged, LockstepError
from lockstep.files import write_whole
from lockstep.named import phrase_error
from lockstep.processes import LAUNCHER
from lockstep.recipes.read import load_recipe
from lockstep.recipes.sweep_file import SweepFile, read_sweep
from lockstep.recipes.trials import Trial, confirm, plan_trials
from lockstep.report.page.sweep_page import build_sweep_page
from lockstep.report.phrases import clock, percent
from lockstep.report.sweep_rows import Row, Status, choose_best, read_row, to_json, write_word
from lockstep.report.sweep_told import GOOD, Told, read_told, split_settings

if TYPE_CHECKING:
    from lockstep.engine.reuse import Kept

TABLE = "sweep.json"  # in the sweep's folder
LABELS = {"source", "path", "val_share"}  # settings of the data that decide which labels there are
CLAIMS = ".claims"  # locks on trials, in the sweep's folder
ENOUGH = 2  # places where trials failed for one reason, and nothing else yet, end a sweep
LOOK_S = 0.5  # between two looks at what other processes have done
Say = Callable[[str], None]


@dataclass
class Sweep:
    """A sweep and what is known of it so far."""

    name: str
    file: SweepFile
    recipe: str
    root: Path
    trials: list[Trial]  # of the first stage
    words: list[str]  # the command that goes on with it
    told: dict[str, Told] = field(default_factory=dict)  # what its sweep.json told when it was opened, by folder
    kept: "Kept | None" = None  # of the trials in this process
    _settled: dict[str, Row] = field(default_factory=dict)  # rows, by folder
    _configs: dict[str, RunConfig] = field(default_factory=dict)
    _labels: dict[str, str] = field(default_factory=dict)  # hashes, by the settings of the data

    def row(self, trial: Trial) -> Row:
        """What is known of a trial."""
        found = self._settled.get(trial.folder) or read_row(self.root, trial, self.file)
        if not found.is_settled and (told := self.told.get(trial.folder)):
            self.follow(trial, told.config, f"{self.root / TABLE} tells of {trial.folder}", told.ranks)
            found = told.make_row(trial)
        if found.is_settled:
            self._settled[trial.folder] = found
        return found

    def config(self, trial: Trial) -> RunConfig:
        """What a trial is asked to do."""
        if trial.folder not in self._configs:
            self._configs[trial.folder] = make_absolute(load_recipe(self.recipe, trial.settings)[1])
        return self._configs[trial.folder]

    def follow(self, trial: Trial, known: RunConfig, where: str, ranks: object = None) -> RunConfig:
        """What is `known` of a trial, by the paths that are asked for now; refused if its settings are another's."""
        asked = settle_like(self.config(trial), known)
        moved = follow_paths(known, asked, is_same=self._is_same_data(known.data, asked.data))
        changes = list_changes(moved, asked)
        if ranks not in (None, trial.ranks):
            changes.append(f"ranks was {str(ranks)[:20]} and is {trial.ranks}")
        if changes:
            raise LockstepError(f"{where} with other settings: {'; '.join(changes)}. Choose another --out.")
        return moved

    def _is_same_data(self, known: DataConfig, asked: DataConfig) -> bool:
        """Whether a folder of images is the one that lay elsewhere, by its labels.

        One that is not here is as good as the same: nobody can be trained on another.
        """
        if known.path == asked.path:
            return True
        key = known.model_dump_json(include=LABELS)
        alike = (told for told in self.told.values() if told.config.data.model_dump_json(include=LABELS) == key)
        labels = next((told.labels for told in alike), "")
        return bool(labels) and self._hash_labels(asked) in (labels, "")

    def _hash_labels(self, data: DataConfig) -> str:
        """What tells one folder of images from another wherever it lies; empty where there is none."""
        from lockstep.data.sources import hash_labels
        from lockstep.engine.build import open_sources

        key = data.model_dump_json(include=LABELS)
        if data.source != "folder" or not Path(data.path).exists():
            return ""
        if key not in self._labels:
            open_now = partial(open_sources, data)
            source = (self.kept.open_sources(data, open_now) if self.kept else open_now()).train
            self._labels[key] = hash_labels(source.classes, source.labels)
        return self._labels[key]

    def find_labels(self, trial: Trial) -> str:
        """A hash of the labels that a trial was trained on; empty where nobody knows."""
        told = self.told.get(trial.folder)
        return self._hash_labels(self.config(trial).data) or (told.labels if told else "")

    def places(self) -> list[list[Trial]]:
        """The trials of each cell at each point; behind those of a first stage that is over, the second's."""
        groups: dict[str, list[Trial]] = {}
        for trial in self.trials:
            groups.setdefault(trial.place, []).append(trial)
        return [[*group, *self._second(group)] for group in groups.values()]

    def _second(self, group: Sequence[Trial]) -> list[Trial]:
        rows = [self.row(trial) for trial in group]
        best = choose_best(rows, self.file.measure) if all(row.is_settled for row in rows) else None
        return confirm(best, self.file.confirm) if best else []

    def rows(self) -> list[Row]:
        """Every trial there is so far."""
        return [self.row(trial) for group in self.places() for trial in group]

    @property
    def num_trials(self) -> int:
        """All trials, those of a second stage too that are not known yet."""
        groups = self.places()
        second_to_come = [
            not group[-1].is_confirming and not all(self.row(trial).is_settled for trial in group) for group in groups
        ]
        return sum(map(len, groups)) + len(self.file.confirm) * sum(second_to_come)

    def settle(self, trial: Trial, status: Status, reason: str = "") -> Row:
        """Note how a trial ended, on disk where that can be written."""
        try:
            write_word(self.root / trial.folder, status, reason)
        except OSError as error:
            reason = reason or f"{self.root / trial.folder} cannot be written ({error.strerror})"
            self._settled[trial.folder] = replace(Row(trial), status="failed", reason=reason)
        return self.row(trial)

    def phrase_go_on(self) -> str:
        done = sum(row.is_settled for row in self.rows())
        return f"{done} of {self.num_trials} trials are done; go on with: {shlex.join(self.words)}"


def open_sweep(path: Path, out: Path | None, settings: Sequence[str]) -> Sweep:
    """Read a sweep file, and see that each of its trials can be started or gone on with."""
    file, recipe = read_sweep(path)
    trials = plan_trials(file, recipe, settings)
    root = out or Path("runs") / path.stem
    words = ["lockstep", "sweep", str(path), *(["--out", str(out)] if out else [])]
    words += [word for setting in settings for word in ("--set", setting)]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LockstepError(f"The sweep's folder {root} cannot be written ({error.strerror}).") from None
    sweep = Sweep(path.stem, file, recipe, root, trials, words, read_told(root / TABLE, file))
    for row in sweep.rows():  # whose settings must be those that are asked for now
        check_folder(sweep, row.trial)
    return sweep


def check_folder(sweep: Sweep, trial: Trial) -> None:
    """See that a trial's folder, if there is one, holds that trial, and give it the paths of this machine."""
    folder = sweep.root / trial.folder
    if not is_begun(folder):
        return
    known = go_on(folder, []).config
    moved = sweep.follow(trial, known, f"{folder} holds a run")
    if moved != known:
        _write(folder / "config.toml", to_toml(moved))


def follow_paths(known: RunConfig, asked: RunConfig, is_same: bool) -> RunConfig:
    """`known` with the paths of `asked`: of the data if it `is_same`, of files by the same name."""
    for section, _, key in (path.partition(".") for path in PATHS):
        table, now = getattr(known, section), getattr(getattr(asked, section), key)
        if is_same if key == "path" else Path(getattr(table, key)).name == Path(now).name:
            known = known.model_copy(update={section: table.model_copy(update={key: now})})
    return known


def retry_failed(sweep: Sweep) -> None:
    """Forget what failed for outside causes; what diverged would again."""
    for row in sweep.rows():
        if row.status == "failed":
            with suppress(OSError):
                (sweep.root / row.trial.folder / "trial.json").unlink()
            sweep._settled.pop(row.trial.folder, None)


def work(sweep: Sweep, say: Say, turn: int = 0, kept: "Kept | None" = None) -> bool:
    """Take trials until all are settled; False if asked to stop. Several processes begin at other places by `turn`."""
    from lockstep.engine.reuse import Kept

    kept = sweep.kept = kept or Kept()
    begun, num_taken = time.monotonic(), 0
    while True:
        places = sweep.places()
        turned = places[turn % len(places) :] + places[: turn % len(places)]
        is_new = False
        for group in turned:
            trial = next((one for one in group if not sweep.row(one).is_settled and claim(sweep, one)), None)
            if trial is None:
                continue
            is_new = True
            row = take(sweep, trial, kept)
            release(sweep, trial)
            if row is None:
                return False
            num_taken += 1
            say(_phrase(sweep, row, (time.monotonic() - begun) / num_taken))
            prune(sweep, trial)
            refuse_to_go_on(sweep, row)
            break  # to the same place again, or to its second stage: its parts are still there
        if not is_new:
            if all(row.is_settled for row in sweep.rows()):
                return True
            time.sleep(LOOK_S)  # others have the rest in hand; what they find may open a second stage


def refuse_to_go_on(sweep: Sweep, last: Row) -> None:
    """End a sweep all of whose trials failed alike so far, unless at one place of several, which may be at fault."""
    settled = [row for row in sweep.rows() if row.is_settled]
    if any((row.status, row.reason) != ("failed", last.reason) for row in settled):
        return
    num_places = len({trial.place for trial in sweep.trials})
    if len(settled) >= ENOUGH and len({row.trial.place for row in settled}) >= min(ENOUGH, num_places):
        raise LockstepError(f"All {len(settled)} trials so far failed alike, and so would the others: {last.reason}")


_claims: dict[str, int] = {}  # open locks, by trial


def claim(sweep: Sweep, trial: Trial) -> bool:
    """Take hold of a trial; False where another process has it."""
    from lockstep.engine.owner import lock_folder

    try:
        _claims[trial.folder] = lock_folder(sweep.root / CLAIMS / trial.folder)
    except LockstepError:
        return False
    sweep._settled.pop(trial.folder, None)
    if read_row(sweep.root, trial, sweep.file).is_settled:  # by whoever had it until now
        release(sweep, trial)
        return False
    return True


def release(sweep: Sweep, trial: Trial) -> None:
    os.close(_claims.pop(trial.folder))


def take(sweep: Sweep, trial: Trial, kept: "Kept") -> Row | None:
    """Run one trial to its end, or go on with it; None if somebody asked to stop."""
    from lockstep.api import Asked, carry_out

    folder = sweep.root / trial.folder
    asked = Asked(sweep.recipe, trial.settings, folder, "auto", trial.ranks, quiet=True)
    try:
        ended = carry_out(asked, is_guest=True, kept=kept if trial.ranks == "1" else None)
    except KeyboardInterrupt:
        return None
    except Diverged as error:
        return sweep.settle(trial, "diverged", str(error))
    except LockstepError as error:
        kept.forget_parts()  # whatever a run has left half done
        return sweep.settle(trial, "failed", str(error))
    except Exception as error:
        kept.forget_parts()
        if "CUDA error" in str(error):  # after which this process can use the device no more
            raise LockstepError(
                f"The GPU failed in {trial.folder} ({phrase_error(error)}). {sweep.phrase_go_on()}"
            ) from error
        return sweep.settle(trial, "failed", phrase_error(error))
    return sweep.settle(trial, "finished") if ended.outcome == "finished" else None


def prune(sweep: Sweep, trial: Trial) -> None:
    """Remove the checkpoints that nobody will ask for, once a place is through."""
    if sweep.file.checkpoints == "all":
        return
    group = next(group for group in sweep.places() if group[0].place == trial.place)
    rows = [sweep.row(one) for one in group]
    if not all(row.is_settled for row in rows):
        return
    best = choose_best(rows, sweep.file.measure) if sweep.file.checkpoints == "best" else None
    for one in group:
        if best is None or one.number != best.number:
            shutil.rmtree(sweep.root / one.folder / "checkpoints", ignore_errors=True)


def _phrase(sweep: Sweep, row: Row, mean_s: float, num_workers: int = 1) -> str:
    """A line on a trial that has ended."""
    done = sum(one.is_settled for one in sweep.rows())
    accuracy = row.average_top1 if sweep.file.measure == "average_top1" else row.top1
    result = f"top-1 {percent(accuracy)}" if accuracy is not None else f"{row.status}: {row.reason}"
    took = f" in {clock(row.wall_s)}" if row.wall_s is not None else ""
    left = (sweep.num_trials - done) * mean_s / num_workers
    return f"{done} of {sweep.num_trials}, about {clock(left)} left: {row.trial.phrase()}: {result}{took}"


def write_table(sweep: Sweep) -> Path:
    """`sweep.json`, as far as trials are done: all that the same command needs elsewhere to go on."""
    rows = sweep.rows()
    done = [row.trial for row in rows if row.status in GOOD]  # the others are tried again
    shared, own = split_settings({trial.folder: sweep.config(trial) for trial in done})
    known = {one.folder: {"settings": own[one.folder], "labels": sweep.find_labels(one)} for one in done}
    text = to_json(sweep.name, sweep.file, rows, read_commit(), shared, known)
    return _write(sweep.root / TABLE, f"{text}\n")


def write_results(sweep: Sweep) -> list[Path]:
    """The table and the page, as far as trials are done."""
    page = build_sweep_page(sweep.name, sweep.file, sweep.rows(), read_commit())
    return [write_table(sweep), _write(sweep.root / "sweep.html", page)]


def _write(path: Path, text: str) -> Path:
    try:
        write_whole(path, text)
    except OSError as error:
        raise LockstepError(f"Cannot write {path}: {error.strerror}.") from None
    return path


def list_gpus() -> list[str]:
    """The GPUs of this machine that may be used, by the names that CUDA knows them by."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [name.strip() for name in named.split(",")][:count] if named else [str(place) for place in range(count)]


def take_share(turn: int, num_workers: int) -> None:
    """Let this process keep to its part of the cores, so that as many as GPUs do not all want all."""
    if num_workers > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[turn::num_workers]
        if cores:
            os.sched_setaffinity(0, cores)


def spread_over(sweep: Sweep, devices: Sequence[str], say: Say) -> bool:
    """Share a sweep among processes, one for each GPU; False if asked to stop."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *sweep.words, f"--worker={turn}/{len(devices)}"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": device, LAUNCHER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C reaches this process, which passes it on, once
        )
        for turn, device in enumerate(devices)
    ]
    begun = time.monotonic()
    known = {row.trial.folder for row in sweep.rows() if row.is_settled}
    num_before = len(known)
    with _ended_with(processes), _passing_signals(processes) as signals:
        while any(process.poll() is None for process in processes):
            time.sleep(LOOK_S)
            for row in sweep.rows():
                if row.is_settled and row.trial.folder not in known:
                    known.add(row.trial.folder)
                    say(_phrase(sweep, row, (time.monotonic() - begun) / (len(known) - num_before)))
    is_done = all(row.is_settled for row in sweep.rows())
    if not is_done and not signals:
        raise LockstepError(f"The processes of this sweep ended before it did. {sweep.phrase_go_on()}")
    return is_done


@contextmanager
def _ended_with(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """The processes are over at the end, whatever comes up."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def _passing_signals(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[list[int]]:
    """While inside, a signal asks all processes to stop, and the second ends them; yields those that came."""
    came: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        for process in processes:
            process.send_signal(signal.SIGTERM if len(came) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
