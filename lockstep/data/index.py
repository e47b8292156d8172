"""The index of packed shards: where each sample lies, its label and checksum, in one memory-mapped file for each split.

The file: magic, header length, CRC-32 of the rest; a JSON header; then one plain array for each of offsets, labels,
lengths and checksums. Opening it creates no object for a sample, however many there are. Torch-free.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import LockstepError

Settings = Mapping[str, float | str]

FORMAT = 1
MAGIC = b"LSINDEX\n"
PROLOGUE = struct.Struct("<8sII")  # magic, length of the header, CRC-32 of that length, header and arrays
# In the order of the file: the wider ones first, so that each array is aligned.
ARRAYS = {"offsets": "<i8", "labels": "<i8", "lengths": "<u4", "checksums": "<u4"}
ALIGNMENT = 64
CHUNK_BYTES = 1 << 20


class ShardInfo(NamedTuple):
    """A shard as the index knows it."""

    name: str
    num_samples: int
    num_bytes: int


@dataclass(frozen=True)
class Index:
    """One split: its classes and shards, and for each sample where its bytes lie within its shard."""

    classes: tuple[str, ...]
    shards: tuple[ShardInfo, ...]
    skipped: tuple[str, ...]  # unreadable source files that were left out
    settings: Settings
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    checksums: NDArray[np.uint32]  # CRC-32 of the sample's bytes

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
    """One index for the shards of several, in their order."""
    arrays: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
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


def read_index(path: Path) -> Index:
    """Map an index into memory; what is wrong with it is one sentence."""
    try:
        with open(path, "rb") as file:
            header, start = _read_header(file.fileno())
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arrays: dict[str, Any] = {}
        for name, kind in ARRAYS.items():
            arrays[name] = np.frombuffer(mapped, kind, header["num_samples"], start)
            start += arrays[name].nbytes
        return Index(
            tuple(header["classes"]),
            tuple(ShardInfo(*shard) for shard in header["shards"]),
            tuple(header["skipped"]),
            header["settings"],
            **arrays,
        )
    except OSError as error:
        raise LockstepError(
            f"The index {path} cannot be read ({error.strerror}); check path and disk, or pack the images again."
        ) from error
    except ValueError as error:
        raise LockstepError(
            f"The index {path} is damaged ({error}); copy it again, or pack the images again into an empty folder."
        ) from error


def _read_header(file: int) -> tuple[dict[str, Any], int]:
    """The header and where the arrays start, after a check of every byte; ValueError says what is wrong."""
    prologue = os.read(file, PROLOGUE.size)
    if len(prologue) < PROLOGUE.size:
        raise ValueError("it is too short")
    magic, length, expected = PROLOGUE.unpack(prologue)
    if magic != MAGIC:
        raise ValueError("it does not start as an index does")
    # Read and not mapped: the pages pass through one small buffer, so that the check costs no memory.
    checksum, text = _start_checksum(length), b""
    while chunk := os.read(file, CHUNK_BYTES):
        checksum = zlib.crc32(chunk, checksum)
        text += chunk[: max(0, length - len(text))]
    if checksum != expected:
        raise ValueError("its checksum does not match")
    header: dict[str, Any] = json.loads(text)
    if header["format"] != FORMAT:
        raise ValueError(f"it has format {header['format']}, this version reads {FORMAT}")
    return header, PROLOGUE.size + length
