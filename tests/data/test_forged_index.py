"""Indexes that somebody has altered and signed anew: read rightly or refused in one sentence, whatever they say."""

import json
import random
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data.generated import build_generated
from lockstep.data.inventory import take_inventory
from lockstep.data.pack import pack_folder
from lockstep.data.shards import open_shards
from lockstep.data.verify import verify_shards
from lockstep.errors import LockstepError

NUM_CASES = 500
KINDS = {
    "offsets": np.int64, "labels": np.int64, "names": np.uint64, "lengths": np.uint32, "checksums": np.uint32,
    "numbers": np.uint32,
}  # fmt: skip
NUMBERS = [0, 1, -1, 7, 511, 512, 1024, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63 - 512, -(2**63)]
VALUES: list[Any] = [
    *(*NUMBERS, 10**30, 1e308, float("nan"), float("inf"), 0.5, True, None),
    *("", "x", "../x", "/etc/passwd", "a\0b", "\ud800", ".", "..", ".pack", "train-000000.tar", "9" * 5000),
    *([], {}, [[]], [["a", 1, 2]], [["a", 1]], {"a": 1}, ["ant", "ant"], [1]),
]


class Forgery:
    """An index taken apart, to be altered and put together again."""

    def __init__(self, content: bytes) -> None:
        length = struct.unpack("<I", content[8:12])[0]
        self.header = json.loads(content[16 : 16 + length])
        count, at = self.header["num_samples"], 16 + length
        self.arrays: dict[str, np.ndarray] = {}
        for name, kind in KINDS.items():
            self.arrays[name] = np.frombuffer(content, kind, count, at).copy()
            at += self.arrays[name].nbytes
        self.text: bytes | None = None  # in the header's place
        self.claimed_length: int | None = None
        self.tail = b""

    def signed(self) -> bytes:
        text = json.dumps(self.header).encode() if self.text is None else self.text
        length = len(text) if self.claimed_length is None else self.claimed_length
        body = text + b"".join(array.tobytes() for array in self.arrays.values()) + self.tail
        checksum = zlib.crc32(body, zlib.crc32(struct.pack("<I", length)))
        return b"LSINDEX\n" + struct.pack("<II", length, checksum) + body


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in places(tree[key])]


def change_value(forgery: Forgery, chance: random.Random) -> None:
    tree, key = chance.choice(places(forgery.header))
    tree[key] = chance.choice(VALUES)


def drop_value(forgery: Forgery, chance: random.Random) -> None:
    tree, key = chance.choice(places(forgery.header))
    del tree[key]


def change_count(forgery: Forgery, chance: random.Random) -> None:
    shard = chance.choice(forgery.header["shards"])
    shard[chance.choice([1, 2])] += chance.choice([-512, -1, 1, 512])
    if chance.random() < 0.5:
        forgery.header["num_samples"] = sum(shard[1] for shard in forgery.header["shards"])


def change_array(forgery: Forgery, chance: random.Random) -> None:
    array = forgery.arrays[chance.choice(list(KINDS))]
    for _ in range(chance.choice([1, 1, 1, 5])):
        number = chance.choice([*NUMBERS, chance.randrange(-(2**63), 2**63), int(chance.choice(list(array))) + 512])
        array[chance.randrange(len(array))] = np.array(number % 2**64, np.uint64).astype(array.dtype)


def change_size(forgery: Forgery, chance: random.Random) -> None:
    name = chance.choice(list(KINDS))
    forgery.arrays[name] = forgery.arrays[name][: chance.randrange(len(forgery.arrays[name]))]


def change_text(forgery: Forgery, chance: random.Random) -> None:
    text = bytearray(json.dumps(forgery.header).encode())
    text[chance.randrange(len(text))] = chance.randrange(256)
    forgery.text = chance.choice(
        [bytes(text), b"[" * 100_000, b"", b"null", b"[]", bytes(text[: chance.randrange(99)])]
    )


def change_length(forgery: Forgery, chance: random.Random) -> None:
    forgery.claimed_length = chance.choice([0, 1, 64, 2**31, 2**32 - 1, chance.randrange(2000)])
    forgery.tail = bytes(chance.choice([0, 1, 24]))


CHANGES: list[Callable[[Forgery, random.Random], None]] = [
    change_value, drop_value, change_count, change_array, change_array, change_size, change_text, change_length,
]  # fmt: skip


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("forged")
    pack_folder(build_generated(root / "cache", 30, 10), root / "pack", shard_mb=0.02)
    return root / "pack"


def look(pack: Path, forgery: Forgery) -> bool:
    """Whether it opens; then every sample is what lies at its place, or is not there."""
    try:
        train, _ = open_shards(pack)
    except LockstepError:
        return False
    shards = [name for name, count, _ in forgery.header["shards"] for _ in range(count)]
    assert train.num_samples == len(shards)
    numbers = forgery.arrays["numbers"].tolist()
    assert len(set(numbers)) == len(numbers)
    for row, name in enumerate(shards):
        sample = sorted(numbers).index(numbers[row])
        start, length = int(forgery.arrays["offsets"][row]), int(forgery.arrays["lengths"][row])
        data = (pack / name).read_bytes()[start : start + length]
        if zlib.crc32(data) == forgery.arrays["checksums"][row]:
            assert train.read(sample) == data
        else:
            with pytest.raises(OSError, match="do not match their checksum"):
                train.read(sample)
        assert len(data) == length
        assert 0 <= train.labels[sample] < len(train.classes)
        assert name in train.name(sample)
    return True


def test_a_forged_index_is_read_rightly_or_refused(pack: Path) -> None:
    content = (pack / "train.index").read_bytes()
    num_opened = 0
    for seed in range(NUM_CASES):
        chance = random.Random(seed)
        forgery = Forgery(content)
        for _ in range(chance.choice([1, 1, 2])):
            chance.choice(CHANGES)(forgery, chance)
        (pack / "train.index").write_bytes(forgery.signed())
        try:
            num_opened += look(pack, forgery)
            for use in (lambda: take_inventory(pack, lambda _: lambda done, total: None), lambda: verify(pack)):
                with suppress(LockstepError):
                    use()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    (pack / "train.index").write_bytes(content)
    assert look(pack, Forgery(content))
    assert 0.01 * NUM_CASES < num_opened < 0.5 * NUM_CASES, "the changes are all too gross, or not noticed"


def verify(pack: Path) -> None:
    verify_shards(pack, decode=False, workers=1)


@pytest.mark.parametrize("key", ["format", "shards"])
def test_an_index_with_an_endless_word_is_a_short_sentence(pack: Path, key: str) -> None:
    content = (pack / "train.index").read_bytes()
    forgery = Forgery(content)
    if key == "format":
        forgery.header["format"] = "z" * 5000
    else:
        forgery.header["shards"][0][0] = "z" * 5000
    (pack / "train.index").write_bytes(forgery.signed())
    with pytest.raises(LockstepError, match="is damaged") as caught:
        open_shards(pack)
    (pack / "train.index").write_bytes(content)
    assert len(str(caught.value)) < 500
