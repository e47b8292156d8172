"""Image folders: what is found, in which order, and the sentence for each thing that can be wrong."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from lockstep.data.sources import IMAGES, ImageFolder, is_same, open_folder
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


def test_a_link_that_leads_back_is_not_followed(tmp_path: Path) -> None:
    root = make(tmp_path, *GOOD)
    (root / "train" / "ant" / "self").symlink_to(root / "train" / "ant")
    (root / "train" / "ant" / "split").symlink_to(root / "train")
    (root / "train" / "ant" / "top").symlink_to("../..")
    train, _ = open_folder(root)
    assert train.num_samples == 2
    (note,) = train.notes
    assert "3 links" in note
    assert "ant/self, ant/split, ant/top" in note


def test_folders_that_lead_to_each_other_are_followed_once(tmp_path: Path) -> None:
    root = make(tmp_path / "root", *GOOD)
    make(tmp_path / "elsewhere", "x.jpeg")
    (root / "train" / "ant" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(root / "train" / "ant")
    (tmp_path / "elsewhere" / "itself").symlink_to("itself")
    train, _ = open_folder(root)
    assert [Path(train.name(index)).name for index in range(train.num_samples)] == ["a.jpeg", "x.jpeg", "b.JPEG"]
    assert any("ant/out/back" in note for note in train.notes)


def test_what_is_left_out_is_counted_and_named(tmp_path: Path) -> None:
    root = make(tmp_path, *GOOD, *(f"train/ant/{n}.heic" for n in range(3)), "train/bee/notes.txt", "train/bee/odd")
    train, val = open_folder(root)
    (note,) = train.notes
    assert "5 files" in note
    assert "3 .heic, 1 .txt, 1 without a suffix, such as ant/0.heic" in note
    assert val.notes == ()


def test_images_beside_the_class_folders_are_said(tmp_path: Path) -> None:
    train, val = open_folder(make(tmp_path, *GOOD, "train/b.PNG", "train/.c.png", "train/d.txt"))
    assert (train.num_samples, val.notes) == (2, ())
    (note,) = train.notes
    assert note.startswith(f"1 image in {tmp_path / 'train'} is left out, being in no class folder, such as b.PNG; ")


def test_every_format_that_is_read_is_found(tmp_path: Path) -> None:
    suffixes = ("webp", "bmp", "tif", "TIFF", "gif", "jfif", "jpe")
    train, _ = open_folder(make(tmp_path, *GOOD, *(f"train/ant/x.{suffix}" for suffix in suffixes)))
    assert train.num_samples == 2 + len(suffixes)
    assert train.notes == ()


@pytest.mark.parametrize("name", ["validation", "valid", "test"])
def test_another_split_serves_for_validation_with_a_word(tmp_path: Path, name: str) -> None:
    root = make(tmp_path, *(path.replace("val/", f"{name}/") for path in GOOD))
    _, val = open_folder(root)
    assert val.num_samples == 2
    (note,) = val.notes
    assert f"no val/ in {root}; {name}/ serves as the validation split" in note


def test_val_comes_before_test(tmp_path: Path) -> None:
    _, val = open_folder(make(tmp_path, *GOOD, "test/ant/t.jpeg"))
    assert val.num_samples == 2
    assert val.notes == ()


def test_without_validation_the_sentence_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"or set data\.val_share = 0\.1"):
        open_folder(make(tmp_path, "train/ant/a.jpeg"))


def many(root: Path, count: int = 400) -> Path:
    return make(root, *(f"train/{('ant', 'bee')[n % 2]}/{n:04d}.jpeg" for n in range(count)))


def test_a_share_is_split_off_by_name_whatever_is_added_or_removed(tmp_path: Path) -> None:
    def split(root: Path) -> tuple[set[str], set[str]]:
        parts = open_folder(root, val_share=0.2)
        return tuple({Path(part.name(i)).name for i in range(part.num_samples)} for part in parts)  # type: ignore[return-value]

    train, val = split(many(tmp_path / "a"))
    assert not train & val
    assert len(train | val) == 400
    assert 50 < len(val) < 110  # 80 expected, standard deviation 8
    make(tmp_path / "a", *(f"train/ant/more{n}.jpeg" for n in range(100)))
    for victim in sorted(val)[:5] + sorted(train)[:5]:
        next((tmp_path / "a").rglob(victim)).unlink()
    train_after, val_after = split(tmp_path / "a")
    assert {name for name in train_after if not name.startswith("more")} == train - set(sorted(train)[:5])
    assert {name for name in val_after if not name.startswith("more")} == val - set(sorted(val)[:5])
    assert split(many(tmp_path / "elsewhere")) == (train, val)


def test_a_share_leaves_validation_images_out_of_use_with_a_word(tmp_path: Path) -> None:
    root = make(many(tmp_path), "val/ant/v.jpeg", "val/bee/w.jpeg")
    train, val = open_folder(root, val_share=0.1)
    assert train.num_samples + val.num_samples == 400
    assert any("data.val_share = 0.1 keeps" in note and "val/ is not used" in note for note in train.notes)


def test_a_folder_of_classes_alone_can_be_split(tmp_path: Path) -> None:
    train, val = open_folder(many(tmp_path) / "train", val_share=0.1)
    assert train.num_samples + val.num_samples == 400
    assert train.classes == val.classes == ("ant", "bee")


def test_a_share_that_leaves_nothing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"data\.val_share = 0\.001 of 2 samples leaves nothing"):
        open_folder(make(tmp_path, "train/ant/a.jpeg", "train/bee/a.jpeg"), val_share=0.001)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_labels_come_from_a_table_beside_the_images(tmp_path: Path, form: str) -> None:
    for split in ("train", "test"):
        make(tmp_path, *(f"{split}/images/{n}.png" for n in range(4)))
        rows = [(f"images/{n}.png", ["bee", "ant"][n % 2]) for n in range(4)]
        if form == "csv":
            text = "file_name,label\n" + "".join(f"{name},{label}\n" for name, label in rows)
        else:
            text = "".join(json.dumps({"file_name": name, "label": label}) + "\n" for name, label in rows)
        (tmp_path / split / f"metadata.{form}").write_text(text)
    train, val = open_folder(tmp_path)
    assert train.classes == val.classes == ("ant", "bee")
    assert [Path(train.name(index)).name for index in range(4)] == ["1.png", "3.png", "0.png", "2.png"]
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert val.read(0) == b"test/images/1.png"
    assert len(train.notes) == 1
    assert "column label" in train.notes[0]


def test_images_that_a_table_does_not_name_are_counted(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make(tmp_path, *(f"{split}/{name}" for name in ("a.png", "deep/b.png", "deep/c.png", "deep/.d.png", "e.txt")))
        (tmp_path / split / "metadata.csv").write_text("file_name,label\na.png,ant\ndeep/b.png,bee\n")
    train, _ = open_folder(tmp_path)
    assert train.num_samples == 2
    [_, said] = train.notes
    assert said == (
        f"1 image in {tmp_path}/train is left out, having no row in metadata.csv, such as deep/c.png; "
        "add what is wanted."
    )


def test_a_damaged_line_of_a_table_is_numbered(tmp_path: Path) -> None:
    make(tmp_path, *GOOD)
    rows = [json.dumps({"file_name": f"{n}.png", "label": "one\u2028two"}, ensure_ascii=False) for n in range(3)]
    (tmp_path / "train" / "metadata.jsonl").write_text("\n".join([*rows, "{", ""]))
    with pytest.raises(LockstepError, match=r"metadata\.jsonl cannot be read \(line 4: Expecting property name"):
        open_folder(tmp_path)
    (tmp_path / "train" / "metadata.jsonl").write_text("\n".join([*rows, "", "3"]))
    with pytest.raises(LockstepError, match=r"metadata\.jsonl cannot be read \(line 5 is no table\); correct it"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("file_name,caption\na.png,x\n", "has no column named label"),
        ("file_name,label\n../a.png,x\n", "Row 1 .* names no file in its folder"),
        ("file_name,label\n/etc/passwd,x\n", "Row 1 .* names no file in its folder"),
        ("file_name,label\na.png,\n", "Row 1 .* has no label"),
        ("file_name,label\na.png,x\na.png,y\n", "names a file twice"),
        ("file_name,label\n", "names no file"),
        ("\0\xff", "no column named label|cannot be read|names no file"),
    ],
)
def test_a_wrong_table_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    make(tmp_path, *GOOD)
    (tmp_path / "train" / "metadata.csv").write_text(text, encoding="latin-1")
    with pytest.raises(LockstepError, match=sentence):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "val_share", "sentence"),
    [
        (("ant/a.jpg", "bee/b.jpg"), 0.0, r"2 folders that look like classes \(ant, bee\); set data\.val_share = 0\.1"),
        (("Train/ant/a.jpg", "Val/ant/b.jpg"), 0.0, r"no folder .*/train, but Train/ is there; call it train/"),
        (("Train/ant/a.jpg", "Val/ant/b.jpg"), 0.1, r"no folder .*/train, but Train/ is there; call it train/"),
        (("training/ant/a.jpg", "val/ant/b.jpg"), 0.0, r"but training/ is there; call it train/"),
        (("set/train/ant/a.jpg", "set/val/ant/b.jpg"), 0.0, r"but .*/set/train; set data\.path to .*/set\."),
        (("set/train/ant/a.jpg", "set/val/ant/b.jpg"), 0.1, r"but .*/set/train; set data\.path to .*/set\."),
        (("ant/a.txt",), 0.0, r"There is no folder .*/train; data\.path must name a folder that holds train/ and val/"),
    ],
)
def test_a_folder_without_train_is_told_by_what_it_holds(
    tmp_path: Path, files: tuple[str, ...], val_share: float, sentence: str
) -> None:
    make(tmp_path, *files)
    with pytest.raises(LockstepError, match=sentence):
        open_folder(tmp_path, val_share=val_share)


def test_what_the_sentence_on_classes_says_works(tmp_path: Path) -> None:
    make(tmp_path, *(f"{name}/{number}.jpg" for name in ("ant", "bee") for number in range(30)))
    train, val = open_folder(tmp_path, val_share=0.1)
    assert (train.classes, train.num_samples + val.num_samples) == (("ant", "bee"), 60)


def test_other_pixels_under_the_same_names_are_other_data(tmp_path: Path) -> None:
    before = open_folder(make(tmp_path, *GOOD))[0].fingerprint()
    assert open_folder(tmp_path)[0].fingerprint() == before
    (tmp_path / "train/bee/b.JPEG").write_bytes(b"train/bee/x.JPEG")
    after = open_folder(tmp_path)[0].fingerprint()
    assert [kind for kind in before if not is_same(kind, before[kind], after[kind])] == [IMAGES]


def test_samples_that_cannot_be_read_tell_nothing_of_the_data(tmp_path: Path) -> None:
    names = [f"train/ant/{number:03d}.jpeg" for number in range(100)]
    before = open_folder(make(tmp_path, *GOOD, *names))[0].fingerprint()[IMAGES]
    assert len(before.split()) == 32
    train = open_folder(tmp_path)[0]
    (tmp_path / names[0]).unlink()
    after = train.fingerprint()[IMAGES]
    assert len(after.split()) == 31
    assert is_same(IMAGES, before, after)
    (tmp_path / train.name(101)).write_bytes(b"other")  # the last is one of those that count
    assert not is_same(IMAGES, before, train.fingerprint()[IMAGES])


def test_a_sample_that_does_not_come_ends_the_look_at_the_data_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = open_folder(make(tmp_path, *GOOD), limit_s=0.3)[0]
    whole = train.fingerprint()[IMAGES]
    come, read = threading.Event(), ImageFolder.read
    monkeypatch.setattr(ImageFolder, "read", lambda self, number: read(self, number) if not number else come.wait(60))
    start = time.monotonic()
    part = train.fingerprint()[IMAGES]
    come.set()
    assert time.monotonic() - start < 30
    assert part == whole.split()[0]
    assert is_same(IMAGES, part, whole)


@pytest.mark.parametrize("text", ["", "=", "0", "0= 1=2=3 \x00", "é=é"])
def test_any_text_may_stand_for_the_samples_of_a_checkpoint(text: str) -> None:
    assert is_same(IMAGES, text, text)
    assert is_same(IMAGES, text, "7=1-00000000")
