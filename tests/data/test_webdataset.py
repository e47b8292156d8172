"""Tar files of others: found, labelled and read without an index of ours, and refused in one sentence when damaged."""

import io
import json
import os
import random
import shutil
import tarfile
import time
from pathlib import Path

import pytest

from lockstep.data.generated import build_generated
from lockstep.data.inventory import take_inventory
from lockstep.data.pack import pack_folder
from lockstep.data.shards import open_shards
from lockstep.data.sources import open_folder
from lockstep.data.verify import verify_shards
from lockstep.data.webdataset import Found, TarJob, find_tars, index_tars, look_through, open_tars, refuse_compressed
from lockstep.engine.build import open_sources
from lockstep.errors import LockstepError
from tests.data.pictures import encode, picture
from tests.engine.conftest import tiny_config

PHOTOS = [encode(picture(20, 24, seed)) for seed in range(8)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_tar(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def by_number(first: int, count: int, labels: int = 3) -> list[tuple[str, bytes]]:
    """Samples as most have them: the label before the image, in the order of the alphabet."""
    found: list[tuple[str, bytes]] = []
    for number in range(first, first + count):
        found += [(f"{number:04d}.cls", str(number % labels).encode()), (f"{number:04d}.jpg", PHOTOS[number % 8])]
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tar(tmp_path / "wds" / "set-train-000.tar", by_number(0, 5))
    write_tar(tmp_path / "wds" / "set-train-001.tar", by_number(5, 4))
    write_tar(tmp_path / "wds" / "set-val-000.tar", by_number(0, 3))
    return tmp_path / "wds"


def open_root(root: Path, val_share: float = 0.0):  # type: ignore[no-untyped-def]
    return open_tars(root, find_tars(root), val_share=val_share, workers=1)


def test_samples_and_labels_are_those_in_the_tar_files(root: Path) -> None:
    train, val = open_root(root)
    assert (train.num_samples, val.num_samples) == (9, 3)
    assert [train.read(number) for number in range(9)] == [PHOTOS[number % 8] for number in range(9)]
    assert train.labels.tolist() == [number % 3 for number in range(9)]
    assert train.classes == val.classes == ("0", "1", "2")
    assert train.name(6) == f"{root / 'set-train-001.tar'}: 0006.jpg"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_in_folders_and_odd_members_are_read(tmp_path: Path, form: int) -> None:
    key = f"deep/{'n' * 90}/0001" if form == tarfile.USTAR_FORMAT else f"deep/{'n' * 180}.d/ü0001"
    members = [
        (f"{key}.input.JPEG", PHOTOS[0]),
        (f"{key}.cls", b"1\n"),
        (f"{key}.pkl", b"cos\nsystem\n(S'false'\ntR."),
        ("deep/0002.png", encode(picture(9, 9), "PNG")),
        ("deep/0002.json", json.dumps({"label": 0, "class_name": "ant"}).encode()),
    ]
    write_tar(tmp_path / "wds" / "train" / "0.tar", members, form)
    write_tar(tmp_path / "wds" / "test" / "0.tar", members, form)
    train, _ = open_root(tmp_path / "wds")
    assert [train.read(number) for number in range(2)] == [PHOTOS[0], members[3][1]]
    assert train.labels.tolist() == [1, 0]
    assert train.classes == ("ant", "1")
    assert any("test files (0.tar, …) serve as the validation split" in note for note in train.notes)


def test_class_names_come_from_a_file_beside_the_shards(root: Path) -> None:
    (root / "classes.txt").write_text("ant\nbee\ncow\n")
    assert open_root(root)[0].classes == ("ant", "bee", "cow")


def test_class_names_come_from_a_json_beside_a_number_too(tmp_path: Path) -> None:
    names = ("ant", "bee")
    members = [
        (f"{n}.{kind}", data)
        for n, name in enumerate(names)
        for kind, data in (
            ("jpg", PHOTOS[n]),
            ("cls", str(n).encode()),
            ("json", json.dumps({"label": n, "class_name": name}).encode()),
        )
    ]
    for split in ("train", "val"):
        write_tar(tmp_path / "wds" / f"{split}.tar", members)
    assert open_root(tmp_path / "wds")[0].classes == names


def test_labels_may_be_words(tmp_path: Path) -> None:
    for split, words in (("train", ["cow", "ant"]), ("val", ["bee"])):
        members = [(f"{n}.{kind}", data) for n, word in enumerate(words)
                   for kind, data in (("jpg", PHOTOS[n]), ("cls", word.encode()))]  # fmt: skip
        write_tar(tmp_path / "wds" / f"{split}.tar", members)
    train, val = open_root(tmp_path / "wds")
    assert train.classes == ("ant", "bee", "cow")
    assert (train.labels.tolist(), val.labels.tolist()) == ([2, 0], [1])


def test_the_index_is_kept_until_a_file_changes(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_root(root)
    assert len(list(cache.glob("webdataset-*/train.index"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.data.webdataset.look_through", None)
        assert open_root(root)[0].num_samples == 9
    write_tar(root / "set-train-001.tar", by_number(20, 2))
    os.utime(root / "set-train-001.tar", ns=(time.time_ns(), time.time_ns() + 10**9))
    assert open_root(root)[0].num_samples == 7


def test_a_sample_without_image_or_label_is_left_out_by_name(root: Path) -> None:
    write_tar(
        root / "set-train-002.tar", [("7.jpg", PHOTOS[0]), ("8.cls", b"1"), ("9.cls", b"0"), ("9.jpg", PHOTOS[1])]
    )
    train, _ = open_root(root)
    assert train.num_samples == 10
    (note,) = [note for note in train.notes if "left out" in note]
    assert note.startswith(f"2 samples of {root} cannot be used, and are left out of its index: ")
    assert "set-train-002.tar: 7 (no label)" in note
    assert "set-train-002.tar: 8 (no image)" in note


def test_a_share_is_split_off_by_key(root: Path) -> None:
    shutil.copy(root / "set-train-000.tar", root / "set-train-900.tar")  # the same keys again
    parts = open_root(root, val_share=0.4)
    kept = [{part.name(number).split(": ")[1] for number in range(part.num_samples)} for part in parts]
    assert not kept[0] & kept[1]
    assert sum(part.num_samples for part in parts) == 14
    said = f"data.val_share = 0.4 keeps {parts[1].num_samples} of 14 samples for validation, by a hash of their names."
    assert [note for part in parts for note in part.notes].count(said) == 1


def test_what_is_left_out_is_said_once_where_a_share_is_split_off(root: Path) -> None:
    write_tar(root / "set-train-002.tar", [("7.jpg", PHOTOS[0])])
    notes = [note for part in open_root(root, val_share=0.4) for note in part.notes]
    assert sum("left out" in note for note in notes) == 1


def test_an_index_with_checksums_beside_them_finds_a_flipped_bit(root: Path) -> None:
    assert any("no checksums" in note for note in open_root(root)[0].notes)
    index_tars(root, workers=1)
    train, _ = open_shards(root)
    assert train.labels.tolist() == [number % 3 for number in range(9)]
    assert train.notes == ()
    assert verify_shards(root, decode=True, workers=1).damages == []
    tar = root / "set-train-000.tar"
    content = bytearray(tar.read_bytes())
    content[content.index(PHOTOS[2]) + 300] ^= 1
    tar.write_bytes(content)
    with pytest.raises(OSError, match="do not match their checksum"):
        train.read(2)
    (damage,) = verify_shards(root, decode=False, workers=1).damages
    assert (damage.number, damage.key) == (2, "0002")


def test_a_run_opens_them_and_says_what_they_are(root: Path, tmp_path: Path) -> None:
    sources = open_sources(tiny_config(root).data)
    assert sources.train.num_samples == 9
    splits, sentence = take_inventory(root, lambda title: lambda done, total: None)
    assert [split.num_samples for split in splits] == [9, 3]
    assert "`lockstep data index` adds them" in sentence
    with pytest.raises(
        LockstepError,
        match=r"tar files already, such as set-train-000\.tar, .*as they are: set data\.path to it; `lock",
    ):
        pack_folder(root, tmp_path / "pack")


@pytest.mark.parametrize("val_share", [0.0, 0.1])
def test_a_compressed_training_split_beside_a_plain_one_is_called_that(root: Path, val_share: float) -> None:
    for path in root.glob("set-train-*.tar"):
        path.rename(path.with_suffix(".tar.gz"))
    with pytest.raises(LockstepError, match=r"set-train-000\.tar\.gz and 1 other are compressed"):
        open_root(root, val_share)
    for use in (index_tars, lambda root: take_inventory(root, lambda title: lambda done, total: None)):
        with pytest.raises(LockstepError, match="are compressed"):
            use(root)


def test_an_archive_beside_the_images_that_came_out_of_it_is_left_alone(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build_generated(tmp_path / "cache", 20, 10), tmp_path / "both"))
    (folder / "images.tar.gz").write_bytes(b"\x1f\x8b")
    assert open_sources(tiny_config(folder).data).train.num_samples == 20


def test_tar_files_beside_unpacked_images_are_not_the_data(tmp_path: Path) -> None:
    folder = build_generated(tmp_path / "cache", 20, 10)
    shutil.copytree(folder, tmp_path / "both")
    write_tar(tmp_path / "both" / "ILSVRC_train.tar", by_number(0, 3))
    assert find_tars(tmp_path / "both") == []
    assert open_sources(tiny_config(tmp_path / "both").data).train.num_samples == open_folder(folder)[0].num_samples


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a.tar": by_number(0, 2)}, r"none for training by its name; call them train-… and val-…"),
        ({"train.tar": by_number(0, 2)}, r"none for validation by its name; .*data\.val_share = 0\.1"),
        ({"train.tar": [("a.txt", b"x")], "val.tar": []}, r"No sample .* has an image and a label"),
        ({"train.tar": [("a.jpg", b"x"), ("a.cls", b"99999999")], "val.tar": []}, r"the label 99,999,999, beyond"),
        ({"train.tar": [], "val.tar": by_number(0, 2)}, r"No sample in \S+train\.tar has .*class folders\.$"),
        (
            {"train-0.tar": [("7.jpg", b"x")], "train-1.tar": [], "val.tar": by_number(0, 2)},
            r"train-0\.tar and the others of its split has .*: train-0\.tar: 7 \(no label\) is left out; give each",
        ),
        ({"train.tar": [("7.jpg", b"x"), ("7.cls", b"-1")], "val.tar": by_number(0, 2)}, r"7 \(no label\)"),
        ({"train.tar": [("7.jpg", b"x"), ("7.json", b'{"label": -1}')], "val.tar": by_number(0, 2)}, r"7 \(no label\)"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    tmp_path: Path, files: dict[str, list[tuple[str, bytes]]], sentence: str
) -> None:
    for name, members in files.items():
        write_tar(tmp_path / "wds" / name, members)
    for _ in ("first", "from the cache"):
        with pytest.raises(LockstepError, match=sentence):
            open_root(tmp_path / "wds")


def test_compressed_tar_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(LockstepError, match=r"train\.tar\.gz is compressed.*unpack to plain"):
        refuse_compressed(tmp_path)
    with pytest.raises(LockstepError, match="is compressed"):
        open_sources(tiny_config(tmp_path).data)


def test_a_damaged_tar_file_is_read_rightly_or_one_sentence(tmp_path: Path) -> None:
    whole = [
        write_tar(tmp_path / f"{form}.tar", [*by_number(0, 4), (f"{'x' * 150}.jpg", PHOTOS[0])], form).read_bytes()
        for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    ]
    path = tmp_path / "damaged.tar"
    num_refused = 0
    for seed in range(300):
        chance = random.Random(seed)
        data = bytearray(chance.choice(whole))
        for _ in range(chance.choice([1, 1, 3])):
            block = 512 * chance.randrange(len(data) // 512)
            at = block + chance.choice([0, 100, 124, 135, 148, 156, 257, chance.randrange(512)])
            value = chance.choice([b"\xff" * 8, b"7" * 11, b"L", b"x", b"g", b"S", b"\x80", chance.randbytes(3)])
            data[at : at + len(value)] = value
            header = data[block : block + 512]
            if chance.random() < 0.7 and header[257:262] == b"ustar":  # made right again
                data[block + 148 : block + 156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        start = time.process_time()
        found = Found()
        try:
            found = look_through(TarJob(path, True), lambda: None)
        except LockstepError:
            num_refused += 1
        for offset, length in zip(found.offsets, found.lengths, strict=True):
            assert 0 < offset <= len(data) - length
        assert time.process_time() - start < 2
    assert 20 < num_refused < 290


def test_an_index_with_checksums_makes_no_other_data_of_the_tar_files(root: Path) -> None:
    before = open_root(root)[0].fingerprint()
    index_tars(root, workers=1)
    after = open_shards(root)[0].fingerprint()
    assert len(before["images"].split()) > 1
    common = before.keys() & after.keys()
    assert common == {"labels", "images"}
    assert all(before[kind] == after[kind] for kind in common)
