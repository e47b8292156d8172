"""Shards as a source: from many threads, with few files open, and the sentence for each thing that can be wrong."""

import json
import os
import pickle
import resource
import shutil
import struct
import timeit
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.decode import decode
from lockstep.data.generated import build_generated
from lockstep.data.index import ARRAYS, Index, read_index, write_index
from lockstep.data.pack import pack_folder
from lockstep.data.reader import SampleReader
from lockstep.data.shards import Shards, is_packed, open_shards
from lockstep.data.sources import IMAGES, ImageFolder, open_folder
from lockstep.errors import LockstepError
from tests.data.pictures import encode, picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_generated(tmp_path_factory.mktemp("cache"), 60, 20)


@pytest.fixture
def pack(folder: Path, tmp_path: Path) -> Path:
    pack_folder(folder, tmp_path / "pack", shard_mb=0.02)
    return tmp_path / "pack"


def bytes_of(source: Shards | ImageFolder) -> list[bytes]:
    return [source.read(number) for number in range(source.num_samples)]


def count_open(root: Path) -> int:
    """Shards of this folder that this process has open."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.startswith(str(root)) and link.endswith(".tar") for link in links)


def test_many_threads_read_through_few_open_files(folder: Path, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (9, 9))
    train = open_shards(pack)[0]
    assert len(list(pack.glob("train-*.tar"))) > 3
    expected = bytes_of(open_folder(folder)[0])
    with ThreadPoolExecutor(8) as pool:
        for turn in range(5):
            numbers = sorted(range(60), key=lambda number: hash((turn, number)))
            assert list(pool.map(train.read, numbers)) == [expected[number] for number in numbers]
    assert count_open(pack) <= 3
    del train
    assert count_open(pack) == 0


def test_a_sample_is_named_by_shard_and_file(folder: Path, pack: Path) -> None:
    last = Path(open_folder(folder)[0].name(59)).name
    tar = sorted(pack.glob("train-*.tar"))[-1]
    assert open_shards(pack)[0].name(59) == f"{tar}: 00000059-{last}"


def test_a_shard_gone_after_opening_is_an_error_of_the_sample(pack: Path) -> None:
    train = open_shards(pack)[0]
    tar = sorted(pack.glob("train-*.tar"))[-1]
    tar.write_bytes(tar.read_bytes()[:600])
    with pytest.raises(OSError, match="the shard ends too early"):
        train.read(59)
    tar.unlink()
    fresh = Shards(pack, read_index(pack / "train.index"))
    with pytest.raises(FileNotFoundError):
        fresh.read(59)
    assert fresh.name(59) == f"{tar}: sample 59"


def test_a_missing_shard_is_one_sentence(pack: Path) -> None:
    (pack / "train-000001.tar").unlink()
    with pytest.raises(LockstepError, match=r"train-000001\.tar cannot be read \(No such file or directory\); copy"):
        open_shards(pack)


def test_a_truncated_shard_is_one_sentence(pack: Path) -> None:
    tar = pack / "val-000000.tar"
    tar.write_bytes(tar.read_bytes()[:-1000])
    with pytest.raises(LockstepError, match=r"val-000000\.tar has [\d,]+ bytes where its index says [\d,]+; copy"):
        open_shards(pack)


def test_a_pipe_under_the_name_of_a_shard_is_one_sentence(pack: Path) -> None:
    (pack / "train-000001.tar").unlink()
    os.mkfifo(pack / "train-000001.tar")
    with pytest.raises(LockstepError, match=r"train-000001\.tar cannot be read \(it is a pipe and not a file\); copy"):
        open_shards(pack)


def test_a_pipe_in_the_place_of_a_shard_after_opening_is_an_error_of_the_sample(pack: Path) -> None:
    train = open_shards(pack)[0]
    (pack / "train-000000.tar").unlink()
    os.mkfifo(pack / "train-000000.tar")
    with pytest.raises(OSError, match="it is a pipe and not a file"):
        train.read(int(read_index(pack / "train.index").numbers[0]))


def test_an_index_without_samples_is_one_sentence(pack: Path) -> None:
    index = read_index(pack / "val.index")
    write_index(pack / "val.index", Index(index.classes, (), (), index.settings, **{k: np.empty(0) for k in ARRAYS}))
    with pytest.raises(LockstepError, match="names no sample"):
        open_shards(pack)


def test_a_copy_in_another_process_reads_the_same(pack: Path) -> None:
    train = open_shards(pack)[0]
    train.read(0)
    copy = pickle.loads(pickle.dumps(train))
    assert bytes_of(copy) == bytes_of(train)
    assert copy.labels.tolist() == train.labels.tolist()


def test_a_missing_index_is_one_sentence(pack: Path) -> None:
    (pack / "val.index").unlink()
    with pytest.raises(LockstepError, match=r"val\.index cannot be read"):
        open_shards(pack)


def test_splits_of_different_packs_are_one_sentence(pack: Path, tmp_path: Path) -> None:
    index = read_index(pack / "val.index")
    object.__setattr__(index, "classes", tuple(f"{name}s" for name in index.classes))
    write_index(pack / "val.index", index)
    with pytest.raises(LockstepError, match="name different classes"):
        open_shards(pack)


def test_other_files_beside_the_shards_do_no_harm(folder: Path, pack: Path) -> None:
    (pack / "notes.txt").write_text("mine")
    (pack / "train-999999.tar").write_text("not of this pack")
    assert bytes_of(open_shards(pack)[0]) == bytes_of(open_folder(folder)[0])


def test_a_folder_of_images_is_not_a_pack(folder: Path, pack: Path, tmp_path: Path) -> None:
    assert is_packed(pack)
    assert not is_packed(folder)
    assert not is_packed(tmp_path / "nowhere")


def flip(pack: Path, sample: int) -> str:
    """Flip one bit in the middle of a sample; the shard's name."""
    index = read_index(pack / "train.index")
    row = index.numbers.tolist().index(sample)
    names = [shard.name for shard in index.shards for _ in range(shard.num_samples)]
    content = bytearray((pack / names[row]).read_bytes())
    content[int(index.offsets[row]) + int(index.lengths[row]) // 2] ^= 0x04
    (pack / names[row]).write_bytes(content)
    return names[row]


def test_a_flipped_bit_is_found_when_the_sample_is_read(pack: Path) -> None:
    flip(pack, 7)
    train = open_shards(pack)[0]
    with pytest.raises(OSError, match="its bytes do not match their checksum"):
        train.read(7)
    assert all(train.read(number) for number in range(60) if number != 7)
    assert open_shards(pack, checks_bytes=False)[0].read(7)
    assert pickle.loads(pickle.dumps(train)).labels.tolist() == train.labels.tolist()


def test_a_flipped_bit_is_a_bad_sample_with_a_name(pack: Path) -> None:
    tar = flip(pack, 7)
    reader = SampleReader(open_shards(pack)[0], bad_share=0.1)
    assert reader.load(7) is None
    assert reader.load(8) is not None
    assert list(reader.bad) == [7]
    assert reader.bad[7].startswith(f"{pack / tar}: 00000007-")
    assert reader.bad[7].endswith("(its bytes do not match their checksum)")


def test_a_pack_of_the_first_format_is_still_read(folder: Path, tmp_path: Path) -> None:
    """Written here as that version wrote it: four arrays, shards in the order of the samples."""
    pack_folder(folder, tmp_path / "pack", shard_mb=0.02, shuffle=False)
    for split in ("train", "val"):
        path = tmp_path / "pack" / f"{split}.index"
        index = read_index(path)
        header = {
            "format": 1, "num_samples": index.num_samples, "classes": index.classes, "settings": dict(index.settings),
            "shards": index.shards, "skipped": [],
        }  # fmt: skip
        text = json.dumps(header).encode()
        text += b" " * (-(16 + len(text)) % 64)
        arrays = (index.offsets, index.labels, index.lengths, index.checksums)
        body = text + b"".join(array.tobytes() for array in arrays)
        length = struct.pack("<I", len(text))
        checksum = zlib.crc32(body, zlib.crc32(length))
        path.write_bytes(b"LSINDEX\n" + length + struct.pack("<I", checksum) + body)
    assert bytes_of(open_shards(tmp_path / "pack")[0]) == bytes_of(open_folder(folder)[0])
    train, val = open_shards(tmp_path / "pack", val_share=0.3)
    assert sorted(bytes_of(train) + bytes_of(val)) == sorted(bytes_of(open_folder(folder)[0]))


def test_a_checksum_costs_little_beside_decoding() -> None:
    rough = np.random.default_rng(0).integers(-20, 20, (375, 500, 3))
    photo = encode((picture(375, 500) + rough).clip(0, 255).astype(np.uint8), quality=85, subsampling=2)

    def seconds(work: Callable[[], object], count: int) -> float:
        return min(timeit.repeat(work, number=count, repeat=5)) / count

    checking, decoding = seconds(lambda: zlib.crc32(photo), 200), seconds(lambda: decode(photo), 10)
    print(
        f"{len(photo):,} bytes: checksum {len(photo) / checking / 1e6:,.0f} MB/s, decoding "
        f"{len(photo) / decoding / 1e6:,.0f} MB/s, {checking / decoding:.1%} of it"
    )
    assert checking < 0.2 * decoding


def test_what_was_left_out_of_a_pack_is_a_note_of_it(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    victim = min((copy / "train" / "bar").iterdir())
    victim.write_bytes(b"no image")
    pack_folder(copy, tmp_path / "pack", skip_bad=True)
    train, val = open_shards(tmp_path / "pack")
    assert val.notes == ()
    (note,) = train.notes
    assert note.startswith("1 sample of ")
    assert str(victim) in note


def test_a_pack_has_the_images_of_its_folder_in_its_fingerprint_and_no_other_has(
    folder: Path, pack: Path, tmp_path: Path
) -> None:
    images = open_folder(folder)[0].fingerprint()[IMAGES]
    assert len(images.split()) == 32
    assert open_shards(pack)[0].fingerprint()[IMAGES] == images
    pack_folder(folder, tmp_path / "small", short_side=16)
    assert open_shards(tmp_path / "small")[0].fingerprint()[IMAGES] != images
