"""An image folder → tar shards with an index: what `shards.py` reads.

Samples lie in the shards in a mixed order, for readers that take them as they come, and keep their numbers in the
index: a run sees them in the folder's order. Which file goes into which shard follows from the folder and the settings
alone, and so does every byte written. Shards are written aside and renamed, so a pack that was killed goes on with the
shards not yet there.
"""

import fcntl
import hashlib
import json
import os
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.data.index import Index, Settings, join_indexes, read_index, write_index
from lockstep.data.order import PACK_ORDER, mix
from lockstep.data.parquet import ParquetImages, holds_parquet, open_parquet
from lockstep.data.plain_files import READ_TIMEOUT_S, measure_plain, read_plain
from lockstep.data.record import BLOCK, FRAME_BYTES
from lockstep.data.shard_writer import Packable, ShardJob, cannot_write, write_shard
from lockstep.data.shards import SPLITS, WORK_FOLDER, index_path, is_packed, open_shards
from lockstep.data.sources import ImageFolder, open_folder
from lockstep.data.threads import DaemonPool, Steps, disk_hangs, look
from lockstep.data.webdataset import find_tars, refuse_compressed
from lockstep.data.workers import Progress, run_jobs
from lockstep.errors import LockstepError

NAMED = 20  # bad files that a sentence names
NOTE = "settings.json"  # in the work folder: what an unfinished pack was begun with
STAT_FILES = 4096  # files looked at by one thread at a time
STAT_THREADS = 16  # they only wait, for a disk that may be far away


def clean(text: str) -> str:
    """A text of one line that moves no cursor, whatever names of files are in it; what is no UTF-8 stays as it is."""
    return "".join(letter if letter.isprintable() or "\ud800" <= letter <= "\udfff" else " " for letter in text)


@contextmanager
def _clean_sentences() -> Iterator[None]:
    """What went wrong inside in words that can be printed."""
    try:
        yield
    except LockstepError as error:
        if (text := clean(str(error))) == str(error):
            raise
        raise LockstepError(text) from error


@_clean_sentences()
def pack_folder(
    source: Path,
    target: Path,
    *,
    shard_mb: float = 256.0,
    short_side: int = 0,
    quality: int = 90,
    skip_bad: bool = False,
    decode: bool = False,
    shuffle: bool = True,
    val_share: float = 0.0,
    workers: int = 1,
    read_timeout_s: float = READ_TIMEOUT_S,
    progress: Callable[[str], Progress] = lambda title: lambda done, total: None,
    say: Callable[[str], object] = lambda note: None,
) -> list[Index]:
    """Pack both splits of an image folder, or of a set in Parquet, and return their indexes.

    A finished pack is left as it is. `short_side` 0 keeps every file's bytes, `decode` decodes each image to see that
    it is whole. `progress` makes a display of (samples done, total) from a title; `say` is told what the folder holds
    beside its images. Names in what it says, raises and returns are fit for a terminal.
    """
    look(partial(_refuse_places, source, target), read_timeout_s)
    folders = open_packable(source, read_timeout_s, val_share)
    for note in (note for folder in folders for note in folder.notes):
        say(clean(note))
    sizes = [
        measure_sizes(folder, progress(f"Looking at {split}"), read_timeout_s)
        for folder, split in zip(folders, SPLITS, strict=True)
    ]
    settings: dict[str, float | str] = {
        "shard_mb": shard_mb,
        "short_side": short_side,
        "quality": quality if short_side else 0,
        "decode": int(decode),
        "shuffle": int(shuffle and isinstance(folders[0], ImageFolder)),
        "source": _fingerprint(folders, sizes),
    }
    jobs = [
        plan_jobs(target, split, folder, folder_sizes, settings, skip_bad, read_timeout_s)
        for split, folder, folder_sizes in zip(SPLITS, folders, sizes, strict=True)
    ]
    try:
        indexes = [read_index(path, read_timeout_s) for path in look(partial(_list_indexes, target), read_timeout_s)]
        for index in indexes:
            _refuse_other(target, index.settings, settings)
        if len(indexes) == len(SPLITS):
            open_shards(target, read_timeout_s)  # for what it says about a shard that is gone
        else:
            with _claim(target, settings):
                _write_shards([job for split in jobs for job in split], workers, progress("Packing"))
                indexes = [_finish_split(target, split, part) for split, part in zip(SPLITS, jobs, strict=True)]
        shutil.rmtree(target / WORK_FOLDER, ignore_errors=True)
        return [replace(index, skipped=tuple(map(clean, index.skipped))) for index in indexes]
    except OSError as error:
        raise cannot_write(target, error) from error


