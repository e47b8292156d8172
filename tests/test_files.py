"""Files that are whole or not there, whatever ends the process that writes them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep import files
from lockstep.files import clear_leftovers, read_small, write_whole

ROOT = Path(__file__).parents[1]

# A process that is killed just before the call numbered by its argument, of those that change the disk.
KILLED = """
import os, signal, sys
from pathlib import Path
from lockstep.files import write_whole
left = int(sys.argv[2])
def watch(function):
    def call(*arguments, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call
os.fsync, os.replace, os.open = map(watch, (os.fsync, os.replace, os.open))
Path.open = watch(Path.open)
Path.replace = watch(Path.replace)
write_whole(Path(sys.argv[1]), "new " * 100)
"""


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "one")
    write_whole(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_killed_at_any_moment_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path, seen = tmp_path / "file", set()
    for moment in range(8):
        path.write_text("old")
        done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(moment)], env={"PYTHONPATH": str(ROOT)})
        assert done.returncode in (0, -signal.SIGKILL)
        seen.add((path.read_text() == "old", done.returncode))
        assert path.read_text() in ("old", "new " * 100)
    assert seen == {(True, -signal.SIGKILL), (False, -signal.SIGKILL), (False, 0)}
    assert len(list(tmp_path.iterdir())) > 1
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_file_and_folder_are_flushed_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def note_fsync(file: int) -> None:
        seen.append("folder" if os.path.isdir(f"/proc/self/fd/{file}") else "file")
        real_fsync(file)

    def note_replace(self: Path, target: Path) -> Path:
        seen.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_whole(tmp_path / "file", "content")
    assert seen == ["file", "rename", "folder"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "file", "old")

    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_old_leftovers_go_from_a_folder_that_others_write_to(tmp_path: Path) -> None:
    for name, age_s in ((".aside-old", 7200), (".aside-new", 1)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    clear_leftovers(tmp_path, older_than_s=3600)
    assert [path.name for path in tmp_path.iterdir()] == [".aside-new"]


def test_what_is_no_plain_file_of_a_fitting_size_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(11))
    assert read_small(tmp_path / "large", 11) == bytes(11)
    for name, words in (("pipe", "not a plain file"), ("large", "more than the 10 bytes"), ("", "Is a directory")):
        with pytest.raises(OSError, match=words):
            read_small(tmp_path / name, 10)
