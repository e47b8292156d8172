"""One shard of a pack, written: files of an image folder → a tar file and its part of the index.

It is the work of one process among several; `pack.py` says which files go into which shard.
"""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from lockstep.data.decode import DecodeError, decode, is_ended, read_header
from lockstep.data.index import Index, Settings, write_index
from lockstep.data.index_check import ShardInfo
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.record import BLOCK, END, build_key, build_record
from lockstep.data.shards import WORK_FOLDER
from lockstep.data.sources import IMAGE_SUFFIXES, Source
from lockstep.data.threads import read_each
from lockstep.data.workers import Tick
from lockstep.errors import LockstepError

STARTS = {b"\x89PNG": ".png", b"RIFF": ".webp", b"BM": ".bmp", b"GIF8": ".gif", b"II*": ".tif", b"MM\0*": ".tif"}

Row = tuple[int, int, int, int, int]  # offset, label, length and checksum of a sample, and its place in the folder


class Packable(Source, Protocol):
    """A source whose samples can be packed: a part of it goes to another process."""

    @property
    def notes(self) -> tuple[str, ...]: ...
    def size(self, index: int) -> int: ...
    def select(self, numbers: NDArray[np.int64]) -> "Packable": ...
    def hash_names(self) -> NDArray[np.uint64]: ...
    def describe(self) -> bytes: ...


@dataclass(frozen=True)
class ShardJob:
    """One shard to write."""

    target: Path
    name: str
    folder: Packable  # the shard's part of the split
    numbers: NDArray[np.int64]  # of its samples in the split
    settings: Settings
    skip_bad: bool
    read_timeout_s: float = READ_TIMEOUT_S

    @property
    def part_path(self) -> Path:
        return self.target / WORK_FOLDER / f"{self.name}.index"


def write_shard(job: ShardJob, tick: Tick) -> list[str]:
    """Write one shard and its part of the index; the bad files it met, without which it is only written if allowed."""
    aside = job.target / WORK_FOLDER / f"{job.name}.{os.getpid()}.partial"
    rows: list[Row] = []
    bad: list[str] = []
    try:
        with open(aside, "wb") as file:

            def take(number: int, data: bytes | OSError) -> None:
                try:
                    rows.append(_write_sample(file, job, number, data))
                except DecodeError as error:
                    bad.append(f"{job.folder.name(number)} ({error})")
                tick()

            read_each(job.folder.num_samples, job.folder.read, take, job.read_timeout_s, job.folder.name(0))
            file.write(END)
            file.flush()
            os.fsync(file.fileno())
        if bad and not job.skip_bad:
            return bad
        write_index(job.part_path, _build_part(job, rows, bad, aside.stat().st_size))
        aside.replace(job.target / job.name)  # last: a shard in its place has its part of the index
        return bad
    except OSError as error:
        raise cannot_write(job.target, error) from error
    finally:
        aside.unlink(missing_ok=True)


def _write_sample(file: BinaryIO, job: ShardJob, number: int, data: bytes | OSError) -> Row:
    """Write one record; DecodeError when the sample could not be read or made smaller."""
    if isinstance(data, OSError):  # not raised as it is: an OSError from here on is the target's
        raise DecodeError(data.strerror)
    name, label = job.folder.name(number), int(job.folder.labels[number])
    data, suffix = _encode(data, name, job.settings)
    row = file.tell() + BLOCK, label, len(data), zlib.crc32(data), number
    file.write(build_record(f"{build_key(int(job.numbers[number]), name)}{suffix}", data, label))
    return row


def _build_part(job: ShardJob, rows: list[Row], skipped: list[str], num_bytes: int) -> Index:
    """The index of this shard alone."""
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    places = columns[4]
    return Index(
        job.folder.classes,
        (ShardInfo(job.name, len(rows), num_bytes),),
        tuple(skipped),
        job.settings,
        offsets=columns[0],
        labels=columns[1],
        lengths=columns[2].astype(np.uint32),
        checksums=columns[3].astype(np.uint32),
        names=job.folder.hash_names()[places],
        numbers=job.numbers[places].astype(np.uint32),
    )


def inspect(data: bytes, decodes: bool) -> None:
    """Look at an image's header and its end; DecodeError when it is broken. One without an end is judged by decoding.

    A decoder fills in what is missing behind a damaged place, or gives up: whatever training would refuse is refused.
    """
    header = read_header(data)
    if decodes or not is_ended(data):
        decode(data, header)


def _encode(data: bytes, name: str, settings: Settings) -> tuple[bytes, str]:
    """The bytes to store and their suffix: the file's own, unless the image is to be made smaller."""
    suffix = os.path.splitext(name)[1].lower()
    if suffix not in IMAGE_SUFFIXES:  # a row of a table has none
        suffix = next((kind for start, kind in STARTS.items() if data.startswith(start)), ".jpg")
    short_side = int(settings["short_side"])
    if not short_side:
        inspect(data, bool(settings["decode"]))
        return data, suffix
    pixels = decode(data)
    height, width = pixels.shape[:2]
    scale = short_side / min(height, width)
    if scale >= 1:
        return data, suffix
    size = (max(short_side, round(width * scale)), max(short_side, round(height * scale)))
    smaller = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
    jpeg: bytes = simplejpeg.encode_jpeg(smaller, quality=int(settings["quality"]), colorsubsampling="420")
    return jpeg, ".jpg"


def cannot_write(target: Path, error: OSError) -> LockstepError:
    """The sentence for a full disk and its kin."""
    return LockstepError(
        f"The pack in {target} cannot be written ({error.strerror}); free some space or repair the cause, and run the "
        "same command again: it goes on where it stopped."
    )