def open_packable(source: Path, read_timeout_s: float, val_share: float) -> tuple[Packable, Packable]:
    """What there is to pack."""
    if tars := find_tars(source, read_timeout_s):
        raise LockstepError(
            f"{source} holds tar files already, such as {tars[0].name}, and runs read them as they are: set data.path "
            f"to it; `lockstep data index {source}` adds checksums."
        )
    if holds_parquet(source, read_timeout_s):
        return open_parquet(source, read_timeout_s, val_share)
    refuse_compressed(source, read_timeout_s)
    return open_folder(source, read_timeout_s, val_share)


def pack_parquet(
    source: Path, cache: Path, read_timeout_s: float, val_share: float, progress: Progress | None
) -> tuple[Path, tuple[str, ...]]:
    """The pack of a set in Parquet, made in the cache on first use, and what should be said of the set every time."""
    folders = open_parquet(source, read_timeout_s, val_share)
    target = cache / f"parquet-{_fingerprint(folders, [folder.sizes for folder in folders])}"
    show = progress or (lambda done, total: None)
    if not look(partial(_list_indexes, target), read_timeout_s):
        # Samples that cannot be read are for the run to name, and to stop for where they are many.
        pack_folder(
            source, target, val_share=val_share, skip_bad=True, workers=0, read_timeout_s=read_timeout_s,
            progress=lambda title: show,
        )  # fmt: skip
    return target, tuple(note for folder in folders for note in folder.notes)


def plan_jobs(
    target: Path,
    split: str,
    folder: Packable,
    sizes: NDArray[np.int64],
    settings: Settings,
    skip_bad: bool,
    read_timeout_s: float,
) -> list[ShardJob]:
    """The shards of a split: which samples go into each, by a hash of their names unless they are to stay in order."""
    order = np.arange(folder.num_samples)
    if settings["shuffle"]:
        order = np.argsort(mix(PACK_ORDER, folder.hash_names()), kind="stable")
    return [
        ShardJob(
            target,
            f"{split}-{number:06d}.tar",
            folder.select(order[first:last]),
            order[first:last],
            settings,
            skip_bad,
            read_timeout_s,
        )
        for number, (first, last) in enumerate(plan_shards(sizes[order], float(settings["shard_mb"]) * 1e6))
    ]


def plan_shards(sizes: NDArray[np.int64], shard_bytes: float) -> list[tuple[int, int]]:
    """The first and last + 1 sample of each shard, filled in order up to a size in source bytes."""
    ends = np.cumsum(FRAME_BYTES + sizes + -sizes % BLOCK)
    shards: list[tuple[int, int]] = []
    first, start = 0, 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(ends, start + shard_bytes, side="right")))
        shards.append((first, last))
        first, start = last, int(ends[last - 1])
    return shards


def measure_sizes(folder: Packable, progress: Progress, read_timeout_s: float = READ_TIMEOUT_S) -> NDArray[np.int64]:
    """Bytes of each file; 0 where there is none, which is for the packing to find."""
    if isinstance(folder, ParquetImages):
        return folder.sizes
    sizes = np.full(folder.num_samples, -1, np.int64)
    finished: queue.SimpleQueue[int] = queue.SimpleQueue()

    def measure(first: int) -> None:
        last = min(first + STAT_FILES, len(sizes))
        for index in range(first, last):
            try:
                sizes[index] = folder.size(index)
            except OSError:
                sizes[index] = 0
        finished.put(last - first)

    pool = DaemonPool(STAT_THREADS, "lockstep-stat")
    for first in range(0, len(sizes), STAT_FILES):
        pool.submit(partial(measure, first))
    done, known = 0, 0
    while done < len(sizes):
        try:
            done += finished.get(timeout=read_timeout_s)
            progress(done, len(sizes))
        except queue.Empty:
            before, known = known, int((sizes >= 0).sum())
            if known == before:
                raise disk_hangs(read_timeout_s, folder.name(int(sizes.argmin()))) from None
    pool.close()
    return sizes


def _write_shards(jobs: Sequence[ShardJob], workers: int, progress: Progress) -> None:
    """Write the shards that are not there yet; bad files that may not be left out are one sentence at the end."""
    todo = [job for job in jobs if not _is_written(job)]
    total = sum(job.folder.num_samples for job in jobs)
    done = total - sum(job.folder.num_samples for job in todo)
    results = run_jobs(write_shard, todo, workers=workers, done=done, total=total, progress=progress)
    bad = [name for names in results for name in names]
    if bad and not jobs[0].skip_bad:
        # What comes next may be repaired files, or --decode: shards that still fit are taken over, the others go.
        (jobs[0].target / WORK_FOLDER / NOTE).unlink(missing_ok=True)
        more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
        files, them = ("file", "it") if len(bad) == 1 else ("files", "them")
        raise LockstepError(
            f"{len(bad)} {files} cannot be packed: {', '.join(bad[:NAMED])}{more}; "
            f"repair {them}, or run the same command with --skip-bad to leave {them} out."
        )


