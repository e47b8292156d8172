"""Packing: the folder's samples in the folder's order, resumed byte for byte, every mistake one sentence."""

import errno
import io
import json
import os
import shutil
import signal
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.data import threads
from lockstep.data.generated import build_generated
from lockstep.data.index import ARRAYS, Index, read_index, write_index
from lockstep.data.pack import measure_sizes, pack_folder, plan_shards
from lockstep.data.shards import open_shards
from lockstep.data.sources import ImageFolder, open_folder
from lockstep.errors import LockstepError
from tests.data.pictures import encode, huge_png, picture
from tests.engine import commands


def make_images(root: Path, per_class: int = 6, side: int = 40) -> Path:
    """Photographs of noise in two classes, JPEG and PNG, of differing sizes."""
    chance = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("ant", "bee"):
            (root / split / label).mkdir(parents=True)
            for number in range(per_class):
                pixels = chance.integers(0, 256, (side + number, 2 * side, 3), np.uint8)
                suffix = ".png" if number == 1 else ".JPEG"
                Image.fromarray(pixels).save(root / split / label / f"photo.{number}{suffix}")
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_images(tmp_path / "images")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def samples(tar: Path) -> dict[str, dict[str, bytes]]:
    """The WebDataset reading of a shard: members grouped by what stands before the first dot."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tar) as file:
        for member in file:
            key, _, kind = member.name.partition(".")
            content = file.extractfile(member)
            assert content
            found.setdefault(key, {})[kind] = content.read()
    return found


def test_shards_hold_the_folders_samples_in_its_order(source: Path, tmp_path: Path) -> None:
    pack_folder(source, tmp_path / "pack", shard_mb=0.03)
    for folder, shards in zip(open_folder(source), open_shards(tmp_path / "pack"), strict=True):
        assert shards.classes == folder.classes
        assert shards.labels.tolist() == folder.labels.tolist()
        numbers = range(folder.num_samples)
        assert [shards.read(number) for number in numbers] == [folder.read(number) for number in numbers]
    assert len(list((tmp_path / "pack").glob("train-*.tar"))) > 2


def test_a_webdataset_reader_finds_images_and_labels(source: Path, tmp_path: Path) -> None:
    pack_folder(source, tmp_path / "pack", shard_mb=0.03)
    found: dict[str, dict[str, bytes]] = {}
    for tar in sorted((tmp_path / "pack").glob("train-*.tar")):
        found |= samples(tar)
    folder = open_folder(source)[0]
    assert len(found) == folder.num_samples
    assert sorted(found) != list(found)
    for number, (key, parts) in enumerate(sorted(found.items())):
        assert key.startswith(f"{number:08d}-photo_")
        assert int(parts.pop("cls")) == folder.labels[number]
        assert parts == {Path(folder.name(number)).suffix[1:].lower(): folder.read(number)}


def test_several_processes_write_the_same_bytes_as_one(source: Path, tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    pack_folder(source, tmp_path / "one", shard_mb=0.03)
    pack_folder(
        source,
        tmp_path / "two",
        shard_mb=0.03,
        workers=2,
        progress=lambda title: lambda done, total: shown.append((done, total)) if title == "Packing" else None,
    )
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert shown[-1] == (24, 24)


@pytest.mark.parametrize("shape", [(80, 120), (120, 80), (64, 64)])
def test_large_images_are_made_smaller_without_aliasing(source: Path, tmp_path: Path, shape: tuple[int, int]) -> None:
    """A fine chequerboard over a ramp: the ramp stays, and of the board only its mean."""
    height, width = shape
    rows, columns = np.mgrid[:height, :width]
    grey = 60 + 100 * columns / width + 40 * ((rows + columns) % 2)
    Image.fromarray(np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)).save(source / "train" / "ant" / "a.png")
    pack_folder(source, tmp_path / "pack", short_side=24, quality=95)
    after = Image.open(io.BytesIO(open_shards(tmp_path / "pack")[0].read(0)))
    assert after.format == "JPEG"
    scale = 24 / min(shape)
    assert after.size == (round(width * scale), round(height * scale))
    wanted = 80 + 100 * (np.arange(after.size[0]) + 0.5) / after.size[0]
    assert np.abs(np.asarray(after, np.float64) - wanted[None, :, None]).max() < 12


def test_images_that_are_small_enough_keep_their_bytes(source: Path, tmp_path: Path) -> None:
    pack_folder(source, tmp_path / "pack", short_side=43)
    folder, shards = open_folder(source)[0], open_shards(tmp_path / "pack")[0]
    same = [folder.read(number) == shards.read(number) for number in range(folder.num_samples)]
    assert same == 2 * [True, True, True, True, False, False]  # 40 to 45 pixels


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 20_000))
@settings(deadline=None)
def test_a_plan_takes_every_sample_once_and_fills_shards_up_to_the_limit(sizes: list[int], limit: int) -> None:
    plan = plan_shards(np.array(sizes, np.int64), limit)
    assert [number for first, last in plan for number in range(first, last)] == list(range(len(sizes)))
    records = [1536 + 512 * -(-size // 512) for size in sizes]
    for first, last in plan:
        assert last - first == 1 or sum(records[first:last]) <= limit
        assert last == len(sizes) or sum(records[first : last + 1]) > limit


def test_a_pack_interrupted_at_any_rename_is_finished_byte_for_byte(source: Path, tmp_path: Path) -> None:
    pack_folder(source, tmp_path / "whole", shard_mb=0.1)
    wanted = contents(tmp_path / "whole")
    # The settings, two for each shard, the indexes.
    num_renames = 1 + 2 * sum(name.endswith(".tar") for name in wanted) + 2
    for last in range(num_renames):
        target = tmp_path / f"pack{last}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", interrupt_after(last))
            with pytest.raises(KeyboardInterrupt):
                pack_folder(source, target, shard_mb=0.1)
        for leftover in target.rglob("*.partial"):  # as a kill would leave it: half-written
            leftover.write_bytes(b"half")
        pack_folder(source, target, shard_mb=0.1)
        assert contents(target) == wanted, last


def interrupt_after(last: int) -> Callable[[Path, Path], Path]:
    """A rename that works so many times and then never again."""
    calls, replace = 0, Path.replace

    def replace_or_die(path: Path, to: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls > last:
            raise KeyboardInterrupt
        return replace(path, to)

    return replace_or_die


HANGS = """
import time
from lockstep.data.sources import ImageFolder
read = ImageFolder.read
def read_or_hang(folder, index):
    if folder.name(index).endswith("train/bee/photo.2.JPEG"):
        time.sleep(600)
    return read(folder, index)
