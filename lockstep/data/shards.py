"""Packed shards as a source: sample number → encoded bytes and label (step 2 on the walk, beside `sources.py`).

A shard is a plain tar file that any WebDataset reader can read; the index beside it says where each sample lies, so
that nothing here parses a tar. `pack.py` writes what this reads; tar files of others: `webdataset.py`. Each sample's
bytes are held against their checksum as they come, so that a bit flipped on a disk is a bad sample with a name.
Torch-free.
"""

import errno
import os
import resource
import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.index import Index, read_index
from lockstep.data.order import choose_held_out
from lockstep.data.plain_files import READ_TIMEOUT_S, check_length, measure_plain, open_plain
from lockstep.data.record import BLOCK, parse_name
from lockstep.data.sources import (
    IMAGES,
    choose_probes,
    describe_bytes,
    describe_probes,
    describe_share,
    hash_arrays,
    hash_labels,
    read_probes,
)
from lockstep.data.threads import Steps, look
from lockstep.errors import LockstepError

SPLITS = ("train", "val")
NAMED = 5  # samples that a sentence names
GATHERED = 1 << 16  # values of an index taken over at a time
WORK_FOLDER = ".pack"  # what an unfinished pack keeps beside its shards


def index_path(root: Path, split: str) -> Path:
    """Where the index of a split lies."""
    return root / f"{split}.index"


def is_packed(root: Path, limit_s: float = READ_TIMEOUT_S) -> bool:
    """Whether a folder holds shards, finished or not, and not images."""
    return look(lambda steps: _has_shards(root, steps), limit_s)


def _has_shards(root: Path, steps: Steps) -> bool:
    steps.ask(root)
    return (root / WORK_FOLDER).is_dir() or any(index_path(root, split).exists() for split in SPLITS)


class OpenShard:
    """A shard open for reading at any place by any thread; closed when nobody holds it any more."""

    def __init__(self, path: Path) -> None:
        self._file, self.num_bytes = open_plain(path)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; OSError when they are not there."""
        check_length(length)
        data = os.pread(self._file, length, offset)
        if len(data) < length:
            raise OSError(errno.EIO, "the shard ends too early")
        return data


class Shards:
    """One split of packed shards, or the `chosen` records of it, in this order.

    Bytes come by one positioned read. A memory map of the shards would save a copy, about 1 % of decoding, but a disk
    error under a map is a signal that ends the process, and a page not yet in memory holds up every thread.
    """

    def __init__(
        self, root: Path, index: Index, chosen: NDArray[np.int64] | None = None, checks_bytes: bool = True
    ) -> None:
        chosen = index.order if chosen is None else chosen
        self.classes = index.classes
        # In as few bytes as will do: sixteen for each sample and not the index's thirty-six.
        self.labels: NDArray[np.integer[Any]] = _gather(index.labels, chosen, np.min_scalar_type(len(index.classes)))
        self._blocks = _gather(index.offsets, chosen, np.dtype(np.uint32), BLOCK)
        self._lengths = _gather(index.lengths, chosen, np.dtype(np.uint32))
        self._checksums = _gather(index.checksums, chosen, np.dtype(np.uint32))
        self._has_checksums = has_checksums(index)
        self._checks_bytes = checks_bytes and self._has_checksums
        self._paths = [root / shard.name for shard in index.shards]
        kind = np.min_scalar_type(max(1, len(self._paths)))
        counts = [shard.num_samples for shard in index.shards]
        self._shards = _gather(np.repeat(np.arange(len(counts), dtype=kind), counts), chosen, kind)
        self._open = _build_opener()
        self.notes = describe_skipped(root, index)  # what its reader should know of it, in sentences
        # Not the offsets: the same samples in shards of another size are the same data.
        self._fingerprint = {"labels": hash_labels(index.classes, self.labels)}
        if self._has_checksums:
            self._fingerprint["bytes"] = hash_arrays(self._lengths, self._checksums)
        else:  # by another name: a run may go on when the tar files have got their checksums
            self._fingerprint["lengths"] = hash_arrays(self._lengths)

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": None}  # for another process, which opens the files itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _open=_build_opener())

    def _path(self, index: int) -> Path:
        return self._paths[int(self._shards[index])]

    def read(self, index: int) -> bytes:
        """The encoded image; OSError when it cannot be read, or is not what was packed."""
        data = self._open(self._path(index)).read(BLOCK * int(self._blocks[index]), int(self._lengths[index]))
        if self._checks_bytes and zlib.crc32(data) != self._checksums[index]:
            raise OSError(errno.EIO, "its bytes do not match their checksum")
        return data

    def fingerprint(self) -> dict[str, str]:
        """What tells this data from other: labels, lengths and checksums; a few of them as a folder has them, too."""
        if IMAGES not in self._fingerprint:
            self._fingerprint[IMAGES] = self._describe_probes()
        return self._fingerprint

    def _describe_probes(self) -> str:
        if not self._has_checksums:
            return describe_bytes(read_probes(self, READ_TIMEOUT_S))
        probes = choose_probes(self.num_samples)
        lengths, checksums = (
            dict(zip(probes, values[probes].tolist(), strict=True)) for values in (self._lengths, self._checksums)
        )
        return describe_probes(lengths, checksums)

    def where(self, index: int) -> str:
        """The shard and the sample's number, which are known without reading."""
        return f"{self._path(index)}: sample {index}"

    def name(self, index: int) -> str:
        """The shard and the sample's name in it, for messages."""
        path = self._path(index)
        try:
            name = parse_name(self._open(path).read(BLOCK * int(self._blocks[index]) - BLOCK, BLOCK))
        except OSError:
            name = ""
        return f"{path}: {name}" if name else self.where(index)


