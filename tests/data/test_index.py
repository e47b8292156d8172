"""The index: what is written is read, damage anywhere is one sentence, and ImageNet's opens at once."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.data.index import ARRAYS, Index, ShardInfo, join_indexes, read_index, split_index, write_index
from lockstep.errors import LockstepError
from tests.data.large_index import NUM_CLASSES, NUM_SAMPLES, write_large


def build(counts: list[int], seed: int = 0) -> Index:
    """An index of shards with these numbers of samples; what it says of them is random."""
    chance = np.random.default_rng(seed)
    total = sum(counts)
    return Index(
        ("ant", "büffel"),
        tuple(ShardInfo(f"train-{number:06d}.tar", count, 10 * count) for number, count in enumerate(counts)),
        ("left/out.jpeg (damaged)",),
        {"shard_mb": 1.5, "short_side": 0, "quality": 0, "source": "abc"},
        offsets=chance.integers(0, 2**40, total),
        labels=chance.integers(0, 2, total),
        lengths=chance.integers(0, 2**32, total, np.uint32),
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
assert train.labels[samples].dtype == np.int64
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