ImageFolder.read = read_or_hang
"""


def test_a_killed_pack_leaves_no_process_and_is_finished_byte_for_byte(source: Path, tmp_path: Path) -> None:
    """A file that does not come holds one process up while the other writes all other shards."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(HANGS)
    hanging = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "code"), str(Path(__file__).parents[2])])}
    pack_folder(source, tmp_path / "whole", shard_mb=0.03)
    wanted, target = contents(tmp_path / "whole"), tmp_path / "pack"
    arguments = ["data", "pack", str(source), str(target), "--shard-mb=0.03", "--workers=2"]
    process = commands.start(*arguments, **hanging)
    try:
        num_shards = sum(name.endswith(".tar") for name in wanted)
        commands.wait_until(lambda: len(list(target.glob("*.tar"))) == num_shards - 1, process)
        workers = commands.list_children(process.pid)
        assert len(workers) >= 2
        os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while any(is_running(pid) for pid in workers):
            assert time.monotonic() < end, "a process outlived the one that started it"
            time.sleep(0.01)
    finally:
        commands.kill_all(process)
    with pytest.raises(LockstepError, match="is not finished; run the same"):
        open_shards(target)
    before = {path: path.stat().st_mtime_ns for path in target.glob("*.tar")}

    status, out, err = commands.run(*arguments)
    assert status == 0, out + err
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a finished shard was written again"
    assert contents(target) == wanted


