"""A rank that waits for ever is ended when another is lost, and not for anything less."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from lockstep.comm import lookout as module
from lockstep.comm import pulse as pulses
from lockstep.comm.lookout import Lookout
from lockstep.comm.pulse import Lost, Pulse
from lockstep.comm.seal import Seal
from lockstep.engine.run import phrase_loss
from tests.engine.forked import Forked
from tests.ranks import find_port
from tests.strangers import Replaying


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulses, "INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "TICK_S", 0.04)


class Scene:
    """Three ranks in one process, each with a lookout on the next."""

    def __init__(self, timeout_s: float, *, is_stuck: bool = False) -> None:
        self.store = HashStore()
        self.pulses = [Pulse(self.store, rank, 3, seal=Seal("secret")) for rank in range(3)]
        self.found: dict[int, Lost | None] = {}
        self.lookouts = [
            Lookout(
                pulse,
                (rank + 1) % 3,
                timeout_s=timeout_s,
                end=lambda lost, rank=rank: self.note(rank, lost),
                is_stuck=is_stuck,
            )
            for rank, pulse in enumerate(self.pulses)
        ]

    def note(self, rank: int, lost: Lost | None) -> None:
        self.found[rank] = lost

    def wait_for(self, count: int, timeout_s: float = 10) -> None:
        end = time.monotonic() + timeout_s
        while len(self.found) < count and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        for lookout in self.lookouts:
            lookout.close()
        for pulse in self.pulses:
            pulse.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(timeout_s=1.6)
    yield scene
    scene.close()


def test_a_silent_rank_is_found_by_the_one_before_it_and_told_to_all(scene: Scene) -> None:
    scene.pulses[2].note(7, 1)
    time.sleep(0.1)
    scene.lookouts[2].close()
    scene.pulses[2].close()
    scene.wait_for(2)
    assert {rank: lost[:4] for rank, lost in scene.found.items() if lost} == {0: (2, True, 7, 1), 1: (2, True, 7, 1)}


def test_living_ranks_are_left_alone(scene: Scene) -> None:
    scene.wait_for(1, timeout_s=2)
    assert scene.found == {}


def test_a_rank_that_left_in_good_order_is_not_lost(scene: Scene) -> None:
    scene.lookouts[2].close()
    scene.pulses[2].leave()
    scene.pulses[2].close()
    scene.wait_for(1, timeout_s=2)
    assert scene.found == {}


def test_a_main_thread_that_finds_out_by_itself_is_not_cut_off(scene: Scene) -> None:
    scene.pulses[2].close()
    for lookout in scene.lookouts:
        lookout.close()
    scene.wait_for(1, timeout_s=2)
    assert scene.found == {}


def test_a_stranger_who_puts_an_old_beat_back_silences_nobody(scene: Scene) -> None:
    old = scene.store.get("lockstep/pulse/2").decode()
    time.sleep(0.2)  # by now newer ones have been heard
    with Replaying(scene.store, "lockstep/pulse/2", old):
        scene.wait_for(1, timeout_s=2)
    assert scene.found == {}


def test_a_stranger_who_hides_a_ranks_beats_ends_the_run_and_no_living_process(scene: Scene) -> None:
    """He keeps the newest beat in its place, as here where none comes after it: no count can tell that from silence."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scene.pulses[2]._process = pulses.name_process(process.pid)
    time.sleep(0.1)
    scene.lookouts[2].close()
    scene.pulses[2].close()
    scene.wait_for(2)
    try:
        assert {lost.rank for lost in scene.found.values() if lost} == {2}
        for lost in filter(None, scene.found.values()):
            assert lost.process == pulses.name_process(process.pid)
            assert phrase_loss(0, lost).startswith("Rank 2 stopped answering")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
    finally:
        process.kill()
        process.wait()


def test_a_rank_whose_process_has_ended_is_found_long_before_patience_ends() -> None:
    scene = Scene(timeout_s=40)  # 20 s of patience, 10 of grace
    for lookout in scene.lookouts:
        lookout._grace_s = 0.05
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scene.pulses[2]._process = pulses.name_process(process.pid)
    time.sleep(0.1)
    scene.pulses[2].close()
    process.kill()
    process.wait()
    scene.wait_for(2, timeout_s=15)
    assert {lost.rank for lost in scene.found.values() if lost} == {2}
    scene.close()


