"""Images that somebody names: files and folders as they are found, and classes matched by name."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.data.given import (
    GivenImage,
    GivenImages,
    Relabeled,
    find_images,
    list_given,
    match_classes,
    open_class_folders,
    open_folders,
    open_object,
)
from lockstep.errors import LockstepError


class Listed:
    """A source of numbers."""

    def __init__(self, classes: tuple[str, ...], labels: list[int]) -> None:
        self.classes, self.labels = classes, np.array(labels)
        self.num_samples = len(labels)

    def read(self, index: int) -> bytes:
        return bytes([index])

    def name(self, index: int) -> str:
        return f"sample {index}"


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def test_folders_are_searched_to_the_bottom_and_files_taken_as_they_are(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.png", "b/a/1.JPEG", "b/notes.txt", "b/.hidden/3.png", "b/.4.png", "image.dat", "b/z.png/5.jpg")
    (tmp_path / "b" / "loop").symlink_to(tmp_path / "b")
    (tmp_path / "elsewhere").mkdir()
    touch(tmp_path, "elsewhere/6.jpg")
    (tmp_path / "b" / "way").symlink_to(tmp_path / "elsewhere")
    found, notes = find_images([tmp_path / "image.dat", tmp_path / "b"])
    assert len(notes) == 1
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == ["image.dat", "b/2.png", "b/a/1.JPEG", "b/way/6.jpg", "b/z.png/5.jpg"]


def test_a_link_to_a_folder_above_adds_no_other_images(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert find_images([tmp_path / "a"])[0] == [tmp_path / "a" / "1.png"]


def test_a_folder_among_images_becomes_its_images(tmp_path: Path) -> None:
    touch(tmp_path, "a/2.png", "a/1.png")
    given: list[GivenImage] = [b"x", str(tmp_path / "a"), "nowhere.png"]
    assert open_folders(given) == [b"x", tmp_path / "a" / "1.png", tmp_path / "a" / "2.png", "nowhere.png"]


def test_what_is_left_out_is_counted_by_suffix(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "b/c.HEIC", "b/d.heic", "e.avif", "f", "g.txt", ".hidden.txt")
    found, (note,) = find_images([tmp_path])
    assert found == [tmp_path / "a.png"]
    assert note.startswith("5 of the files there are left out")
    assert "2 .heic, " in note
    assert all(f"1 {kind}" in note for kind in (".avif", "without a suffix", ".txt"))
    assert f"such as {tmp_path / 'b' / 'c.HEIC'}; " in note
    assert find_images([tmp_path / "a.png", tmp_path / "g.txt"])[1] == ()  # what is named is looked at


def test_one_image_alone_is_a_list_of_one(tmp_path: Path) -> None:
    picture = Image.new("L", (3, 2), 7)
    for image in ("x.jpg", tmp_path, b"bytes", bytearray(b"bytes"), picture):
        assert list_given(image) == [image]
    many: list[GivenImage] = ["a", b"b"]
    assert list_given(iter(many)) == many
    with pytest.raises(LockstepError, match=r"^Image 1 comes as ndarray; give paths of files, .*PIL images\.$"):
        list_given(["a", np.zeros((2, 2))])  # type: ignore[list-item]
    with pytest.raises(LockstepError, match=r"^The images come as int; give paths"):
        list_given(3)  # type: ignore[arg-type]


def test_a_pil_image_is_read_without_loss_and_a_broken_one_is_no_image(tmp_path: Path) -> None:
    picture = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    picture.save(tmp_path / "whole.png")
    cut = (tmp_path / "whole.png").read_bytes()[:50]
    source = GivenImages([picture, Image.open(io.BytesIO(cut))])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(source.read(0)))), np.asarray(picture))
    assert source.name(0) == "image 0"
    with pytest.raises(OSError) as caught:  # noqa: PT011
        source.read(1)
    assert caught.value.strerror


def test_what_is_not_there_or_empty_is_a_sentence(tmp_path: Path) -> None:
    for place, words in ((tmp_path / "no", "No such file"), (tmp_path, "holds no images"), (Path("a\0b"), "null")):
        with pytest.raises(LockstepError, match=words):
            find_images([place])


def test_given_images_are_read_from_disk_and_memory(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    source = GivenImages([tmp_path / "a.png", b"y", str(tmp_path / "a.png")])
    assert [source.read(place) for place in range(source.num_samples)] == [b"x", b"y", b"x"]
    assert source.name(1) == "image 1"
    assert source.name(2) == os.fspath(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        GivenImages([tmp_path / "pipe"]).read(0)


def test_labels_become_the_networks_own() -> None:
    source = Listed(("cat", "dog"), [0, 1, 1, 0])
    found = match_classes(source, ("ant", "dog", "eel", "cat"), "here")
    assert isinstance(found, Relabeled)
    assert found.labels.tolist() == [3, 1, 1, 3]
    assert (found.read(2), found.name(2), found.num_samples) == (b"\2", "sample 2", 4)
    assert match_classes(source, ("cat", "dog"), "here") is source


def test_unknown_classes_are_named_a_few_of_them() -> None:
    source = Listed(tuple("abcdefgh"), list(range(8)))
    with pytest.raises(
        LockstepError, match=r"no class of the name a, c, d, e, f and 2 more \(7 of 8 in here\), only b, x; rename"
    ):
        match_classes(source, ("b", "x"), "here")


@pytest.mark.parametrize("split", ["val", "validation", "test", ""])
def test_class_folders_lie_in_the_folder_or_in_its_validation_part(tmp_path: Path, split: str) -> None:
    root = tmp_path / split
    touch(root, "b/1.png", "a/2.png", "a/3.png")
    if split:
        touch(tmp_path, "train/c/1.png")
    source = open_class_folders(tmp_path, ("z", "b", "a"))
    assert source.classes == ("z", "b", "a")
    assert source.labels.tolist() == [2, 2, 1]
    said = (
        () if split in ("", "val") else (f"There is no val/ in {tmp_path}; {split}/ serves as the validation split.",)
    )
    assert source.notes == said  # type: ignore[attr-defined]
    (root / "notes").mkdir()  # said before anything is looked for in there
    with pytest.raises(LockstepError, match="no class of the name notes"):
        open_class_folders(tmp_path, ("a", "b"))


def test_labels_may_come_from_a_table_and_what_is_said_is_handed_on(tmp_path: Path) -> None:
    touch(tmp_path, "test/1.png", "test/2.png")
    (tmp_path / "test" / "metadata.csv").write_text("file_name,label\n2.png,b\n1.png,a\n")
    source = open_class_folders(tmp_path, ("z", "b", "a"))
    assert sorted((source.name(place), int(source.labels[place])) for place in range(2)) == [
        (str(tmp_path / "test" / "1.png"), 2),
        (str(tmp_path / "test" / "2.png"), 1),
    ]
    table, serves = source.notes  # type: ignore[attr-defined]
    assert "column label" in table
    assert "test/ serves as the validation split" in serves


class Two:
    """A data set of two samples."""

    def __init__(self, labels: list[int], **members: Any) -> None:
        self.labels = labels
        vars(self).update(members)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        return bytes([number]), self.labels[number]


def test_an_object_has_the_networks_labels_or_classes_by_name() -> None:
    known = ("ant", "bee", "cow")
    assert open_object(Two([2, 0]), known).labels.tolist() == [2, 0]
    named = open_object(Two([1, 0], classes=["cow", "ant"]), known)
    assert (named.labels.tolist(), named.classes, named.read(1)) == ([0, 2], known, b"\1")
    with pytest.raises(LockstepError, match=r"Sample 1 of the validation data \(Two\) has label 3; .* the 3 classes"):
        open_object(Two([0, 3]), known)
    with pytest.raises(LockstepError, match="no class of the name yak"):
        open_object(Two([0, 1], classes=["ant", "yak"]), known)
    with pytest.raises(LockstepError, match=r"The validation data \(int\) cannot be used"):
        open_object(3, known)
