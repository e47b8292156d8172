"""Ranks under torch's agent: who is started, stopped and started again; real processes."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec

from lockstep.engine import agent as agent_module
from lockstep.engine.agent import Agent, describe_end
from lockstep.engine.places import Places
from lockstep.engine.rendezvous import LoopbackRendezvous
from lockstep.events import RunEnded
from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.terminals import fill, open_terminal


class Ranks:
    """Starts a shell script in the place of each rank, and keeps what it told them."""

    def __init__(self, script: str, num_ranks: int, restarts: int = 0, least: int | None = None) -> None:
        self.script = script
        self.told: list[Mapping[str, str]] = []
        self.pids: list[int] = []
        places = Places(least or num_ranks, num_ranks, [f"GPU-{n}" for n in range(num_ranks)], retry_s=0.0)
        spec = WorkerSpec(
            role="default",
            local_world_size=num_ranks,
            rdzv_handler=LoopbackRendezvous("test", places),
            entrypoint="lockstep",
            max_restarts=restarts,
            monitor_interval=0.02,
        )
        self.agent = Agent(spec, self.start, places)

    def start(self, environment: Mapping[str, str]) -> int:
        self.told.append(environment)
        self.pids.append(os.posix_spawn("/bin/sh", ["sh", "-c", self.script], dict(environment)))
        return self.pids[-1]

    def run(self) -> RunResult:
        result = self.agent.run()
        assert not any(Path(f"/proc/{pid}").exists() for pid in self.pids), "a rank is left behind"
        return result

    def counts(self) -> list[tuple[str, str]]:
        return [(told["TORCHELASTIC_RESTART_COUNT"], told["WORLD_SIZE"]) for told in self.told]


def test_ranks_that_all_end_well_are_a_success() -> None:
    ranks = Ranks("exit 0", 3)
    assert not ranks.run().is_failed()
    assert [told["RANK"] for told in ranks.told] == ["0", "1", "2"]
    assert {told["WORLD_SIZE"] for told in ranks.told} == {"3"}
    assert ranks.told[0]["MASTER_ADDR"] == "127.0.0.1"


def test_a_killed_rank_comes_first_though_others_have_failed_for_it() -> None:
    result = Ranks("[ $RANK = 1 ] && kill -KILL $$ || { sleep 0.02; exit 3; }", 3).run()
    assert result.is_failed()
    rank, failure = next(iter(result.failures.items()))
    assert (rank, failure.exitcode) == (1, -signal.SIGKILL)


def test_after_a_loss_all_start_again_and_nobody_of_before_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    script = "case $TORCHELASTIC_RESTART_COUNT$RANK in 01) kill -KILL $$;; 0*) sleep 600;; esac"
    ranks = Ranks(script, 2, restarts=2)
    begun = time.monotonic()
    assert not ranks.run().is_failed()
    assert time.monotonic() - begun < 10
    assert ranks.counts() == [("0", "2"), ("0", "2"), ("1", "2"), ("1", "2")]
    said = capfd.readouterr().err
    assert "Rank 1 was killed by SIGKILL; all ranks start again (1 more restart allowed)." in said


def start_again_with_stderr(file: int) -> None:
    """Ranks of which one is lost start again, while this is where the agent's words go."""
    script = "case $TORCHELASTIC_RESTART_COUNT$RANK in 01) kill -KILL $$;; 0*) sleep 600;; esac"
    before = os.dup(2)
    try:
        os.dup2(file, 2)
        assert not Ranks(script, 2, restarts=1).run().is_failed()
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_ranks_start_again_though_nobody_is_left_to_hear_of_it() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    start_again_with_stderr(writer)
    os.close(writer)


def test_ranks_start_again_though_the_terminal_is_not_read() -> None:
    with open_terminal() as (_, file):
        fill(file)
        start_again_with_stderr(file)


def test_a_rank_that_takes_no_signal_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "RESTART_S", 0.2)
    script = 'trap "" TERM; case $TORCHELASTIC_RESTART_COUNT$RANK in 01) exit 1;; 0*) sleep 600;; esac'
    ranks = Ranks(script, 2, restarts=1)
    begun = time.monotonic()
    assert not ranks.run().is_failed()
    assert time.monotonic() - begun < 10


def test_restarts_come_to_an_end() -> None:
    ranks = Ranks("exit 7", 2, restarts=2)
    result = ranks.run()
    assert next(iter(result.failures.values())).exitcode == 7
    assert [count for count, _ in ranks.counts()] == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.parametrize(
    ("code", "words"), [(3, "failed with status 3"), (-9, "killed by SIGKILL"), (-33, "signal 33")]
)
def test_how_a_rank_ended_is_said_in_words(code: int, words: str) -> None:
    assert words in describe_end(code)


def test_a_place_that_fails_twice_is_done_without_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Device 1 is broken in the first two starts; then one rank trains alone, until the place is due, which is at once.
    script = """
    case $TORCHELASTIC_RESTART_COUNT in
        0|1) [ $RANK = 1 ] && exit 1; sleep 600;;
        2) trap "exit 0" TERM; sleep 600 & wait;;
    esac
    """
    ranks = Ranks(script, 2, restarts=5, least=1)
    assert not ranks.run().is_failed()
    assert ranks.counts() == [("0", "2"), ("0", "2"), ("1", "2"), ("1", "2"), ("2", "1"), ("3", "2"), ("3", "2")]
    assert [told.get("CUDA_VISIBLE_DEVICES") for told in ranks.told[-3:]] == ["GPU-0", None, None]
    assert "Rank 1 failed with status 1; the run goes on without its place, on 1 rank" in capfd.readouterr().err


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "STOPPED_S", 0.3)


def test_a_stopped_rank_is_ended_once_another_has_ended(impatient: None) -> None:
    ranks = Ranks("[ $RANK = 0 ] && exit 0; [ $RANK = 1 ] && kill -STOP $$; sleep 0.5", 3)
    result = ranks.run()
    assert list(result.failures) == [1]
    assert ranks.agent.killed == {ranks.pids[1]}


def test_a_stopped_rank_is_left_alone_while_all_are_there(impatient: None, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = f"[ $RANK = 0 ] && {{ sleep 1; kill -CONT $(cat {file}); exit 0; }}; echo $$ > {file}; kill -STOP $$"
    ranks = Ranks(script, 2)
    assert not ranks.run().is_failed()
    assert ranks.agent.killed == set()


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
