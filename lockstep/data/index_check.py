"""Whether an index can be true: each of its numbers against what it describes, before anybody relies on one.

A checksum only tells that a file is as somebody wrote it; it may have been written wrongly, or to do harm. ValueError
says what is wrong first. Torch-free.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.data.record import BLOCK, END, FRAME_BYTES

MAX_SHARD_BYTES = 1 << 40  # so that a place in a shard, counted in blocks, fits 32 bits
# In the index's own folder or, of tar files of others, in one below it; and not hidden.
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199})?")


class ShardInfo(NamedTuple):
    """A shard as the index knows it."""

    name: str
    num_samples: int
    num_bytes: int


def check_header(header: Any, newest_format: int) -> None:
    """Refuse a header that lacks something or says something impossible."""
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    if not _is_count(header.get("format")) or not 1 <= header["format"] <= newest_format:
        raise ValueError(f"it has format {str(header.get('format'))[:40]}, this version reads 1 to {newest_format}")
    faults = {
        "num_samples": not _is_count(header.get("num_samples")),
        "classes": not _are_names(header.get("classes")) or not header["classes"],
        "settings": not _are_settings(header.get("settings")),
        "shards": not _are_shards(header.get("shards")),
        "skipped": not _is_list_of(str, header.get("skipped")),
    }
    for name, is_wrong in faults.items():
        if is_wrong:
            raise ValueError(f"its header says nothing possible of {name}")
    if sum(shard[1] for shard in header["shards"]) != header["num_samples"]:
        raise ValueError(f"its shards do not add up to {header['num_samples']:,} samples")


def _is_count(value: Any, most: int = MAX_SHARD_BYTES) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _are_names(value: Any) -> bool:
    return _is_list_of(str, value) and all(value) and len(set(value)) == len(value)


def _are_shards(value: Any) -> bool:
    if not _is_list_of(list, value) or any(len(shard) != len(ShardInfo._fields) for shard in value):
        return False
    names = [shard[0] for shard in value]
    counts = [number for shard in value for number in shard[1:]]
    return _are_names(names) and all(map(SHARD_NAME.fullmatch, names)) and all(map(_is_count, counts))


def _are_settings(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("source"), str):
        return False
    shard_mb = value.get("shard_mb")
    is_size = isinstance(shard_mb, int | float) and 0 < shard_mb <= MAX_SHARD_BYTES  # which a NaN is not
    return is_size and _is_count(value.get("short_side")) and _is_count(value.get("quality"))


def check_arrays(
    num_classes: int,
    shards: Sequence[ShardInfo],
    offsets: NDArray[np.int64],
    labels: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    is_ours: bool = True,
) -> None:
    """Refuse a sample of a class that there is not, or that does not lie in its shard as a record does.

    By reductions, which need no memory of the arrays' size. In shards that are not `is_ours` a label may come first.
    """
    if not len(labels):
        return
    if labels.min() < 0 or labels.max() >= num_classes:
        _refuse(0, (labels < 0) | (labels >= num_classes), f"has a label beyond the {num_classes} classes")
    if offsets.min() < BLOCK or offsets.max() > MAX_SHARD_BYTES or np.bitwise_or.reduce(offsets) % BLOCK:
        is_out = (offsets < BLOCK) | (offsets > MAX_SHARD_BYTES)
        _refuse(0, is_out | (offsets % BLOCK != 0), "does not lie where a record can")
    first = 0
    for shard in shards:
        last = first + shard.num_samples
        ends = offsets[first:last] + lengths[first:last]
        # Behind a sample come the rest of its block, its label and the end of the shard.
        room = (shard.num_bytes - (FRAME_BYTES - BLOCK) - len(END)) // BLOCK * BLOCK if is_ours else shard.num_bytes
        if last > first and ends.max() > room:
            _refuse(first, ends > room, f"lies beyond the end of {shard.name}")
        first = last


def plan_order(numbers: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The place of each number, from the least on; refuses a number that comes twice."""
    count = len(numbers)
    order = np.full(count, -1, np.int64)
    if count and int(numbers.max()) < count:  # as in every finished pack, where nothing has to be sorted
        order[numbers] = np.arange(count)
        if (order < 0).any():
            raise ValueError("a sample has the number of another")
        return order
    order = np.argsort(numbers, kind="stable")
    if count and not (np.diff(numbers[order].astype(np.int64)) > 0).all():
        raise ValueError("a sample has the number of another")
    return order


def _refuse(first: int, is_wrong: NDArray[np.bool_], what: str) -> None:
    raise ValueError(f"sample {first + int(is_wrong.argmax())} {what}")
