"""Ranks that are stopped while others end: ended by the launcher, in bounded time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.engine import stopped
from lockstep.engine.stopped import end_stopped_ranks
from lockstep.events import RunEnded
from tests.engine import commands
from tests.engine.conftest import tiny_settings

Process = subprocess.Popen[bytes]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Process]]:
    """Three children as the launcher has them."""
    monkeypatch.setattr(stopped, "TICK_S", 0.05)
    monkeypatch.setattr(stopped, "STOPPED_S", 0.3)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen(sleep, env=os.environ | {"RANK": str(rank)}) for rank in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_a_stopped_rank_is_ended_once_another_has_ended_and_a_running_one_is_not(ranks: list[Process]) -> None:
    with end_stopped_ranks(3) as ended:
        time.sleep(0.2)
        ranks[1].send_signal(signal.SIGSTOP)
        ranks[0].kill()
        assert ranks[1].wait(30) == -signal.SIGKILL
        assert ended == {ranks[1].pid}
        assert ranks[2].poll() is None


def test_a_stopped_rank_is_left_alone_while_all_are_there(ranks: list[Process]) -> None:
    with end_stopped_ranks(3) as ended:
        ranks[1].send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[1].wait(1)
        assert ended == set()


def test_a_rank_stopped_in_its_last_moments_does_not_hold_the_launcher(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [*tiny_settings(images), "train.duration=3st", "optim.warmup=0st", "comm.timeout_s=5"]
    process = commands.start(
        "train", "quickstart", *[f"--set={setting}" for setting in settings], "--ranks=2", f"--out={folder}"
    )
    victim = commands.find_ranks(process, 2)["1"]
    commands.wait_until(lambda: any(isinstance(event, RunEnded) for event in commands.events(folder)), process)
    os.kill(victim, signal.SIGSTOP)
    status, out, err = commands.finish(process, timeout_s=60)
    assert status == 1, out + err
    # Stopped behind the last barrier, it is the launcher's to end; before it, rank 0 waits for it and names it.
    last_words = ("Rank 1 was stopped while others ended, so it was killed", "Rank 1 stopped answering")
    assert any(words in err for words in last_words), err
