"""The index: what is written is read, damage anywhere is one sentence, and ImageNet's opens at once."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.data.index import ARRAYS, Index, join_indexes, read_index, split_index, write_index
from lockstep.data.index_check import ShardInfo
from lockstep.errors import LockstepError
from tests.data.large_index import NUM_CLASSES, NUM_SAMPLES, write_large


def build(counts: list[int], seed: int = 0) -> Index:
    """An index of shards with these numbers of samples, of random lengths one behind the other, as a tar has them."""
    chance = np.random.default_rng(seed)
    total = sum(counts)
    lengths = chance.integers(0, 5000, total).astype(np.uint32)
    offsets: list[int] = []
    shards: list[ShardInfo] = []
    for number, count in enumerate(counts):
        at = 0
        for length in lengths[len(offsets) : len(offsets) + count].tolist():
            offsets.append(at + 512)
            at += 512 + 512 * -(-length // 512) + 1024  # the header, the sample, and its label as a file of its own
        shards.append(ShardInfo(f"train-{number:06d}.tar", count, at + 1024))
    return Index(
        ("ant", "büffel"),
        tuple(shards),
        ("left/out.jpeg (damaged)",),
        {"shard_mb": 1.5, "short_side": 0, "quality": 0, "source": "abc"},
        offsets=np.array(offsets, np.int64),
        labels=chance.integers(0, 2, total),
        lengths=lengths,
        checksums=chance.integers(0, 2**32, total, np.uint32),
    )


def same(left: Index, right: Index) -> bool:
    arrays = all(np.array_equal(getattr(left, name), getattr(right, name)) for name in ARRAYS)
    return arrays and (left.classes, left.shards, left.settings) == (right.classes, right.shards, right.settings)


@pytest.mark.parametrize("counts", [[1], [3, 1, 5], [0], [2, 0, 7]])
def test_what_is_written_is_read(tmp_path: Path, counts: list[int]) -> None:
    index = build(counts)
    write_index(tmp_path / "train.index", index)
    read = read_index(tmp_path / "train.index")
    assert same(read, index)
    assert read.skipped == index.skipped
    assert [path.name for path in tmp_path.iterdir()] == ["train.index"]


def test_labels_taken_from_it_are_a_copy_of_the_usual_kind(tmp_path: Path) -> None:
    write_index(tmp_path / "train.index", build([9]))
    labels = read_index(tmp_path / "train.index").labels[np.array([3, 1])]
    assert labels.dtype == np.int64
    labels[0] = 5  # a bad sample's label gives way to its neighbour's


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
@settings(deadline=None)
def test_joining_the_parts_gives_the_whole(counts: list[int]) -> None:
    index = build(counts)
    parts = split_index(index)
    assert [part.num_samples for part in parts] == counts
    assert same(join_indexes(parts), index)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_change_of_any_bit_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "train.index"
    write_index(path, build([3, 2]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(LockstepError, match=r"The index .*/train\.index is damaged \(.*\); copy it again"):
        read_index(path)


@pytest.mark.parametrize("length", [0, 5, 16, 100, 300])
def test_a_truncated_index_is_one_sentence(tmp_path: Path, length: int) -> None:
    path = tmp_path / "train.index"
    write_index(path, build([3]))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(LockstepError, match="is damaged"):
        read_index(path)


def test_an_index_cut_short_after_it_was_opened_changes_nothing(tmp_path: Path) -> None:
    path, index = tmp_path / "train.index", build([2000])
    write_index(path, index)
    read = read_index(path)
    os.truncate(path, 0)  # under a map, the next look would end the process
    assert same(read, index)


@pytest.mark.parametrize(
    ("name", "value"),
    [("labels", value) for value in (-1, 2, 2**62)]
    + [("lengths", value) for value in (10_000, 2**31, 2**32 - 1)]
    + [("offsets", value) for value in (-512, 0, 700, 2**15, 2**62, 2**63 - 512)],
)
def test_a_number_that_cannot_be_true_is_one_sentence(tmp_path: Path, name: str, value: int) -> None:
    index = build([3, 2])
    getattr(index, name)[3] = value
    write_index(tmp_path / "train.index", index)
    with pytest.raises(LockstepError, match=r"train\.index is damaged \(sample 3 "):
        read_index(tmp_path / "train.index")


def test_a_pipe_under_the_name_of_an_index_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.index")
    with pytest.raises(LockstepError, match=r"train\.index cannot be read \(it is a pipe and not a file\)"):
        read_index(tmp_path / "train.index")


def test_a_missing_index_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"train\.index cannot be read \(No such file or directory\)"):
        read_index(tmp_path / "train.index")


OPEN_LARGE = """
import sys, time
from pathlib import Path
import numpy as np
from lockstep.data.shards import open_shards
from tests.data.large_index import resident_mb
before, start = resident_mb(), time.perf_counter()
train, val = open_shards(Path(sys.argv[1]))
seconds = time.perf_counter() - start
opened = resident_mb() - before
samples = np.random.default_rng(0).integers(0, train.num_samples, 3000)
assert all(len(train.read(int(sample))) for sample in samples)
assert train.labels[samples].max() < 1000
print(train.num_samples, len(train.classes), seconds, opened, resident_mb() - before)
"""


def test_an_index_of_imagenet_opens_in_little_time_and_memory(tmp_path: Path) -> None:
    write_large(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run(
        [sys.executable, "-c", OPEN_LARGE, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    num_samples, num_classes, seconds, opened_mb, used_mb = map(float, out.split())
    print(f"opened in {seconds:.3f} s, {opened_mb:.1f} MB; after 3,000 reads {used_mb:.1f} MB")
    assert (num_samples, num_classes) == (NUM_SAMPLES, NUM_CLASSES)
    assert used_mb < 100
    assert seconds < 10  # 0.1 s on a quiet machine
