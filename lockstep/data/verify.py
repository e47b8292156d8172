"""Packed shards, checked byte by byte: each record against the one that the index says should be there."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.data.decode import DecodeError, decode
from lockstep.data.index import Index, split_index
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.record import BLOCK, END, FRAME_BYTES, build_record, key_of, padding, parse_name
from lockstep.data.shards import OpenShard, has_checksums, read_indexes
from lockstep.data.threads import read_each, read_one
from lockstep.data.workers import Progress, Tick, run_jobs


class Damage(NamedTuple):
    """Something wrong in a shard: with one sample, or with all of its samples, or with none (-1)."""

    shard: str
    key: str  # empty where it cannot be read
    number: int
    num_samples: int
    reason: str

    def __str__(self) -> str:
        if self.num_samples > 1:
            return f"{self.shard}  all of its {self.num_samples} samples: {self.reason}"
        if self.num_samples == 1:
            return f"{self.shard}  {self.key or '(name unreadable)'}  sample {self.number}: {self.reason}"
        return f"{self.shard}  {self.reason}"


@dataclass(frozen=True)
class CheckJob:
    """One shard to check."""

    root: Path
    index: Index  # of this shard alone
    decode: bool
    read_timeout_s: float = READ_TIMEOUT_S


class Verdict(NamedTuple):
    """What a verification found."""

    num_samples: int
    damages: list[Damage]

    @property
    def num_damaged(self) -> int:
        return sum(damage.num_samples for damage in self.damages)


def verify_shards(
    root: Path,
    *,
    decode: bool,
    workers: int,
    progress: Progress | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> Verdict:
    """Check every sample of both splits, and with `decode` that each is an image."""
    jobs: list[CheckJob] = []
    for index in read_indexes(root, read_timeout_s):
        for part in split_index(index):
            jobs.append(CheckJob(root, part, decode, read_timeout_s))
    total = sum(job.index.num_samples for job in jobs)
    found = run_jobs(check_shard, jobs, workers=workers, total=total, progress=progress)
    return Verdict(total, [damage for damages in found for damage in damages])


def check_shard(job: CheckJob, tick: Tick) -> list[Damage]:
    """What is wrong with one shard."""
    info, limit_s = job.index.shards[0], job.read_timeout_s
    path = job.root / info.name
    damages: list[Damage] = []
    is_ours = "webdataset" not in job.index.settings
    try:
        shard = read_one(lambda: OpenShard(path), limit_s, str(path))
    except OSError as error:
        return [Damage(info.name, "", -1, info.num_samples, f"the shard cannot be read ({error.strerror})")]

    def read(row: int) -> bytes:
        length = int(job.index.lengths[row])
        # In a tar file of others the label may lie elsewhere, and the header may be of another kind.
        rest = FRAME_BYTES + length + padding(length) if is_ours else BLOCK + length
        return shard.read(int(job.index.offsets[row]) - BLOCK, rest)

    def take(row: int, record: bytes | OSError) -> None:
        key, reason = ("", str(record.strerror)) if isinstance(record, OSError) else _check_record(record, job, row)
        if reason:
            damages.append(Damage(info.name, key, int(job.index.numbers[row]), 1, reason))
        tick()

    read_each(job.index.num_samples, read, take, limit_s, str(path))
    if not is_ours:
        return damages
    try:
        tail = read_one(lambda: shard.read(info.num_bytes - len(END), len(END)), limit_s, str(path))
    except OSError:
        tail = b""
    if tail != END or shard.num_bytes != info.num_bytes:
        sizes = f"{shard.num_bytes:,} bytes where its index says {info.num_bytes:,}"
        damages.append(Damage(info.name, "", -1, 0, f"the shard does not end as it should ({sizes})"))
    return damages


def _check_record(record: bytes, job: CheckJob, row: int) -> tuple[str, str]:
    """The sample's key, and what is wrong with it if anything is."""
    length = int(job.index.lengths[row])
    name, data = parse_name(record[:BLOCK]), record[BLOCK : BLOCK + length]
    key = key_of(name)
    if has_checksums(job.index) and zlib.crc32(data) != job.index.checksums[row]:
        return key, "its bytes do not match their checksum"
    is_ours = "webdataset" not in job.index.settings
    if is_ours and (not name or record != build_record(name, data, int(job.index.labels[row]))):
        return key, "the tar headers or the label around its bytes are damaged"
    if job.decode:
        try:
            decode(data)
        except DecodeError as error:
            return key, f"it is no image ({error})"
    return key, ""
