"""Images that somebody names: files and folders as they are found, and classes matched by name."""

import os
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.given import GivenImages, Relabeled, find_images, match_classes, open_class_folders
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
    found = find_images([tmp_path / "image.dat", tmp_path / "b"])
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == ["image.dat", "b/2.png", "b/a/1.JPEG", "b/way/6.jpg", "b/z.png/5.jpg"]


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
    with pytest.raises(LockstepError, match=r"7 of the 8 classes of here .* a, c, d, e, f and 2 more; rename"):
        match_classes(source, ("b", "x"), "here")


@pytest.mark.parametrize("split", ["val", "validation", "test", ""])
def test_class_folders_lie_in_the_folder_or_in_its_validation_part(tmp_path: Path, split: str) -> None:
    root = tmp_path / split
    touch(root, "b/1.png", "a/2.png", "a/3.png")
    if split:
        touch(tmp_path, "train/c/1.png")
    source = open_class_folders(tmp_path)
    assert source.classes == ("a", "b")
    assert source.labels.tolist() == [0, 0, 1]
