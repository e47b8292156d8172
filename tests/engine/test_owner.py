"""A folder has one owner, and no rank outlives its launcher: real processes."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.bench.chaos.disk import open_disk
from lockstep.comm.world import World
from lockstep.engine.checkpoint import MANIFEST
from lockstep.engine.identity import read_identity
from lockstep.engine.owner import LOCK_FILE, check_unowned, lock_folder, own_folder
from lockstep.engine.snapshot import find_memory
from lockstep.errors import LockstepError
from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.ranks import run_ranks, world_of_one


def start_endless(images: Path, folder: Path, num_ranks: int) -> "subprocess.Popen[str]":
    settings = [*tiny_settings(images), "train.duration=4000ep", "train.checkpoint_every=1st", "train.eval_every=0st"]
    process = commands.start(
        "train", "quickstart", f"--ranks={num_ranks}", f"--out={folder}", *[f"--set={setting}" for setting in settings]
    )
    commands.wait_for_step(folder, 2, process)
    return process


def wait_until_gone(pids: list[int], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, f"still there: {pids}"
        time.sleep(0.02)


def test_ranks_end_with_a_killed_launcher_and_leave_the_folder_free(images: Path, tmp_path: Path) -> None:
    process = start_endless(images, tmp_path / "run", 2)
    ranks = commands.list_children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_until_gone(ranks)
    check_unowned(tmp_path / "run")
    process.communicate()


def test_a_living_run_is_not_resumed_beside_itself_but_a_killed_one_is(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_endless(images, folder, 1)
    try:
        for num_ranks in (1, 2):
            status, out, err = commands.run("train", str(folder), "--resume", f"--ranks={num_ranks}")
            assert status == 1, out
            (line,) = err.strip().splitlines()
            assert f"{folder} is in use by a run that has not ended (process {process.pid} on " in line
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    newest = int(max((folder / "checkpoints").glob("step-*")).name.removeprefix("step-"))
    settings = [f"--set=train.duration={newest + 2}st", "--set=optim.warmup=0st"]
    status, out, err = commands.run("train", str(folder), "--resume", "--ranks=1", *settings)
    assert status == 0, err
    assert "Going on from step" in out, err


def test_the_lock_is_the_kernels_and_goes_with_the_process(tmp_path: Path) -> None:
    take = f"from lockstep.engine.owner import *; lock_folder(Path({str(tmp_path)!r}))"
    line = f"{take}; print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockstepError, match=f"process {holder.pid} on .*; stop that one first"):
            check_unowned(tmp_path)
        holder.kill()
        holder.wait()
        check_unowned(tmp_path)


def test_a_folder_is_free_again_after_its_run(tmp_path: Path) -> None:
    with own_folder(tmp_path, world_of_one()), pytest.raises(LockstepError, match="is in use"):
        lock_folder(tmp_path)
    check_unowned(tmp_path)


def complain(world: World, folder: Path) -> str:
    try:
        with own_folder(folder, world):
            return ""
    except LockstepError as error:
        return str(error)


def test_every_rank_hears_that_the_folder_is_taken(tmp_path: Path) -> None:
    with own_folder(tmp_path, world_of_one()):
        first, second = run_ranks(complain, 2, tmp_path)
    assert "is in use" in first
    assert first == second


def test_a_start_that_is_refused_takes_back_what_it_made_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for folder in (tmp_path / "runs" / "deep" / "one", tmp_path / "runs"):
        with pytest.raises(ZeroDivisionError), own_folder(folder, world_of_one()):
            raise ZeroDivisionError
        assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
    (tmp_path / "runs" / "notes.txt").touch()
    with pytest.raises(ZeroDivisionError), own_folder(tmp_path / "runs", world_of_one()):
        raise ZeroDivisionError
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["notes.txt"]
    with own_folder(tmp_path / "run", world_of_one()):
        (tmp_path / "run" / "config.toml").touch()  # from here on it is a run, which may be gone on with
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.toml", ".lock"}


def test_a_lock_that_was_taken_back_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = fcntl.flock

    def take_late(file: int, how: int) -> None:
        if not late:
            late.append(file)
            (tmp_path / "run" / ".lock").unlink()  # by another, between the opening and the locking
            (tmp_path / "run").rmdir()
        take(file, how)

    late: list[int] = []
    monkeypatch.setattr(fcntl, "flock", take_late)
    file = lock_folder(tmp_path / "run")
    with pytest.raises(LockstepError, match="is in use"):
        check_unowned(tmp_path / "run")
    os.close(file)


FOLLOWER = (
    "import os, sys, time; from lockstep.processes import follow_launcher; follow_launcher(os.environ); "
    "print(os.getpid(), flush=True); time.sleep(60)"
)
STARTER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); input()"


@pytest.mark.parametrize(("name", "follows"), [("SLURM_STEP_ID", True), ("TORCHELASTIC_RUN_ID", True), ("RANK", False)])
def test_a_rank_follows_torchrun_and_srun_but_not_a_shell(name: str, follows: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TORCHELASTIC"))}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, FOLLOWER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {name: "1", "PYTHONPATH": str(commands.ROOT)},
    )
    assert starter.stdout is not None
    rank = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    if follows:
        wait_until_gone([rank])
    else:
        time.sleep(0.3)
        os.kill(rank, signal.SIGKILL)  # it is still there
    starter.communicate()


def test_a_rank_whose_launcher_is_gone_already_does_not_start() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "lockstep", "--version"],
        env=os.environ | {"LOCKSTEP_LAUNCHER": "1", "PYTHONPATH": str(commands.ROOT)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (1, "")


def test_what_a_killed_write_left_aside_is_gone_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".aside-step-00000003").mkdir(parents=True)
    (tmp_path / ".aside-config.toml-1-1").write_text("half")
    with own_folder(tmp_path, world_of_one()):
        assert {path.name for path in tmp_path.rglob("*")} == {"checkpoints", ".lock"}


# Each file of a run, with the commands that cannot do without it.
NEEDED = {
    "config.toml": {"train"},
    "plan.toml": set(),
    "profile.json": set(),
    "events.jsonl": {"report", "compare", "train"},
    "summary.json": set(),
    LOCK_FILE: {"train"},
    MANIFEST: set(),
    "model.safetensors": set(),
}
LONGER = "--set=train.duration=11st"


@pytest.mark.parametrize("name", NEEDED)
def test_a_pipe_in_the_place_of_a_runs_file_holds_up_nobody(trained_run: Path, tmp_path: Path, name: str) -> None:
    """Each command ends: with a line that names the place, or as if the file were not there."""
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    newest = max((folder / "checkpoints").iterdir())
    path = newest / name if (newest / name).exists() else folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for command, *arguments in (("report",), ("compare", str(trained_run)), ("train", "--resume", LONGER)):
        process = commands.start(command, str(folder), *arguments)
        status, out, err = commands.finish(process, timeout_s=60)
        assert "Traceback" not in out + err
        assert status == (command in NEEDED[name]), err
        if status:
            (line,) = err.strip().splitlines()
            assert str(folder) in line


def test_a_pipe_as_the_lock_is_a_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_FILE)
    for use in (check_unowned, lock_folder):
        with pytest.raises(LockstepError, match=r"\.lock is not a plain file, so no run can hold it; remove it\.$"):
            use(tmp_path)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_link_as_the_lock_is_a_sentence_and_is_not_followed(tmp_path: Path, is_there: bool) -> None:
    """A stranger may have put it there, to have a file of ours overwritten."""
    folder, file = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    (folder / LOCK_FILE).symlink_to(file)
    if is_there:
        file.write_text("ours")
    for use in (check_unowned, lock_folder):
        with pytest.raises(LockstepError, match=r"\.lock is not a plain file, so no run can hold it; remove it\.$"):
            use(folder)
    with pytest.raises(LockstepError, match="not a plain file"), own_folder(folder, world_of_one()):
        pass
    assert (file.exists() and file.read_text() == "ours") == is_there
    assert (folder / LOCK_FILE).is_symlink()


def test_a_run_whose_folder_was_moved_leaves_the_next_one_of_that_name_alone(tmp_path: Path) -> None:
    """That one has the lock, and may not have begun yet."""
    folder = tmp_path / "run"
    with own_folder(folder, world_of_one()):
        (folder / "config.toml").touch()
        folder.rename(tmp_path / "elsewhere")
        file = lock_folder(folder)
    with pytest.raises(LockstepError, match="is in use"):
        check_unowned(folder)
    os.close(file)
    assert {path.name for path in tmp_path.rglob("*")} == {"run", "elsewhere", ".lock", "config.toml"}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_start_on_a_full_disk_is_a_sentence_and_leaves_nothing(images: Path, tmp_path: Path, is_there: bool) -> None:
    """A folder that is there already has room for the lock's name, and for nothing in it."""
    with open_disk(tmp_path) as disk:
        if "full disk" in disk.left_out:
            pytest.skip("this user may not mount such a disk")
        folder = disk.folder / "run"
        if is_there:
            folder.mkdir()
        disk.fill()
        settings = [
            f"--set={setting}" for setting in [*tiny_settings(images), "train.duration=2st", "optim.warmup=0st"]
        ]
        status, out, err = commands.run("train", "quickstart", f"--out={folder}", *settings)
        assert (status, "Traceback" in out + err) == (1, False), err
        (line,) = err.strip().splitlines()
        assert "cannot be written (No space left on device)" in line
        assert {path.name for path in disk.folder.rglob("*")} == {"filler", *(["run"] if is_there else [])}


def test_a_disk_without_room_for_the_owners_name_gives_the_lock_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    file = lock_folder(tmp_path)
    with pytest.raises(LockstepError, match="another process"):
        check_unowned(tmp_path)
    os.close(file)


def test_a_moved_folder_ends_its_run_and_all_that_would_be_started_again(images: Path, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    settings = [*tiny_settings(images), "train.duration=4000ep", "train.checkpoint_every=40st", "train.eval_every=0st"]
    options = [f"--out={folder}", "--ranks=2", "--restarts=5", *[f"--set={setting}" for setting in settings]]
    process = commands.start("train", "quickstart", *options)
    commands.wait_for_step(folder, 2, process)
    left = Path("/dev/shm", find_memory(folder, read_identity(folder)).name)
    folder.rename(elsewhere)
    status, out, err = commands.finish(process)
    assert (status, "Traceback" in out + err) == (1, False), err
    assert f"The run's folder {folder} was moved or deleted" in err
    assert not folder.exists()
    assert not left.exists()
    assert out.count("Going on from") == 0
