"""Tar files of others, as WebDataset has them, made readable at any place: an index from their headers.

Their own index says nothing about where a sample lies, or there is none: every header is read once, and what was found
is kept in the user's cache under a name made of the files' names, sizes and times, so that files that change are read
again. With `checksums` every byte is read too. Nothing that lies in them is unpickled. After it: `shards.py`.
"""

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lockstep.data.generated import default_cache
from lockstep.data.index import Index, read_index, write_index
from lockstep.data.index_check import SHARD_NAME, ShardInfo
from lockstep.data.order import choose_held_out
from lockstep.data.plain_files import MAX_SAMPLE_BYTES, READ_TIMEOUT_S, open_plain, read_plain
from lockstep.data.record import BLOCK
from lockstep.data.shards import SPLITS, Shards, index_path
from lockstep.data.sources import IMAGE_SUFFIXES, describe_share, hash_name
from lockstep.data.split_files import find_large, split_files
from lockstep.data.threads import Steps, look
from lockstep.data.workers import Progress, Tick, run_jobs
from lockstep.errors import LockstepError

MAX_HEADER_BYTES = 1 << 20  # of names and the like in a tar file
MAX_LABEL_BYTES = 1 << 16
MAX_CLASSES = 1 << 24
MAX_NAME = 200
LABEL_KEYS = ("label", "cls", "class", "class_id", "class_label")  # of a sample's JSON, the first that is there
NO_LABEL = "-1"  # as sets for tests have it
NAME_KEYS = ("class_name", "label_name", "classname", "synset", "wnid")
NAME_FILES = ("classes.txt", "class_names.txt", "labels.txt", "classnames.txt")
LABELLED = "an image and a label (.cls, or .json with a label)"
ADVICE = "give each sample both, or unpack the images to class folders"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True)
class TarJob:
    """One tar file to look through."""

    path: Path
    checksums: bool


@dataclass
class Found:
    """The samples of one tar file."""

    num_bytes: int = 0
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)  # hashes of the keys
    labels: list[str] = field(default_factory=list)
    class_names: dict[str, str] = field(default_factory=dict)  # what a label is called, where samples say it
    skipped: list[str] = field(default_factory=list)


class BoundedFile:
    """A tar file as Python's reader sees it: no header makes it read more than a header can be."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError("a header is too long")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def find_tars(root: Path, limit_s: float = READ_TIMEOUT_S) -> list[Path]:
    """The tar files of a folder that has no index of ours."""
    return look(partial(find_large, root, ".tar"), limit_s)


def refuse_compressed(root: Path, limit_s: float = READ_TIMEOUT_S) -> None:
    """Raise where there are tar files that nobody can read at any place."""
    for suffix in COMPRESSED:
        if found := look(partial(find_large, root, suffix), limit_s):
            more = f" and {len(found) - 1} other{'s' if len(found) > 2 else ''} are" if len(found) > 1 else " is"
            raise LockstepError(
                f"{found[0]}{more} compressed, and cannot be read at any place; unpack to plain .tar files."
            )


def split_tars(
    root: Path, tars: list[Path], limit_s: float, val_share: float = 0.0
) -> tuple[list[Path], list[Path], tuple[str, ...]]:
    """The tar files of each split, and what should be said of it; a split that is compressed is named so."""
    try:
        return split_files(root, tars, val_share)
    except LockstepError:
        refuse_compressed(root, limit_s)
        raise


def open_tars(
    root: Path,
    tars: list[Path],
    limit_s: float = READ_TIMEOUT_S,
    val_share: float = 0.0,
    progress: Progress | None = None,
    workers: int = 0,
) -> tuple[Shards, Shards]:
    """Both splits of the tar files in a folder; their index is made on first use."""
    train_files, val_files, notes = split_tars(root, tars, limit_s, val_share)
    indexes = read_or_build(root, [train_files, val_files], progress, workers, limit_s)
    train, val = indexes
    if not val_share:
        splits = Shards(root, train), Shards(root, val)
    else:
        is_held_out = choose_held_out(train.names, val_share)
        splits = Shards(root, train, np.flatnonzero(~is_held_out)), Shards(root, train, np.flatnonzero(is_held_out))
        splits[1].notes = ()  # the first says them
        notes += (describe_share(val_share, *splits),)
    splits[0].notes += (
        *notes,
        f"The tar files in {root} have no checksums, so that a flipped bit may go unnoticed; "
        f"`lockstep data index {root}` adds them.",
    )
    return splits


def read_or_build(
    root: Path, files: list[list[Path]], progress: Progress | None, workers: int, limit_s: float
) -> list[Index]:
    """The index of each split out of the cache, or made now and left there where it can be."""
    folder = default_cache() / f"webdataset-{look(partial(_fingerprint, root, files), limit_s)}"
    paths = [index_path(folder, split) for split in SPLITS]
    try:
        return _refuse_empty(files, [read_index(path, limit_s) for path in paths])
    except LockstepError:
        indexes = build_indexes(root, files, False, workers, progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, index in zip(paths, indexes, strict=True):
            write_index(path, index)
    except OSError:
        pass  # a full disk costs the next run the time, not this one its data
    return indexes


def _refuse_empty(files: list[list[Path]], indexes: list[Index]) -> list[Index]:
    """The indexes, if every split that has files has samples."""
    for group, index in zip(files, indexes, strict=True):
        if group and not index.num_samples:
            more = " and the others of its split" if len(group) > 1 else ""
            left_out = f": {index.skipped[0]} is left out" if index.skipped else ""
            raise LockstepError(f"No sample in {group[0]}{more} has {LABELLED}{left_out}; {ADVICE}.")
    return indexes


def index_tars(
    root: Path, workers: int = 0, progress: Progress | None = None, limit_s: float = READ_TIMEOUT_S
) -> list[Index]:
    """Read every byte of a folder's tar files and leave an index with checksums beside them."""
    tars = find_tars(root, limit_s)
    if not tars:
        refuse_compressed(root, limit_s)
        raise LockstepError(f"{root} holds no .tar files; give a folder of WebDataset shards.")
    train, val, _ = split_tars(root, tars, limit_s)
    if any(path.parent != root for path in tars):
        raise LockstepError(
            f"The tar files lie in folders below {root}; move them into it to have an index beside them."
        )
    indexes = build_indexes(root, [train, val], True, workers, progress)
    try:
        for split, index in zip(SPLITS, indexes, strict=True):
            write_index(index_path(root, split), index)
    except OSError as error:
        raise LockstepError(f"The index cannot be written to {root} ({error.strerror}); free some space.") from error
    return indexes


