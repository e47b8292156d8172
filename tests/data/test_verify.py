"""Verifying: any change of a shard is found, and the samples it damaged are named."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.generated import build_generated
from lockstep.data.index import read_index, split_index
from lockstep.data.pack import pack_folder
from lockstep.data.shards import OpenShard, open_shards
from lockstep.data.verify import CheckJob, Verdict, check_shard, verify_shards
from tests.data.pictures import huge_png


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    pack_folder(build_generated(tmp_path / "cache", 40, 10), tmp_path / "pack", shard_mb=0.04)
    return tmp_path / "pack"


def verify(pack: Path, decode: bool = False, workers: int = 1) -> Verdict:
    return verify_shards(pack, decode=decode, workers=workers)


def change(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def test_a_whole_pack_is_whole(pack: Path) -> None:
    assert verify(pack, decode=True) == Verdict(50, [])


def test_several_processes_find_the_same(pack: Path) -> None:
    change(pack / "train-000001.tar", 700)
    assert verify(pack, workers=2) == verify(pack)
    assert verify(pack).num_damaged == 1


def test_every_flipped_byte_is_found_and_its_sample_named(pack: Path) -> None:
    """Anywhere: a header, an image, its padding, a label. Brute force over the shard, by the index's own offsets."""
    tar, index = pack / "train-000000.tar", read_index(pack / "train.index")
    count = index.shards[0].num_samples
    starts, numbers = index.offsets[:count] - 512, index.numbers
    whole = tar.read_bytes()
    for offset in range(0, len(whole), 397):
        change(tar, offset)
        damages = verify(pack).damages
        tar.write_bytes(whole)
        row = int(np.searchsorted(starts, offset, side="right")) - 1
        assert len(damages) == 1, offset
        if offset < len(whole) - 1024:
            assert (damages[0].shard, damages[0].number) == (tar.name, numbers[row])
            assert damages[0].key.startswith(f"{numbers[row]:08d}-") or offset - starts[row] < 512
        else:
            assert "does not end as it should" in str(damages[0])


def test_samples_of_every_shard_are_numbered_as_training_numbers_them(pack: Path) -> None:
    tar, index = pack / "train-000001.tar", read_index(pack / "train.index")
    first = index.shards[0].num_samples
    change(tar, int(index.offsets[first + 2]) + 100)
    (damage,) = verify(pack).damages
    number = int(index.numbers[first + 2])
    assert damage.number == number
    with pytest.raises(OSError, match="its bytes do not match their checksum"):
        open_shards(pack)[0].read(number)
    assert str(damage).startswith(f"train-000001.tar  {number:08d}-")
    assert str(damage).endswith(f"sample {number}: its bytes do not match their checksum")


def test_a_truncated_shard_names_the_samples_it_lost(pack: Path) -> None:
    tar, index = pack / "val-000000.tar", read_index(pack / "val.index")
    tar.write_bytes(tar.read_bytes()[: int(index.offsets[7])])
    verdict = verify(pack)
    assert [damage.number for damage in verdict.damages] == [*index.numbers[7:].tolist(), -1]
    assert verdict.num_damaged == 3


def test_a_missing_shard_counts_all_its_samples(pack: Path) -> None:
    (pack / "val-000000.tar").unlink()
    verdict = verify(pack)
    assert verdict.num_damaged == 10
    assert str(verdict.damages[0]).startswith("val-000000.tar  all of its 10 samples: the shard cannot be read")


def test_a_pipe_in_the_place_of_a_shard_counts_all_its_samples(pack: Path) -> None:
    (pack / "val-000000.tar").unlink()
    os.mkfifo(pack / "val-000000.tar")
    verdict = verify(pack)
    assert verdict.num_damaged == 10
    assert "it is a pipe and not a file" in str(verdict.damages[0])


def test_a_read_that_does_not_come_is_named_and_the_others_are_checked(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = split_index(read_index(pack / "val.index"))[0]
    read, released = OpenShard.read, threading.Event()

    def hang(shard: OpenShard, offset: int, length: int) -> bytes:
        if offset == index.offsets[4] - 512:
            released.wait(60)
        return read(shard, offset, length)

    monkeypatch.setattr(OpenShard, "read", hang)
    change(pack / "val-000000.tar", int(index.offsets[6]))
    damages = check_shard(CheckJob(pack, index, decode=False, read_timeout_s=0.2), lambda: None)
    released.set()
    assert [(damage.number, damage.reason) for damage in damages] == [
        (index.numbers[4], "not read within 0.2 s"),
        (index.numbers[6], "its bytes do not match their checksum"),
    ]


def test_a_longer_shard_is_found(pack: Path) -> None:
    with open(pack / "val-000000.tar", "ab") as file:
        file.write(bytes(512))
    assert "bytes where its index says" in str(verify(pack).damages[0])


def test_what_is_no_image_is_found_by_decoding(tmp_path: Path) -> None:
    folder = build_generated(tmp_path / "cache", 20, 10)
    victim = min((folder / "train" / "bar").iterdir())
    victim.unlink()
    victim.with_suffix(".png").write_bytes(huge_png(40))  # begins and ends as an image does, with nothing in between
    pack_folder(folder, tmp_path / "pack")
    assert verify(tmp_path / "pack").damages == []
    (damage,) = verify(tmp_path / "pack", decode=True).damages
    assert damage.number == 0
    assert "it is no image" in damage.reason