def test_where_the_backend_gives_up_the_rank_that_is_behind_is_named_and_not_called_lost(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulses, "LISTEN_S", 0.3)
    scene.pulses[0].note(7, 1)
    scene.pulses[1].note(7, 1)
    scene.pulses[2].note(6, 2)  # alive, and elsewhere
    time.sleep(0.1)
    scene.lookouts[0]._has_given_up = lambda: True
    scene.wait_for(1, timeout_s=5)
    time.sleep(0.5)
    assert {rank: lost[:4] for rank, lost in scene.found.items() if lost} == {0: (2, False, 6, 2)}
    assert scene.pulses[1].reported is None


def test_a_stuck_rank_ends_once_the_word_is_out_and_no_grace_later() -> None:
    scene = Scene(timeout_s=40, is_stuck=True)  # 20 s of patience, 10 of grace
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scene.pulses[2]._process = pulses.name_process(process.pid)
    time.sleep(0.1)
    scene.lookouts[2].close()
    scene.pulses[2].close()
    process.kill()
    process.wait()
    begun = time.monotonic()
    scene.wait_for(2, timeout_s=15)
    took = time.monotonic() - begun
    scene.close()
    # Rank 1 follows rank 2 and ends; rank 0 follows rank 1 and must not take rank 1 for the lost one.
    assert {rank: lost.rank for rank, lost in scene.found.items() if lost} == {0: 2, 1: 2}
    assert took < 5


def test_a_rank_that_is_about_to_say_why_it_failed_is_not_cut_off_by_one_that_was_quicker() -> None:
    scene = Scene(timeout_s=1.6, is_stuck=True)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scene.pulses[2]._process = pulses.name_process(process.pid)
    time.sleep(0.1)
    scene.pulses[0].is_ending = True  # all three failed alike; rank 2 is gone already
    scene.lookouts[2].close()
    scene.pulses[2].close()
    process.kill()
    process.wait()
    scene.wait_for(1, timeout_s=5)
    time.sleep(1.5)
    scene.close()
    assert list(scene.found) == [1]


class StuckStore:
    """As one whose keeper is stopped: it takes values and answers nothing."""

    def set(self, key: str, value: str) -> None:
        pass

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        time.sleep(600)
        return b""


def test_where_the_store_answers_nothing_its_keeper_is_lost() -> None:
    found: list[Lost | None] = []
    pulse = Pulse(StuckStore(), 1, 2, keeper=0)  # type: ignore[arg-type]
    pulse.note(5, 3)
    lookout = Lookout(pulse, 0, timeout_s=0.8, end=found.append)
    time.sleep(2)
    lookout.close()
    assert found == [Lost(0, True, 5, 3)]


RANK = """
import sys, time
from lockstep.comm.world import Membership, join_world
from lockstep.engine import run
rank, port = int(sys.argv[1]), int(sys.argv[2])
with join_world(Membership(rank, 2, rank, 2, "127.0.0.1", port), backend="gloo", timeout_s=60) as world:
    world.pulse.note(4, 1)
    object.__setattr__(world, "device", type("Device", (), {"type": "cuda"}))
    with run.watch_ranks(world, 12):
        print("ready", flush=True)
        time.sleep(600)  # as in a call to the driver that does not return
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_waits_for_a_killed_one_says_who_is_lost_and_ends(victim: int) -> None:
    port = find_port()
    ranks = [Forked([str(rank), str(port)], None, dict(os.environ), RANK) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        time.sleep(1.5)  # for a beat that tells how far it is
        ranks[victim].send_signal(signal.SIGKILL)
        _, err = ranks[1 - victim].communicate(timeout=90)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1 - victim].returncode == 1
    sentence = (
        f"lockstep: Rank {victim} stopped answering and never sent buffer 2 of step 4; rank {1 - victim} stopped."
    )
    assert sentence in err