def _build_opener() -> Callable[[Path], OpenShard]:
    """Opens shards, and keeps a third of the files open that this process may: there are two splits."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return lru_cache(None if most == resource.RLIM_INFINITY else most // 3)(OpenShard)


def _gather(
    values: NDArray[Any], chosen: NDArray[np.int64], kind: np.dtype[Any], divisor: int = 1
) -> NDArray[np.integer[Any]]:
    """The chosen values as another kind, a few at a time: whole arrays in between would leave holes in the memory."""
    found = np.empty(len(chosen), kind)
    for start in range(0, len(chosen), GATHERED):
        part = values[chosen[start : start + GATHERED]]
        found[start : start + GATHERED] = part // divisor if divisor > 1 else part
    return found


def describe_skipped(root: Path, index: Index) -> tuple[str, ...]:
    """A sentence on samples that the index leaves out."""
    if not index.skipped:
        return ()
    named = ", ".join(index.skipped[:NAMED]) + (", …" if len(index.skipped) > NAMED else "")
    samples, are = ("sample", "is") if len(index.skipped) == 1 else ("samples", "are")
    return (f"{len(index.skipped):,} {samples} of {root} cannot be used, and {are} left out of its index: {named}.",)


def has_checksums(index: Index) -> bool:
    """Whether somebody has read every sample that the index names."""
    return index.settings.get("checksums", 1) != 0


def open_shards(
    root: Path, limit_s: float = READ_TIMEOUT_S, val_share: float = 0.0, checks_bytes: bool = True
) -> tuple[Shards, Shards]:
    """The training and validation splits of a finished pack, every shard there and of the right size."""
    train, val = read_indexes(root, limit_s)
    return join_splits(root, train, val, limit_s, val_share, checks_bytes)


def join_splits(
    root: Path, train: Index, val: Index, limit_s: float, val_share: float, checks_bytes: bool
) -> tuple[Shards, Shards]:
    """Both splits; with a `val_share` that part of the first is the second."""
    for index in (train, val):
        look(partial(_check_sizes, root, index), limit_s)
    if train.classes != val.classes:
        raise LockstepError(f"The two indexes in {root} name different classes; pack the images again.")
    if not train.num_samples or not val.num_samples:
        raise LockstepError(f"An index in {root} names no sample; pack the images again into an empty folder.")
    if not val_share:
        return Shards(root, train, None, checks_bytes), Shards(root, val, None, checks_bytes)
    order = train.order
    is_held_out = choose_held_out(train.names[order], val_share)
    kept, held_out = (Shards(root, train, order[mask], checks_bytes) for mask in (~is_held_out, is_held_out))
    kept.notes += (describe_share(val_share, kept, held_out, "the pack's own validation split"),)
    held_out.notes = ()  # the first says them
    return kept, held_out


def read_indexes(root: Path, limit_s: float = READ_TIMEOUT_S) -> list[Index]:
    """The index of each split; a pack that is not finished, or none, is one sentence."""
    if look(lambda steps: _is_unfinished(root, steps), limit_s):
        raise LockstepError(
            f"The pack in {root} is not finished; run the same `lockstep data pack` again to finish it."
        )
    if not is_packed(root, limit_s):
        raise LockstepError(f"{root} holds no packed shards; give a folder that `lockstep data pack` made.")
    return [read_index(index_path(root, split), limit_s) for split in SPLITS]


def _is_unfinished(root: Path, steps: Steps) -> bool:
    steps.ask(root)
    return (root / WORK_FOLDER).is_dir() and not all(index_path(root, split).exists() for split in SPLITS)


def _check_sizes(root: Path, index: Index, steps: Steps) -> None:
    for shard in index.shards:
        steps.ask(root / shard.name)
        try:
            num_bytes = measure_plain(root / shard.name)
        except OSError as error:
            raise LockstepError(
                f"The shard {root / shard.name} cannot be read ({error.strerror}); "
                "copy it again, or pack again into an empty folder."
            ) from error
        if num_bytes != shard.num_bytes:
            raise LockstepError(
                f"The shard {root / shard.name} has {num_bytes:,} bytes where its index says {shard.num_bytes:,}; "
                "copy it again, or pack again into an empty folder."
            )