def _fingerprint(root: Path, files: list[list[Path]], steps: Steps) -> str:
    """A hash of the files' names, sizes and times, and of the file of class names."""
    digest = hashlib.blake2b(str(root.resolve()).encode(errors="surrogateescape"), digest_size=12)
    names = [path for name in NAME_FILES if (path := root / name).is_file()]
    for group in [*files, names]:
        digest.update(b"\0")
        for path in group:
            steps.ask(path)
            status = path.stat()
            digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def build_indexes(
    root: Path, files: list[list[Path]], checksums: bool, workers: int, progress: Progress | None
) -> list[Index]:
    """Look through all tar files, several at a time, and number the labels of both splits alike."""
    jobs = [TarJob(path, checksums) for group in files for path in group]
    found = run_jobs(look_through, jobs, workers=workers, total=len(jobs), progress=progress)
    numbers, classes = name_classes(root, found)
    indexes, first = [], 0
    for group in files:
        part = found[first : first + len(group)]
        first += len(group)
        indexes.append(_join(root, group, part, numbers, classes, checksums))
    return _refuse_empty(files, indexes)


def _join(
    root: Path,
    files: list[Path],
    found: list[Found],
    numbers: dict[str, int],
    classes: tuple[str, ...],
    checksums: bool,
) -> Index:
    def gather(values: Callable[[Found], list[int]], kind: Any) -> Any:
        return np.array([value for part in found for value in values(part)], kind)

    relative = [str(path.relative_to(root)) for path in files]
    if wrong := [name for name in relative if not SHARD_NAME.fullmatch(name)]:
        raise LockstepError(f"{root / wrong[0]} has a name that no index can hold; use letters, digits, _, - and dots.")
    return Index(
        classes,
        tuple(ShardInfo(name, len(part.offsets), part.num_bytes) for name, part in zip(relative, found, strict=True)),
        tuple(name for part in found for name in part.skipped),
        {"shard_mb": 1.0, "short_side": 0, "quality": 0, "source": "", "webdataset": 1, "checksums": int(checksums)},
        offsets=gather(lambda part: part.offsets, np.int64),
        labels=gather(lambda part: [numbers[label] for label in part.labels], np.int64),
        lengths=gather(lambda part: part.lengths, np.uint32),
        checksums=gather(lambda part: part.checksums, np.uint32),
        names=gather(lambda part: part.names, np.uint64),
    )


