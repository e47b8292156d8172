"""Killed and resumed, a run ends as if nothing had happened."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from lockstep.events import EpochDone, Notice, RunEnded, RunStarted
from tests.engine import commands
from tests.engine.conftest import tiny_settings


def settings(images: Path, *more: str) -> list[str]:
    return [f"--set={setting}" for setting in [*tiny_settings(images), "train.duration=4ep", *more]]


@pytest.fixture(scope="module")
def untouched(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that nobody interrupts."""
    folder = tmp_path_factory.mktemp("runs") / "untouched"
    status, _, err = commands.run("train", "quickstart", "--ranks=2", f"--out={folder}", *settings(images))
    assert status == 0, err
    return folder


def ledgers(folder: Path) -> dict[int, tuple[str, bool]]:
    return {e.epoch: (e.ledger, e.ledger_ok) for e in commands.events(folder) if isinstance(e, EpochDone)}


def test_killed_in_mid_epoch_and_resumed_the_weights_are_bit_identical(
    images: Path, untouched: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    process = commands.start("train", "quickstart", "--ranks=2", f"--out={folder}", *settings(images))
    commands.wait_for_step(folder, 7, process)  # epochs have 5 steps, checkpoints come every 3
    commands.kill_all(process)
    assert not (folder / "summary.json").exists()
    status, out, err = commands.run("train", str(folder), "--resume", "--ranks=2")
    assert status == 0, err
    starts = [event for event in commands.events(folder) if isinstance(event, RunStarted)]
    assert starts[0].start_step == 0
    assert starts[1].start_step % 3 == 0
    assert 6 <= starts[1].start_step < 20
    expected, found = commands.last_weights(untouched), commands.last_weights(folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert ledgers(folder) == ledgers(untouched)
    assert "Going on from step" in out


def test_resumed_on_other_rank_counts_it_sees_exactly_the_remaining_samples(
    images: Path, untouched: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "moved"
    process = commands.start("train", "quickstart", "--ranks=2", f"--out={folder}", *settings(images))
    commands.wait_for_step(folder, 4, process)
    commands.kill_all(process)
    process = commands.start("train", str(folder), "--resume", "--ranks=3")
    commands.wait_for_step(folder, 11, process)
    commands.kill_all(process)
    status, _, err = commands.run("train", str(folder), "--resume", "--ranks=1")
    assert status == 0, err
    # The ledger hashes every (epoch, sample): equal ledgers mean each epoch saw each sample exactly once.
    assert ledgers(folder) == ledgers(untouched)
    assert all(is_whole for _, is_whole in ledgers(folder).values())
    assert [event.world_size for event in commands.events(folder) if isinstance(event, RunStarted)] == [2, 3, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_writes_a_checkpoint_and_then_exits(
    images: Path, untouched: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "stopped"
    never = "train.checkpoint_every=0st"
    process = commands.start("train", "quickstart", "--ranks=2", f"--out={folder}", *settings(images, never))
    commands.wait_for_step(folder, 2, process)
    ranks = commands.list_children(process.pid)
    process.send_signal(number)
    status, out, err = commands.finish(process)
    assert status == 128 + number
    assert "Traceback" not in out + err
    assert "interrupted" in out
    ended = commands.events(folder)[-1]
    assert isinstance(ended, RunEnded)
    assert ended.status == "interrupted"
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    status, _, err = commands.run("train", str(folder), "--resume", "--ranks=2")
    assert status == 0, err
    # Running statistics are averaged over ranks at every checkpoint; the weights themselves agree to the last bit.
    expected, found = commands.last_weights(untouched), commands.last_weights(folder)
    for name, value in expected.items():
        if "running" in name:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(found[name], value), name


def test_a_killed_rank_ends_the_others_with_a_sentence(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    process = commands.start(
        "train", "quickstart", "--ranks=3", f"--out={folder}", *settings(images, "train.duration=400ep")
    )
    commands.wait_for_step(folder, 2, process)
    ranks = commands.list_children(process.pid)
    victim = ranks[1]
    name = read_rank(victim)
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    status, out, err = commands.finish(process)
    assert time.monotonic() - start < 30
    assert status == 1
    assert f"Rank {name} was killed by SIGKILL" in err
    survivors = [line for line in err.splitlines() if f"Rank {name} stopped answering and never sent buffer" in line]
    assert len(survivors) == 2, err
    assert "Traceback" not in out + err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_stopped_rank_ends_the_run_once_the_time_is_up_and_is_named(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    process = commands.start(
        "train",
        "quickstart",
        "--ranks=3",
        f"--out={folder}",
        *settings(images, "train.duration=4000ep", "comm.timeout_s=15"),
    )
    commands.wait_for_step(folder, 2, process)
    ranks = commands.list_children(process.pid)
    name = read_rank(ranks[1])
    os.kill(ranks[1], signal.SIGSTOP)
    status, out, err = commands.finish(process, timeout_s=180)  # it has no other end
    assert status == 1
    assert f"Rank {name} stopped answering and never sent buffer" in err
    assert "Traceback" not in out + err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def read_rank(pid: int) -> str:
    """The rank that a process was started as."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(variable.removeprefix("RANK=") for variable in variables if variable.startswith("RANK="))


def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(images: Path, untouched: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    process = commands.start("train", "quickstart", "--ranks=1", f"--out={folder}", *settings(images))
    commands.wait_for_step(folder, 10, process)
    commands.kill_all(process)
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1] / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(content)
    status, _, err = commands.run("train", str(folder), "--resume", "--ranks=1")
    assert status == 0, err
    notices = [event.text for event in commands.events(folder) if isinstance(event, Notice)]
    assert any("is damaged (model.safetensors does not match its hash)" in text for text in notices)
    assert ledgers(folder) == ledgers(untouched)