@pytest.fixture
def odd_names(source: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Things under the names of images that are none, and what is said of each."""
    ants = source / "train" / "ant"
    os.mkfifo(ants / "pipe.jpg")
    (ants / "folder.jpg").mkdir()
    (ants / "dangling.jpg").symlink_to(tmp_path / "nowhere")
    (ants / "loop.jpg").symlink_to(ants / "loop.jpg")
    (ants / "device.jpg").symlink_to("/dev/zero")
    with open(ants / "sparse.jpg", "wb") as file:
        file.truncate(1 << 40)
    said = {
        "pipe.jpg": "it is a pipe and not a file",
        "folder.jpg": "it is a folder and not a file",
        "dangling.jpg": "No such file or directory",
        "loop.jpg": "Too many levels of symbolic links",
        "device.jpg": "it is a device and not a file",
        "sparse.jpg": "its 1,099,511,627,776 bytes are more than the 268,435,456 allowed",
        "socket.jpg": "it is a socket or a device and not a file",
    }
    if os.geteuid():  # permissions do not bind a superuser
        (ants / "secret.jpg").write_bytes(b"")
        (ants / "secret.jpg").chmod(0)
        said["secret.jpg"] = "Permission denied"
    before = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(ants)  # a socket's path is short
        listener.bind("socket.jpg")
        os.chdir(before)
        yield said


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_no_file_is_named_and_the_command_ends(
    source: Path, tmp_path: Path, odd_names: dict[str, str], workers: int
) -> None:
    arguments = ["data", "pack", str(source), str(tmp_path / "pack"), "--shard-mb=0.03", f"--workers={workers}"]
    status, out, err = commands.run(*arguments)
    told = " ".join((out + err).split())
    assert status != 0
    assert f"{len(odd_names)} files cannot be packed" in told
    for name, reason in odd_names.items():
        assert f"{source}/train/ant/{name} ({reason})" in told
    status, out, err = commands.run(*arguments, "--skip-bad")
    assert status == 0, out + err
    assert open_shards(tmp_path / "pack")[0].num_samples == 12


def test_a_file_that_does_not_come_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, released = ImageFolder.read, threading.Event()

    def hang(folder: ImageFolder, index: int) -> bytes:
        if folder.name(index).endswith("train/bee/photo.2.JPEG"):
            released.wait(60)
        return read(folder, index)

    monkeypatch.setattr(ImageFolder, "read", hang)
    with pytest.raises(LockstepError, match=r"1 file cannot .*train/bee/photo\.2\.JPEG \(not read within 0\.2 s\)"):
        pack_folder(source, tmp_path / "pack", read_timeout_s=0.2)
    train, _ = pack_folder(source, tmp_path / "pack", read_timeout_s=0.2, skip_bad=True)
    released.set()
    folder, shards = open_folder(source)[0], open_shards(tmp_path / "pack")[0]
    numbers = [number for number in range(12) if not folder.name(number).endswith("bee/photo.2.JPEG")]
    assert train.num_samples == 11
    assert [shards.read(number) for number in range(11)] == [folder.read(number) for number in numbers]


def test_sizes_that_do_not_come_are_one_sentence(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(threads, "CLOSE_S", 0.1)
    monkeypatch.setattr(ImageFolder, "size", lambda folder, index: released.wait(60))
    with pytest.raises(LockstepError, match=r"did not come within 0\.1 s, the last of .*photo\.0\.JPEG; see"):
        measure_sizes(open_folder(source)[0], lambda done, total: None, 0.1)
    released.set()


@pytest.mark.parametrize("note", [b"", b"[]", b"{}", b"[" * 100_000, b"\xff"])
def test_a_damaged_note_of_an_unfinished_pack_is_one_sentence(source: Path, tmp_path: Path, note: bytes) -> None:
    work = tmp_path / "pack" / ".pack"
    work.mkdir(parents=True)
    (work / "settings.json").write_bytes(note)
    (tmp_path / "pack" / "train-000000.tar").touch()
    with pytest.raises(LockstepError, match=r"settings\.json is damaged; remove|holds a pack with"):
        pack_folder(source, tmp_path / "pack")


@pytest.mark.parametrize("name", ["settings.json", "lock", "train-000000.tar.index"])
def test_a_pipe_among_the_files_of_an_unfinished_pack_holds_up_nobody(source: Path, tmp_path: Path, name: str) -> None:
    work = tmp_path / "pack" / ".pack"
    work.mkdir(parents=True)
    os.mkfifo(work / name)
    with suppress(LockstepError):
        pack_folder(source, tmp_path / "pack")


def test_a_part_of_the_index_that_is_another_shards_is_written_again(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.data.pack._finish_split", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pack_folder(source, target, shard_mb=0.03)
    parts = sorted((target / ".pack").glob("train-*.index"))
    parts[0].write_bytes(parts[1].read_bytes())
    empty = read_index(parts[2])
    write_index(parts[2], Index(empty.classes, (), (), empty.settings, **{name: np.empty(0) for name in ARRAYS}))
    pack_folder(source, target, shard_mb=0.03)
    pack_folder(source, tmp_path / "whole", shard_mb=0.03)
    assert contents(target) == contents(tmp_path / "whole")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_bad_files_are_named_and_left_out_only_when_asked(source: Path, tmp_path: Path) -> None:
    truncated, gone = source / "train" / "ant" / "photo.2.JPEG", source / "val" / "bee" / "photo.0.JPEG"
    truncated.write_bytes(truncated.read_bytes()[:300])
    gone.unlink()
    gone.symlink_to(tmp_path / "nowhere")
    with pytest.raises(LockstepError, match=r"2 files cannot be packed: .*--skip-bad") as refused:
        pack_folder(source, tmp_path / "pack", short_side=24, shard_mb=0.03)
    assert str(truncated) in str(refused.value)
    assert str(gone) in str(refused.value)

    train, val = pack_folder(source, tmp_path / "pack", short_side=24, shard_mb=0.03, skip_bad=True)
    assert (train.num_samples, val.num_samples) == (11, 11)
    assert [str(truncated) in name for name in train.skipped] == [True]
    assert open_shards(tmp_path / "pack")[0].labels.tolist() == [0] * 5 + [1] * 6
    assert all(open_shards(tmp_path / "pack")[1].read(number) for number in range(11))


def test_a_file_left_out_before_is_not_left_out_unasked(source: Path, tmp_path: Path) -> None:
    (source / "train" / "ant" / "photo.2.JPEG").write_bytes(b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.data.pack._finish_split", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pack_folder(source, tmp_path / "pack", short_side=24, skip_bad=True)
    with pytest.raises(LockstepError, match=r"1 file cannot be packed: .*repair it"):
        pack_folder(source, tmp_path / "pack", short_side=24)


def test_a_split_without_a_readable_file_is_one_sentence(source: Path, tmp_path: Path) -> None:
    for path in (source / "val").rglob("photo.*"):
        path.write_bytes(b"no image")
    with pytest.raises(LockstepError, match=r"Not one file of val/ can be packed \(.*photo.*\)"):
        pack_folder(source, tmp_path / "pack", short_side=24, skip_bad=True)


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_or_images_are_refused(source: Path, tmp_path: Path, finished: bool) -> None:
    target = tmp_path / "pack"
    pack_folder(source, target, shard_mb=0.03)
    if not finished:
        settings = json.dumps(dict(read_index(target / "train.index").settings))
        for index in target.glob("*.index"):
            index.unlink()
        (target / ".pack").mkdir()
        (target / ".pack" / "settings.json").write_text(settings)
    with pytest.raises(LockstepError, match=r"holds a pack with --shard-mb 0\.03, --short-side 0;"):
        pack_folder(source, target, short_side=24)
    (source / "train" / "ant" / "more.jpeg").write_bytes(b"more")
    with pytest.raises(LockstepError, match="holds a pack with other images in SRC"):
        pack_folder(source, target, shard_mb=0.03)


def test_a_finished_pack_is_left_as_it_is(source: Path, tmp_path: Path) -> None:
    pack_folder(source, tmp_path / "pack")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "pack").iterdir()}
    pack_folder(source, tmp_path / "pack")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "pack").iterdir()} == before


def test_two_packs_into_one_folder_are_refused(source: Path, tmp_path: Path) -> None:
    def pack_again(done: int, total: int) -> None:
        with pytest.raises(LockstepError, match="Another process is packing into"):
            pack_folder(source, tmp_path / "pack")

    calls = {"Packing": pack_again}
    pack_folder(source, tmp_path / "pack", progress=lambda title: calls.get(title, lambda done, total: None))
    assert open_shards(tmp_path / "pack")[0].num_samples == 12


def test_a_full_disk_is_one_sentence_and_the_pack_goes_on_later(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", refuse)
        with pytest.raises(LockstepError, match=r"cannot be written \(No space left on device\); free some space"):
            pack_folder(source, tmp_path / "pack")
    assert not list((tmp_path / "pack").rglob("*.tar*"))
    pack_folder(source, tmp_path / "pack")
    assert open_shards(tmp_path / "pack")[0].num_samples == 12


def test_any_reader_gets_mixed_classes_and_a_run_the_folders_order(tmp_path: Path) -> None:
    source = build_generated(tmp_path / "cache", 300, 30)
    for name, shuffle in (("mixed", True), ("plain", False)):
        pack_folder(source, tmp_path / name, shard_mb=0.05, shuffle=shuffle)
    labels = {
        name: [
            int(parts["cls"])
            for tar in sorted((tmp_path / name).glob("train-*.tar"))
            for parts in samples(tar).values()
        ]
        for name in ("mixed", "plain")
    }
    assert labels["plain"] == sorted(labels["plain"])
    assert all(len(set(labels["mixed"][start : start + 30])) >= 6 for start in range(0, 270, 30))
    folder = open_folder(source)[0]
    for name in ("mixed", "plain"):
        shards = open_shards(tmp_path / name)[0]
        assert shards.labels.tolist() == folder.labels.tolist()
        assert [shards.read(number) for number in range(300)] == [folder.read(number) for number in range(300)]


def test_the_order_in_shards_is_stable_when_a_file_is_added(tmp_path: Path) -> None:
    source = build_generated(tmp_path / "cache", 100, 10)
    pack_folder(source, tmp_path / "before")
    (source / "train" / "bar" / "new.jpeg").write_bytes(min((source / "train" / "bar").iterdir()).read_bytes())
    pack_folder(source, tmp_path / "after")

    def stems(name: str) -> list[str]:
        return [key.split("-", 1)[1] for key in samples(tmp_path / name / "train-000000.tar")]

    assert [stem for stem in stems("after") if stem != "new"] == stems("before")


def cut_short(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_image_is_found_without_decoding_all(source: Path, tmp_path: Path, workers: int) -> None:
    broken = [source / "train" / "ant" / f"photo.{number}" for number in ("0.JPEG", "1.png", "2.JPEG")]
    cut_short(broken[0], 0.7)
    cut_short(broken[1], 0.7)
    broken[2].write_bytes(b"<html>not found</html>")
    with pytest.raises(LockstepError, match="3 files cannot be packed") as refused:
        pack_folder(source, tmp_path / "pack", workers=workers)
    assert all(str(path) in str(refused.value) for path in broken)
    train, _ = pack_folder(source, tmp_path / "pack", skip_bad=True)
    assert train.num_samples == 9
    assert sorted(name.split(" ")[0] for name in train.skipped) == sorted(map(str, broken))
    shards, folder = open_shards(tmp_path / "pack")[0], open_folder(source)[0]
    kept = [number for number in range(12) if Path(folder.name(number)) not in broken]
    assert [shards.read(number) for number in range(9)] == [folder.read(number) for number in kept]


def test_decoding_finds_what_header_and_end_do_not_show(source: Path, tmp_path: Path) -> None:
    (source / "train" / "ant" / "photo.1.png").write_bytes(huge_png(40))
    assert pack_folder(source, tmp_path / "quick")[0].num_samples == 12
    with pytest.raises(LockstepError, match=r"1 file cannot be packed: .*photo\.1\.png"):
        pack_folder(source, tmp_path / "careful", decode=True)
    with pytest.raises(LockstepError, match="holds a pack with no --decode"):
        pack_folder(source, tmp_path / "quick", decode=True)


@pytest.mark.parametrize(
    ("shard_mb", "then"),
    [
        (256.0, {"decode": True, "skip_bad": True}),
        (0.03, {"decode": True, "skip_bad": True}),
        (0.03, {"skip_bad": True, "shard_mb": 256.0}),
        (0.03, {}),
    ],
)
def test_a_pack_that_bad_files_ended_is_begun_anew_in_any_way(
    source: Path, tmp_path: Path, shard_mb: float, then: dict[str, Any]
) -> None:
    """As if nothing had been packed, which is what the documentation says of it."""
    (source / "train" / "ant" / "photo.1.png").write_bytes(b"no image")
    with pytest.raises(LockstepError, match=r"1 file cannot be packed: .*repair it"):
        pack_folder(source, tmp_path / "pack", shard_mb=shard_mb)
    if not then:  # repaired
        (source / "train" / "ant" / "photo.1.png").write_bytes(encode(picture(30, 40), "PNG"))
    settings = {"shard_mb": shard_mb} | then
    pack_folder(source, tmp_path / "pack", **settings)
    pack_folder(source, tmp_path / "whole", **settings)
    assert contents(tmp_path / "pack") == contents(tmp_path / "whole")


def test_a_pack_killed_before_its_first_shard_is_begun_anew_with_other_settings(source: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.data.pack._write_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pack_folder(source, tmp_path / "pack")
    assert (tmp_path / "pack" / ".pack" / "settings.json").exists()
    assert pack_folder(source, tmp_path / "pack", decode=True)[0].num_samples == 12


def test_a_jpeg_with_bytes_behind_its_end_is_whole(source: Path, tmp_path: Path) -> None:
    photo = source / "train" / "ant" / "photo.0.JPEG"
    photo.write_bytes(photo.read_bytes() + b"what a camera adds" * 50)
    assert pack_folder(source, tmp_path / "pack")[0].num_samples == 12


def test_images_of_every_format_are_packed(source: Path, tmp_path: Path) -> None:
    with Image.open(source / "train" / "ant" / "photo.1.png") as photo:
        for suffix in ("webp", "bmp", "tif", "gif"):
            photo.save(source / "train" / "bee" / f"other.{suffix}")
    pack_folder(source, tmp_path / "pack")
    kinds = {kind for tar in (tmp_path / "pack").glob("train-*.tar") for part in samples(tar).values() for kind in part}
    assert kinds == {"jpeg", "png", "webp", "bmp", "tif", "gif", "cls"}


def test_a_share_of_a_pack_is_that_of_its_folder(tmp_path: Path) -> None:
    source = build_generated(tmp_path / "cache", 200, 10)
    pack_folder(source, tmp_path / "pack", shard_mb=0.05)
    pack_folder(source, tmp_path / "split", shard_mb=0.05, val_share=0.25)
    wanted = [[part.read(n) for n in range(part.num_samples)] for part in open_folder(source, val_share=0.25)]
    assert 30 < len(wanted[1]) < 70
    for parts in (open_shards(tmp_path / "pack", val_share=0.25), open_shards(tmp_path / "split")):
        assert [[part.read(n) for n in range(part.num_samples)] for part in parts] == wanted


def test_what_a_folder_holds_beside_its_images_is_said(source: Path, tmp_path: Path) -> None:
    (source / "train" / "ant" / "scan.heic").write_bytes(b"x")
    said: list[str] = []
    pack_folder(source, tmp_path / "pack", say=said.append)
    assert len(said) == 1
    assert "1 .heic, such as ant/scan.heic" in said[0]


def test_a_part_with_a_number_of_another_shard_is_written_again(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.data.pack._finish_split", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pack_folder(source, target, shard_mb=0.03)
    parts = [read_index(path) for path in sorted((target / ".pack").glob("train-*.index"))]
    numbers = parts[0].numbers.copy()
    numbers[0] = parts[1].numbers[0]
    write_index(target / ".pack" / "train-000000.tar.index", replace(parts[0], numbers=numbers))
    pack_folder(source, target, shard_mb=0.03)
    pack_folder(source, tmp_path / "whole", shard_mb=0.03)
    assert contents(target) == contents(tmp_path / "whole")


def test_names_that_move_a_cursor_are_printed_as_plain_text(source: Path, tmp_path: Path) -> None:
    ants = source / "train" / "ant"
    (ants / "a\x1b[2J\a\nlockstep: all is well.jpg").write_bytes(b"no image")
    (ants / "notes\x1b]0;title\a.txt").touch()
    for skip in ([], ["--skip-bad"]):
        status, out, err = commands.run("data", "pack", str(source), str(tmp_path / "pack"), *skip)
        assert status == (not skip)
        printed = out.replace("\n", "") + err.replace("\n", "")
        assert printed.isprintable()
        assert "notes ]0;title .txt" in out
        assert "a [2J  lockstep: all is well.jpg" in (out if skip else err)
        assert not any(line.startswith("lockstep: all") for line in (out + err).splitlines())
    shutil.rmtree(source / "val" / "ant")
    (source / "train" / "bee").rename(source / "train" / "b\x1bee")
    status, _, err = commands.run("data", "pack", str(source), str(tmp_path / "other"))
    assert status == 1
    assert err.count("\n") == 1
    assert "b ee" in err