def _is_written(job: ShardJob) -> bool:
    """Whether an earlier run wrote this shard, with nothing left out that may not be."""
    try:
        part = read_index(job.part_path)
        num_bytes = measure_plain(job.target / job.name)
    except (OSError, LockstepError):
        return False
    whole = [(shard.name, shard.num_bytes) for shard in part.shards] == [(job.name, num_bytes)]
    ours = part.classes == job.folder.classes and part.settings == job.settings
    ours = ours and bool(np.isin(part.numbers, job.numbers).all())
    return whole and ours and (job.skip_bad or not part.skipped)


def _finish_split(target: Path, split: str, jobs: Sequence[ShardJob]) -> Index:
    """Join the shards' parts of the index into that of the split."""
    index = join_indexes([read_index(job.part_path) for job in jobs])
    if not index.num_samples:
        reason = f" ({index.skipped[0]})" if index.skipped else ""
        raise LockstepError(
            f"Not one file of {split}/ can be packed{reason}; see whether the disk and the files are whole."
        )
    write_index(index_path(target, split), index)
    return index


def _fingerprint(folders: Sequence[Packable], sizes: Sequence[NDArray[np.int64]]) -> str:
    """A hash of names and sizes: a folder that changed must not be mixed with what was packed before."""
    digest = hashlib.sha256()
    for folder, folder_sizes in zip(folders, sizes, strict=True):
        digest.update(json.dumps(folder.classes).encode() + folder.describe() + folder_sizes.tobytes())
    return digest.hexdigest()[:16]


def _list_indexes(target: Path, steps: Steps) -> list[Path]:
    """The indexes that an earlier pack left."""
    steps.ask(target)
    return [path for split in SPLITS if (path := index_path(target, split)).exists()]


def _refuse_places(source: Path, target: Path, steps: Steps) -> None:
    """Raise when there is nothing to pack from or no place to pack to."""
    steps.ask(source)
    if not source.is_dir():
        raise LockstepError(f"{source} is not a folder; give one that holds train/ and val/.")
    if is_packed(source):
        raise LockstepError(f"{source} holds packed shards already; give the folder of images they were made from.")
    steps.ask(target)
    if target.resolve().is_relative_to(source.resolve()):
        raise LockstepError(f"{target} lies inside {source}; pack to a folder outside it.")
    if target.exists() and not target.is_dir():
        raise LockstepError(f"{target} is not a folder; give one that is empty or not there yet.")
    if target.is_dir() and not is_packed(target) and any(target.iterdir()):
        raise LockstepError(f"{target} is not empty and holds no packed shards; give an empty folder or a new one.")


def _refuse_other(target: Path, before: Settings, now: Settings) -> None:
    """Raise when what lies in the target was packed otherwise."""
    names = {
        "shard_mb": f"--shard-mb {before.get('shard_mb')}",
        "short_side": f"--short-side {before.get('short_side')}",
        "quality": f"--quality {before.get('quality')}" if before.get("quality") else "",  # --short-side says it
        "decode": "--decode" if before.get("decode") else "no --decode",
        "shuffle": "--shuffle" if before.get("shuffle") else "--no-shuffle",
        "source": "other images in SRC",
    }
    different = [name for key, name in names.items() if name and before.get(key) != now[key]]
    if different:
        raise LockstepError(
            f"{target} holds a pack with {', '.join(different)}; give the same settings and images to go on with it, "
            "or pack to another folder."
        )


def _remove_other(target: Path, settings: Settings) -> None:
    """Remove the shards that a pack with other settings or images wrote before bad files ended it."""
    for part in (target / WORK_FOLDER).glob("*.tar.index"):
        try:
            is_ours = read_index(part).settings == settings
        except LockstepError:
            is_ours = False
        if not is_ours:
            (target / part.name.removesuffix(".index")).unlink(missing_ok=True)
            part.unlink(missing_ok=True)


def _read_note(path: Path) -> Settings:
    """What an unfinished pack was begun with."""
    try:
        settings = json.loads(read_plain(path))
        if isinstance(settings, dict):
            return settings
    except (ValueError, RecursionError):
        pass
    raise LockstepError(f"{path} is damaged; remove {path.parent.parent} and pack again.")


@contextmanager
def _claim(target: Path, settings: Settings) -> Iterator[None]:
    """Make the target ours: nobody else packs into it, and what was begun in it was begun with these settings."""
    work = target / WORK_FOLDER
    work.mkdir(parents=True, exist_ok=True)
    # For reading too, and thus without waiting, should it be a pipe.
    with open(os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockstepError(f"Another process is packing into {target}; wait for it, or stop it first.") from None
        note = work / NOTE
        if not note.exists():
            _remove_other(target, settings)
        elif any(target.glob("*.tar")):  # with no shard finished there is nothing to lose
            _refuse_other(target, _read_note(note), settings)
        for leftover in work.glob("*.partial"):
            leftover.unlink(missing_ok=True)
        (work / "settings.partial").write_text(json.dumps(settings))
        (work / "settings.partial").replace(note)
        yield
