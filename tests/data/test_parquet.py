"""Image sets in Parquet: packed with the bytes, labels and class names they have; a sentence without pyarrow."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.inventory import take_inventory
from lockstep.data.pack import pack_folder
from lockstep.data.parquet import holds_parquet, open_parquet
from lockstep.data.shards import open_shards
from lockstep.engine.build import open_sources
from lockstep.engine.fit import describe_fit
from lockstep.errors import LockstepError
from tests.data.pictures import encode, picture
from tests.engine.conftest import tiny_config

PHOTOS = [encode(picture(20, 24, seed), "PNG" if seed == 3 else "JPEG") for seed in range(30)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_set(path: Path, first: int, count: int, names: list[str] | None = None, **columns: list[Any]) -> None:
    """As Hugging Face writes them: a struct of bytes and path, whole numbers, the names in the schema."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    numbers = range(first, first + count)
    images = [{"bytes": PHOTOS[number], "path": None} for number in numbers]
    table = arrow.table({"image": images, "label": [number % 3 for number in numbers]} | columns)
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=4)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "set" / "data"
    write_set(root / "train-00000-of-00002.parquet", 0, 11, ["ant", "bee", "cow"])
    write_set(root / "train-00001-of-00002.parquet", 11, 9, ["ant", "bee", "cow"])
    write_set(root / "validation-00000-of-00001.parquet", 20, 6, ["ant", "bee", "cow"])
    return tmp_path / "set"


def test_rows_labels_and_names_are_those_of_the_files(root: Path) -> None:
    assert holds_parquet(root)
    train, val = open_parquet(root)
    assert [train.read(number) for number in range(20)] == PHOTOS[:20]
    assert [val.read(number) for number in range(6)] == PHOTOS[20:26]
    assert train.labels.tolist() == [number % 3 for number in range(20)]
    assert train.classes == val.classes == ("ant", "bee", "cow")
    assert train.name(12) == f"{root / 'data' / 'train-00001-of-00002.parquet'}/row-1"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_set_is_packed_in_its_own_order(root: Path, tmp_path: Path, workers: int) -> None:
    pack_folder(root, tmp_path / "pack", shard_mb=0.01, workers=workers)
    train, _ = open_shards(tmp_path / "pack")
    assert [train.read(number) for number in range(20)] == PHOTOS[:20]
    assert train.labels.tolist() == [number % 3 for number in range(20)]
    assert train.name(3).endswith(": 00000003-row-3.png")
    assert train.name(12).endswith(": 00000012-row-1.jpg")


def test_a_run_packs_it_once_into_the_cache(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_config(root).data
    assert open_sources(data).train.num_samples == 20
    assert len(list(cache.glob("parquet-*/train.index"))) == 1
    monkeypatch.setattr("lockstep.data.pack.pack_folder", None)
    assert open_sources(data).train.read(12) == PHOTOS[12]


def test_what_the_files_hold_is_told_without_packing_them(root: Path, cache: Path) -> None:
    (root / "data" / "validation-00000-of-00001.parquet").rename(root / "data" / "test.parquet")
    splits, sentence = take_inventory(root, lambda title: lambda done, total: None)
    assert [(split.num_samples, split.num_classes, split.num_shards) for split in splits] == [(20, 3, 0), (6, 3, 0)]
    assert splits[0].num_bytes > sum(map(len, PHOTOS[:20])) / 2
    assert sentence.startswith("A set in Parquet")
    assert "serve as the validation split" in sentence
    assert not cache.exists()


def test_a_share_is_split_off(root: Path) -> None:
    (root / "data" / "validation-00000-of-00001.parquet").unlink()
    with pytest.raises(LockstepError, match=r"none for validation by its name; .*data\.val_share = 0\.1"):
        open_parquet(root)
    train, val = open_parquet(root, val_share=0.3)
    both = [part.read(number) for part in (train, val) for number in range(part.num_samples)]
    assert sorted(both) == sorted(PHOTOS[:20])
    sources = open_sources(tiny_config(root, "data.val_share=0.3").data)
    assert sources.val.num_samples == val.num_samples


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ([], "its test files (test-00000.parquet, …) serve as the validation split."),
        (["data.val_share=0.3"], "of 20 samples for validation, by a hash of their names."),
        (["data.val_share=0.3"], "splits the training files; test-00000.parquet is not used."),
    ],
)
def test_a_run_says_what_serves_as_validation_with_each_opening(root: Path, settings: list[str], sentence: str) -> None:
    files = root / "data"
    (files / "validation-00000-of-00001.parquet").rename(files / "test-00000.parquet")
    config = tiny_config(root, *settings)
    for _ in range(2):  # packed now, and found in the cache
        texts = [notice.text for notice in describe_fit(config, open_sources(config.data))]
        assert sum(sentence in text for text in texts) == 1


def test_a_row_without_an_image_is_left_out_only_when_asked(root: Path, tmp_path: Path) -> None:
    images = [{"bytes": None, "path": "elsewhere.jpg"}, {"bytes": b"no image", "path": None}]
    write_set(root / "data" / "train-00002.parquet", 0, 2, image=images)
    with pytest.raises(
        LockstepError, match=r"2 files cannot be packed: .*row-0 \(its row holds no bytes of an image\)"
    ):
        pack_folder(root, tmp_path / "pack")
    assert pack_folder(root, tmp_path / "pack", skip_bad=True)[0].num_samples == 20


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"label": [-1] * 4}, "a row without a label"),
        ({"label": [None] * 4}, "a row without a label"),
        ({"label": [1.0] * 4}, "has a float as a label where a whole number or a word is wanted; convert it"),
        ({"label": [[1, 2]] * 4}, "has a list as a label where"),
        ({"label": [10**8] * 4}, "the label 100,000,000, beyond"),
        ({"image": ["x"] * 4}, "has the columns image, label, but none with images' bytes"),
    ],
)
def test_a_set_that_cannot_be_used_is_one_sentence(root: Path, change: dict[str, list[Any]], sentence: str) -> None:
    write_set(root / "data" / "train-00000-of-00002.parquet", 0, 4, **change)
    with pytest.raises(LockstepError, match=sentence):
        open_parquet(root)


def test_a_damaged_file_is_one_sentence(root: Path) -> None:
    path = root / "data" / "train-00000-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(LockstepError, match=r"train-00000-of-00002\.parquet cannot be read .*copy it again"):
        open_parquet(root)


def test_without_pyarrow_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LockstepError, match=r"takes pyarrow to read; install it with `pip install pyarrow`"):
        open_sources(tiny_config(tmp_path).data)
