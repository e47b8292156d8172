"""Image folders: what is found, in which order, and the sentence for each thing that can be wrong."""

import re
from pathlib import Path

import pytest

from lockstep.data.sources import open_folder
from lockstep.errors import LockstepError


def make(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


GOOD = ("train/ant/a.jpeg", "train/bee/b.JPEG", "val/ant/c.jpg", "val/bee/d.PNG")


def test_files_of_any_case_and_depth_are_found_in_sorted_order(tmp_path: Path) -> None:
    root = make(
        tmp_path, *GOOD, "train/ant/z/deep/x.JpG", "train/ant/B.png", "train/ant/notes.txt", "train/ant/._a.jpeg"
    )
    train, val = open_folder(root)
    names = [Path(train.name(index)).relative_to(root / "train").as_posix() for index in range(train.num_samples)]
    assert names == ["ant/B.png", "ant/a.jpeg", "ant/z/deep/x.JpG", "bee/b.JPEG"]
    assert train.labels.tolist() == [0, 0, 0, 1]
    assert train.read(2) == b"train/ant/z/deep/x.JpG"
    assert train.classes == val.classes == ("ant", "bee")
    assert val.labels.tolist() == [0, 1]


def test_names_outside_ascii_are_read(tmp_path: Path) -> None:
    train, _ = open_folder(make(tmp_path, *GOOD, "train/ant/übung 1.jpeg"))
    assert [train.read(index).decode() for index in range(2)] == ["train/ant/a.jpeg", "train/ant/übung 1.jpeg"]


def test_a_linked_class_folder_is_followed(tmp_path: Path) -> None:
    root = make(tmp_path / "root", *GOOD)
    elsewhere = make(tmp_path / "elsewhere", "one.jpeg")
    for split in ("train", "val"):
        (root / split / "cow").symlink_to(elsewhere)
    assert open_folder(root)[0].classes == ("ant", "bee", "cow")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (("train/ant/a.jpeg",), r"no folder .*/val; data\.path must name a folder that holds train/ and val/"),
        (("val/ant/a.jpeg",), r"no folder .*/train"),
        (("train/a.jpeg", "val/ant/a.jpeg"), r"/train holds no class folders"),
        ((*GOOD, "train/cow/notes.txt", "val/cow/c.jpeg"), r"class folder .*/train/cow holds no images"),
        ((*GOOD, "train/cow/c.jpeg"), r"1 class folder\(s\) of .*/train are missing from .*/val: cow;"),
        ((*GOOD, "val/cow/c.jpeg"), r"1 class folder\(s\) of .*/val are missing from .*/train: cow;"),
        (
            (*GOOD, *(f"val/x{i}/c.jpeg" for i in range(8))),
            r"8 class folder\(s\) .*: x0, x1, x2, x3, x4 and 3 more;",
        ),
    ],
)
def test_a_wrong_layout_is_one_sentence(tmp_path: Path, files: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        open_folder(make(tmp_path, *files))


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=re.escape(f"The data path {tmp_path / 'nowhere'} is not a folder")):
        open_folder(tmp_path / "nowhere")


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path, *GOOD)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)  # permissions do not bind a superuser, who may run the tests
    with pytest.raises(LockstepError, match=r"/train cannot be read \(Permission denied\); check its permissions"):
        open_folder(root)