def name_classes(root: Path, found: list[Found]) -> tuple[dict[str, int], tuple[str, ...]]:
    """The number of each label, and what each class is called: by a file, by the samples, else by the label itself."""
    labels = {label for part in found for label in part.labels}
    if not labels:
        raise LockstepError(f"No sample in {root} has {LABELLED}; {ADVICE}.")
    if not all(label.isascii() and label.isdigit() and len(label) < 9 for label in labels):
        classes = tuple(sorted(labels))
        return {label: number for number, label in enumerate(classes)}, classes
    num_classes = max(map(int, labels)) + 1
    if num_classes > MAX_CLASSES:
        raise LockstepError(f"{root} has the label {num_classes - 1:,}, beyond the {MAX_CLASSES:,} classes allowed.")
    names = _read_names(root)
    said = {int(label): name for part in found for label, name in part.class_names.items()}
    if len(names) < num_classes:
        names = [said.get(number, str(number)) for number in range(num_classes)]
    if len(set(names)) < len(names):
        names = [f"{number} {name}" for number, name in enumerate(names)]
    return {label: int(label) for label in labels}, tuple(names)


def _read_names(root: Path) -> list[str]:
    """Class names, one in a line, from a file beside the shards."""
    for name in NAME_FILES:
        if (root / name).is_file():
            try:
                lines = read_plain(root / name, 1 << 24).decode().splitlines()
            except (OSError, ValueError) as error:
                raise LockstepError(f"{root / name} cannot be read ({error}); correct it.") from error
            return [line.strip()[:MAX_NAME] for line in lines if line.strip()]
    return []


def look_through(job: TarJob, tick: Tick) -> Found:
    """Where the samples of one tar file lie, with their labels."""
    try:
        descriptor, num_bytes = open_plain(job.path)
        with os.fdopen(descriptor, "rb") as file:
            found = Found(num_bytes)
            for key, members in _group(file):
                _take(job, file, key, members, found)
    except OSError as error:
        raise LockstepError(f"{job.path} cannot be read ({error.strerror}); check its permissions and disk.") from error
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
        raise LockstepError(
            f"{job.path} is no whole tar file ({str(error)[:MAX_NAME]}); copy it again, or leave it out."
        ) from error
    tick()
    return found


def _group(file: BinaryIO) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """The members of each sample by what stands behind the first dot of their names."""
    with tarfile.open(fileobj=BoundedFile(file), mode="r:") as tar:  # type: ignore[call-overload]
        before, members = "", dict[str, tarfile.TarInfo]()
        while (member := tar.next()) is not None:
            tar.members = []  # which would hold all of them
            if not member.isreg() or member.issparse():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, _, kind = base.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            if key != before and members:
                yield before, members
                members = {}
            before = key
            members[kind.lower()] = member
        if members:
            yield before, members


def _take(job: TarJob, file: BinaryIO, key: str, members: dict[str, tarfile.TarInfo], found: Found) -> None:
    """Add a sample, or name it among those left out."""
    here = file.tell()  # the reader of headers goes on from there
    image = next((member for kind, member in members.items() if f".{kind}".endswith(IMAGE_SUFFIXES)), None)
    label = _read_label(file, members, found.class_names)
    where = f"{job.path.name}: {key[:MAX_NAME]}"
    if image is None or not label:
        found.skipped.append(f"{where} ({'no image' if image is None else 'no label'})")
    elif image.size > MAX_SAMPLE_BYTES or image.offset_data + image.size > found.num_bytes or image.offset_data % BLOCK:
        found.skipped.append(f"{where} (its {image.size:,} bytes are not all there)")
    else:
        found.offsets.append(image.offset_data)
        found.lengths.append(image.size)
        found.names.append(hash_name(key.encode(errors="surrogateescape")))
        found.labels.append(label)
        file.seek(image.offset_data)
        found.checksums.append(zlib.crc32(file.read(image.size)) if job.checksums else 0)
    file.seek(here)


def _read_label(file: BinaryIO, members: dict[str, tarfile.TarInfo], class_names: dict[str, str]) -> str:
    """A sample's label as text, from its .cls or else its .json, which may name the class of a number in either."""
    label = _read_text(file, members.get("cls"))[:MAX_NAME]
    if label == NO_LABEL:
        return ""
    if label and not label.isdigit():
        return label
    try:
        table = json.loads(_read_text(file, members.get("json")))
    except (ValueError, RecursionError):
        return label
    if not isinstance(table, dict):
        return label
    said = next((table[key] for key in LABEL_KEYS if key in table), None)
    if not label and isinstance(said, int | str) and not isinstance(said, bool) and len(str(said)) <= MAX_NAME:
        label = str(said) if str(said) != NO_LABEL else ""
    name = next((table[key] for key in NAME_KEYS if key in table), None)
    if label and isinstance(name, str) and name:
        class_names[label] = name[:MAX_NAME]
    return label


def _read_text(file: BinaryIO, member: tarfile.TarInfo | None) -> str:
    """A small member's text; nothing where there is none."""
    if member is None or member.size > MAX_LABEL_BYTES:
        return ""
    file.seek(member.offset_data)
    try:
        return file.read(member.size).decode().strip()
    except ValueError:
        return ""
