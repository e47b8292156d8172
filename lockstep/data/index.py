"""The index of packed shards: where each sample lies, its label and checksum, in one file for each split.

The file: magic, header length, CRC-32 of the rest; a JSON header; then one plain array for each of offsets, labels,
names, lengths, checksums and numbers, in the order of the shards. Shards may be shuffled: `numbers` says which sample
of the split each record is. Opening it creates no object for a sample, however many there are. It is read and not
mapped: a file cut short under a map ends the process, and what was checked (`index_check.py`) stays as it was.
Torch-free.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.index_check import ShardInfo, check_arrays, check_header, plan_order
from lockstep.data.order import mix
from lockstep.data.plain_files import READ_TIMEOUT_S, read_plain
from lockstep.data.threads import Steps, look
from lockstep.errors import LockstepError

Settings = Mapping[str, float | str]

FORMAT = 2
MAGIC = b"LSINDEX\n"
PROLOGUE = struct.Struct("<8sII")  # magic, length of the header, CRC-32 of that length, header and arrays
# In the order of the file: the wider ones first, so that each array is aligned.
ARRAYS = {
    "offsets": "<i8",
    "labels": "<i8",
    "names": "<u8",
    "lengths": "<u4",
    "checksums": "<u4",
    "numbers": "<u4",
}
# Of format 1, whose shards lie in the order of the samples; such packs are still read.
FIRST_ARRAYS = {name: ARRAYS[name] for name in ("offsets", "labels", "lengths", "checksums")}
ALIGNMENT = 64
MAX_INDEX_BYTES = 1 << 32  # 110 million samples; no forged file shall take all the memory


@dataclass(frozen=True)
class Index:
    """One split: its classes and shards, and for each record of them where the sample's bytes lie, and which it is.

    Without `names`, what a sample holds stands for what it is called; without `numbers`, records are in order.
    """

    classes: tuple[str, ...]
    shards: tuple[ShardInfo, ...]
    skipped: tuple[str, ...]  # unreadable source files that were left out
    settings: Settings
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    checksums: NDArray[np.uint32]  # CRC-32 of the sample's bytes
    # Hashes of what the samples were called, and their numbers in the split, none twice.
    names: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    numbers: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))

    def __post_init__(self) -> None:
        if len(self.names) != len(self.offsets):
            object.__setattr__(self, "names", mix(self.lengths, self.checksums))
        if len(self.numbers) != len(self.offsets):
            object.__setattr__(self, "numbers", np.arange(len(self.offsets), dtype=np.uint32))

    @property
    def order(self) -> NDArray[np.int64]:
        """Which record each sample of the split is."""
        return plan_order(self.numbers)

    @property
    def num_samples(self) -> int:
        return len(self.offsets)


def split_index(index: Index) -> list[Index]:
    """An index of its own for each shard."""
    parts, first = [], 0
    for shard in index.shards:
        last = first + shard.num_samples
        arrays = {name: getattr(index, name)[first:last] for name in ARRAYS}
        parts.append(Index(index.classes, (shard,), (), index.settings, **arrays))
        first = last
    return parts


def join_indexes(parts: Sequence[Index]) -> Index:
    """One index for the shards of several, in their order; samples are numbered without gaps."""
    arrays: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    order = plan_order(arrays["numbers"])
    arrays["numbers"][order] = np.arange(len(order))
    return Index(
        parts[0].classes,
        tuple(shard for part in parts for shard in part.shards),
        tuple(name for part in parts for name in part.skipped),
        parts[0].settings,
        **arrays,
    )


def write_index(path: Path, index: Index) -> None:
    """Write the file aside and rename it, so that what has the name is whole."""
    header = {
        "format": FORMAT,
        "num_samples": index.num_samples,
        "classes": index.classes,
        "settings": dict(index.settings),
        "shards": index.shards,
        "skipped": index.skipped,
    }
    text = json.dumps(header).encode()
    text += b" " * (-(PROLOGUE.size + len(text)) % ALIGNMENT)
    body = text + b"".join(getattr(index, name).astype(kind).tobytes() for name, kind in ARRAYS.items())
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(aside, "wb") as file:
        file.write(PROLOGUE.pack(MAGIC, len(text), zlib.crc32(body, _start_checksum(len(text)))))
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _start_checksum(header_length: int) -> int:
    """The length belongs to what is checked: a little less, and the header would still be read but not the arrays."""
    return zlib.crc32(struct.pack("<I", header_length))


def read_index(path: Path, limit_s: float = READ_TIMEOUT_S) -> Index:
    """Read and check an index; what is wrong with it is one sentence."""

    def read(steps: Steps) -> bytes:
        steps.ask(path)
        return read_plain(path, MAX_INDEX_BYTES)

    try:
        return _parse_index(look(read, limit_s))
    except OSError as error:
        raise LockstepError(
            f"The index {path} cannot be read ({error.strerror}); check path and disk, or pack the images again."
        ) from error
    except (ValueError, RecursionError) as error:  # the latter from JSON nested without end
        raise LockstepError(
            f"The index {path} is damaged ({error}); copy it again, or pack the images again into an empty folder."
        ) from error


def _parse_index(data: bytes) -> Index:
    """The index in these bytes, every one of them checked; ValueError says what is wrong."""
    if len(data) < PROLOGUE.size:
        raise ValueError("it is too short")
    magic, length, expected = PROLOGUE.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("it does not start as an index does")
    body = memoryview(data)[PROLOGUE.size :]
    if zlib.crc32(body, _start_checksum(length)) != expected:
        raise ValueError("its checksum does not match")
    header = json.loads(bytes(body[:length]))
    check_header(header, FORMAT)
    arrays: dict[str, Any] = {}
    kinds = FIRST_ARRAYS if header["format"] == 1 else ARRAYS
    start, num_samples = PROLOGUE.size + length, header["num_samples"]
    if len(data) != start + num_samples * sum(np.dtype(kind).itemsize for kind in kinds.values()):
        raise ValueError(f"its {len(data):,} bytes are not those of {num_samples:,} samples")
    for name, kind in kinds.items():
        arrays[name] = np.frombuffer(data, kind, num_samples, start)
        start += arrays[name].nbytes
    classes, shards = tuple(header["classes"]), tuple(ShardInfo(*shard) for shard in header["shards"])
    is_ours = "webdataset" not in header["settings"]
    check_arrays(len(classes), shards, arrays["offsets"], arrays["labels"], arrays["lengths"], is_ours)
    index = Index(classes, shards, tuple(header["skipped"]), header["settings"], **arrays)
    plan_order(index.numbers)  # for what it refuses
    return index
