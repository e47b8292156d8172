"""Folders and indexes on a mount that does not answer: a sentence within the limit, and Ctrl-C meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.data import threads
from lockstep.data.generated import build_generated
from lockstep.data.inventory import take_inventory
from lockstep.data.pack import pack_folder
from lockstep.data.shards import open_shards
from lockstep.data.sources import open_folder
from lockstep.data.verify import verify_shards
from lockstep.errors import LockstepError
from tests.mounts import hung_mount

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.4
# The program with a shorter limit: what reads it does so when it is imported.
PROGRAM = """
from lockstep.data import plain_files
plain_files.READ_TIMEOUT_S = {limit_s}
from lockstep.cli import main
main()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LOOK_S", 0.05)
    monkeypatch.setattr(threads, "MAX_HUNG", 2)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_generated(tmp_path_factory.mktemp("cache"), 20, 10)


@pytest.fixture(scope="module")
def pack(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "pack"
    pack_folder(images, folder)
    return folder


def verify(root: Path) -> object:
    return verify_shards(root, decode=False, workers=1, read_timeout_s=LIMIT_S)


def info(root: Path) -> object:
    return take_inventory(root, lambda title: lambda done, total: None, LIMIT_S)


@pytest.mark.parametrize(
    ("place", "use"),
    [
        (".", lambda root: open_folder(root, LIMIT_S)),
        ("train", lambda root: open_folder(root, LIMIT_S)),
        ("val/ring", lambda root: open_folder(root, LIMIT_S)),
        ("train/disc", info),
        ("train/disc", lambda root: pack_folder(root, root.parent / "new", read_timeout_s=LIMIT_S)),
    ],
)
def test_a_folder_that_does_not_answer_is_a_sentence(images: Path, place: str, use: Callable[[Path], object]) -> None:
    check_sentence(images, place, use)


@pytest.mark.parametrize(
    ("place", "use"),
    [
        (".", lambda root: open_shards(root, LIMIT_S)),
        ("val.index", lambda root: open_shards(root, LIMIT_S)),
        ("train-000000.tar", lambda root: open_shards(root, LIMIT_S)),
        ("train.index", verify),
        ("train.index", info),
    ],
)
def test_a_pack_that_does_not_answer_is_a_sentence(pack: Path, place: str, use: Callable[[Path], object]) -> None:
    check_sentence(pack, place, use)


def check_sentence(root: Path, place: str, use: Callable[[Path], object]) -> None:
    start = time.monotonic()
    with hung_mount(root / place):
        with pytest.raises(LockstepError, match=r"does not answer within 0\.4 s; see whether its disk does") as raised:
            use(root)
        assert time.monotonic() - start < LIMIT_S + 3
    assert str(root / place) in str(raised.value) or str(root) in str(raised.value)
    use(root)  # and when it answers again, all is well


def test_a_target_that_does_not_answer_is_a_sentence(images: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with hung_mount(tmp_path / "target"), pytest.raises(LockstepError, match="target does not answer within"):
        pack_folder(images, tmp_path / "target", read_timeout_s=LIMIT_S)


def start(limit_s: float, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(limit_s=limit_s), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_every_command_ends_with_one_sentence(tmp_path: Path) -> None:
    root = tmp_path / "far"
    root.mkdir()
    settings = ("data.source=folder", f"data.path={root}", "data.read_timeout_s=1")
    with hung_mount(root):
        commands = [
            start(1.0, "data", "info", str(root)),
            start(1.0, "data", "verify", str(root)),
            start(1.0, "data", "pack", str(root), str(tmp_path / "new")),
            start(60.0, "train", "quickstart", f"--out={tmp_path / 'run'}", *(f"--set={text}" for text in settings)),
        ]
        for command in commands:
            _, error = command.communicate(timeout=60)
            assert command.returncode == 1
            assert error == f"lockstep: {root} does not answer within 1 s; see whether its disk does.\n"


def test_an_interrupted_user_does_not_wait_for_the_mount(tmp_path: Path) -> None:
    with hung_mount(tmp_path):
        command = start(60.0, "data", "info", str(tmp_path))
        wait_until_looking(command.pid)
        command.send_signal(signal.SIGINT)
        _, error = command.communicate(timeout=40)  # less than the mount would take
    assert command.returncode == 130
    assert "Traceback" not in error


def wait_until_looking(pid: int) -> None:
    """Until one of its threads waits for the mount."""
    end = time.monotonic() + 60
    while not any(is_waiting(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_waiting(thread: Path) -> bool:
    try:
        return "lockstep-look" in (thread / "comm").read_text() or "fuse" in (thread / "wchan").read_text()
    except OSError:
        return False
