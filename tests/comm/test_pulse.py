"""Pulses through a real store: who is dead, who lags, and what each never sent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from lockstep.comm import pulse as module
from lockstep.comm.pulse import Failed, Lost, Pulse, end_process, name_process, parse_beat, parse_failed
from lockstep.comm.seal import Seal
from tests.strangers import Replaying


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "LISTEN_S", 0.3)


@pytest.fixture
def pulses() -> Iterator[list[Pulse]]:
    store = HashStore()
    pulses = [Pulse(store, rank, 3) for rank in range(3)]
    for pulse in pulses:
        pulse.note(7, 2)
    yield pulses
    for pulse in pulses:
        pulse.close()


def test_living_ranks_at_the_same_place_are_not_lost(pulses: list[Pulse]) -> None:
    assert pulses[0].find_lost() is None


def test_a_rank_that_could_not_go_on_is_named_with_its_own_sentence(pulses: list[Pulse]) -> None:
    assert pulses[0].find_failed() is None
    pulses[1].fail("The file näh.jpeg cannot be read; " + "x" * 600)
    pulses[1].fail("a second word")
    pulses[2].fail("")  # for want of rank 1
    assert pulses[0].find_failed() == Failed(1, ("The file näh.jpeg cannot be read; " + "x" * 600)[:500])
    assert all(pulse.is_ending == (pulse is not pulses[0]) for pulse in pulses)


def test_the_first_reason_stands_for_what_fails_later_may_fail_for_want_of_it(pulses: list[Pulse]) -> None:
    pulses[1].fail("No memory.")
    pulses[2].fail("Nobody answers.")
    assert pulses[0].find_failed() == Failed(1, "No memory.")


def test_a_reason_of_several_lines_that_would_steer_a_terminal_is_one_that_can_be_printed(pulses: list[Pulse]) -> None:
    pulses[1].fail("mat1 and mat2\n  cannot be \x1b[2Jmultiplied")
    assert pulses[0].find_failed() == Failed(1, "mat1 and mat2 cannot be \\x1b[2Jmultiplied")


@pytest.mark.parametrize(
    "text", [None, "", "1", "x {}", '1 "', "1 {}", '1 "\\u001b[2J"', '1 "\\ud800"', "1 " + "[" * 3000, '1 "a" b']
)
def test_a_sentence_that_no_rank_writes_is_none(text: str | None) -> None:
    assert parse_failed(text) is None


def test_a_store_that_does_not_answer_holds_up_no_rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    pulse = Pulse(HashStore(), 0, 2)
    monkeypatch.setattr(pulse, "_store", Hanging())
    begun = time.monotonic()
    pulse.fail("why")
    assert pulse.find_failed() is None
    assert time.monotonic() - begun < 5


def test_a_keeper_whose_store_does_not_answer_is_lost_at_once_and_its_process_known(
    pulses: list[Pulse], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped one is to be ended, or its agent waits for it."""
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    time.sleep(0.2)
    monkeypatch.setattr(pulses[1], "_store", Hanging())
    begun = time.monotonic()
    assert pulses[1].find_failed() is None
    assert pulses[1].find_lost() == Lost(0, True, 7, 2, name_process(os.getpid()))
    assert time.monotonic() - begun < 3


class Hanging:
    """A store whose keeper is stopped."""

    def set(self, key: str, value: str) -> None:
        time.sleep(20)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        time.sleep(20)
        return b""


def test_a_rank_that_stops_beating_is_named_with_the_buffer_it_never_sent(pulses: list[Pulse]) -> None:
    pulses[2].note(7, 1)
    module.time.sleep(0.1)
    pulses[2].close()
    for pulse in pulses[:2]:
        lost = pulse.find_lost()
        assert lost is not None
        assert lost[:4] == Lost(rank=2, is_dead=True, step=7, buffer=1)[:4]


@pytest.mark.parametrize(
    ("beat", "own", "expected"),
    [
        ((756, 0), (768, 0), (767, 0)),  # of step 767 all is sent from here, and may be what is waited for
        ((756, 1), (767, 2), (767, 0)),
        ((767, 1), (767, 3), (767, 1)),
        ((767, 1), (768, 0), (767, 1)),
        ((0, 0), (1, 0), (0, 0)),
    ],
)
def test_a_lost_rank_has_sent_whatever_is_complete_here(
    beat: tuple[int, int], own: tuple[int, int], expected: tuple[int, int]
) -> None:
    """A beat comes twice a second, and many steps may be taken between the last one and the end."""
    store, seal = HashStore(), Seal()
    survivor = Pulse(store, 0, 2)
    key = "lockstep/pulse/1"
    store.set(key, seal.close(key, f"9 {beat[0]} {beat[1]} on elsewhere/1@1").decode())
    survivor.note(*own)
    lost = survivor.find_lost()
    survivor.close()
    assert lost == Lost(1, True, *expected, "elsewhere/1@1")


def test_a_living_rank_that_lags_is_told_from_a_dead_one(pulses: list[Pulse]) -> None:
    pulses[1].note(6, 4)
    module.time.sleep(0.1)
    lost = pulses[0].find_lost()
    assert lost is not None
    assert lost[:4] == Lost(rank=1, is_dead=False, step=6, buffer=4)[:4]


def test_a_rank_that_never_beat_counts_as_dead() -> None:
    alone = Pulse(HashStore(), 0, 2)
    alone.note(1, 0)
    assert alone.find_lost() == Lost(rank=1, is_dead=True, step=0, buffer=0)
    alone.close()


class SilentStore:
    """Behind a cut network: no question is ever answered, and none fails."""

    def set(self, key: str, value: str) -> None:
        threading.Event().wait()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        threading.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("keeper", [None, 0])
def test_a_store_that_never_answers_is_gone(keeper: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    pulse = Pulse(SilentStore(), 1, 2, keeper=keeper)  # type: ignore[arg-type]
    pulse.note(7, 2)
    begun = time.monotonic()
    lost = pulse.find_lost()
    pulse.close()
    assert time.monotonic() - begun < 10
    assert lost == (None if keeper is None else Lost(0, True, 7, 2))


class GoneStore:
    """A store whose keeper died."""

    def __getattr__(self, name: str) -> object:
        def fail(*arguments: object) -> None:
            raise RuntimeError("Connection refused")

        return fail


@pytest.mark.parametrize("keeper", [0, None])
def test_when_the_store_is_gone_the_rank_that_kept_it_is_named_and_nobody_where_a_launcher_did(
    keeper: int | None,
) -> None:
    pulse = Pulse(GoneStore(), 1, 2, keeper=keeper)  # type: ignore[arg-type]
    pulse.note(3, 1)
    assert pulse.find_lost() == (None if keeper is None else Lost(rank=0, is_dead=True, step=3, buffer=1))
    pulse.close()


@pytest.fixture
def sleeper() -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # a signal is on its way for a moment


def test_a_stopped_process_is_ended_by_its_name(sleeper: "subprocess.Popen[bytes]") -> None:
    name = module.name_process(sleeper.pid)
    stop(sleeper)
    end_process(name)
    assert sleeper.wait(60) == -signal.SIGKILL


def test_a_living_process_is_never_ended(sleeper: "subprocess.Popen[bytes]") -> None:
    """A stranger who puts old beats back can make it seem silent."""
    end_process(module.name_process(sleeper.pid))
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)


@pytest.mark.parametrize("change", ["other host", "other start", "nothing"])
def test_a_process_that_is_not_the_one_named_is_left_alone(sleeper: "subprocess.Popen[bytes]", change: str) -> None:
    name = module.name_process(sleeper.pid)
    stop(sleeper)
    end_process({"other host": f"x{name}", "other start": f"{name}1", "nothing": ""}[change])
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)


def test_a_process_of_this_host_that_has_ended_is_named_without_listening(
    pulses: list[Pulse], sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LISTEN_S", 60.0)
    pulses[2]._process = module.name_process(sleeper.pid)
    module.time.sleep(0.1)
    sleeper.kill()
    sleeper.wait()
    begun = module.time.monotonic()
    lost = pulses[0].find_lost()
    assert lost is not None
    assert (lost.rank, lost.is_dead) == (2, True)
    assert module.time.monotonic() - begun < 10


def test_a_process_of_another_machine_with_the_same_name_is_not_taken_for_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Machines from one image may all be called alike, and none knows the others' processes."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, "name_machine", lambda: "a-machine-started-at-another-time")
        module._name_host.cache_clear()
        name = module.name_process(os.getpid()) + "0"  # a process that is not here
    module._name_host.cache_clear()
    assert not module.is_gone(name)
    assert module.is_gone(module.name_process(os.getpid()) + "0")


def test_a_survivor_that_has_ended_is_not_taken_for_the_rank_it_named(
    pulses: list[Pulse], sleeper: "subprocess.Popen[bytes]"
) -> None:
    pulses[1].note(7, 2)
    pulses[1].close()
    assert pulses[0].find_lost()[0] == 1  # type: ignore[index]
    pulses[0]._process = module.name_process(sleeper.pid)  # which ends now, having named rank 1
    module.time.sleep(0.1)
    sleeper.kill()
    sleeper.wait()
    assert pulses[2].find_lost()[0] == 1  # type: ignore[index]


FORGED = [
    b"",
    b"9 9 9 on x",
    b"- 9 9 9 on x",
    b"\xff\xff",
    b"- 9 9 9 on " + b"x" * 9999,
    Seal("other").close("k", "9 9 9 on x"),
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_value_that_is_not_a_ranks_own_is_as_if_it_had_not_come(forged: bytes) -> None:
    store, seal = HashStore(), Seal("secret")
    reader, writer = Pulse(store, 0, 2, seal=seal), Pulse(store, 1, 2, seal=seal)
    writer.note(7, 2)
    module.time.sleep(0.1)
    writer.close()
    before = reader._read_one(1)
    assert before[1:3] == (7, 2)
    store.set("lockstep/pulse/1", forged.decode("latin-1"))
    assert reader._read_one(1) == before
    reader.close()


def test_a_forged_first_value_leaves_a_rank_unheard() -> None:
    store = HashStore()
    store.set("lockstep/pulse/1", "- 9 9 9 on host/1@1")
    reader = Pulse(store, 0, 2, seal=Seal("secret"))
    assert reader._read_one(1) == module.NEVER
    reader.close()


def test_an_old_beat_that_comes_again_is_neither_believed_nor_taken_for_silence() -> None:
    store, seal, key = HashStore(), Seal("secret"), "lockstep/pulse/1"
    old, new = (seal.close(key, f"{count} {count} 0 on elsewhere/1@1").decode() for count in (3, 5))
    reader = Pulse(store, 0, 2, seal=seal)
    signs = []
    for value in (old, new, old, old, new):
        store.set(key, value)
        beat = reader._read_one(1)
        signs.append(beat.signs)
    assert (beat.beats, beat.step, beat.num_replays) == (5, 5, 2)
    assert signs == [3, 5, 6, 7, 7]
    reader.close()


def test_a_rank_whose_old_beats_come_again_is_not_called_dead(pulses: list[Pulse]) -> None:
    store = pulses[0]._store
    old = store.get("lockstep/pulse/1").decode()
    module.time.sleep(0.2)
    pulses[0]._read()
    with Replaying(store, "lockstep/pulse/1", old):
        assert pulses[0].find_lost() is None


def test_what_a_rank_says_after_it_has_left_is_no_replay(pulses: list[Pulse]) -> None:
    pulses[1].leave()
    pulses[0]._read_one(1)
    module.time.sleep(0.2)
    beat = pulses[0]._read_one(1)
    assert beat.has_left
    assert beat.num_replays == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 2 3",
        "1 2 3 on x y",
        "1 2 3 on x\n",
        "-1 2 3 on x",
        "1 2 3 off y",
        "1 2 3 on \u0663",
        "9" * 20 + " 1 1 on x",
    ],
)
def test_a_beat_of_another_form_is_none(text: str) -> None:
    assert module.parse_beat(text) is None


def test_a_process_named_without_a_number_is_left_alone() -> None:
    end_process(module.name_process(os.getpid()).partition("/")[0] + "/x@y")


def test_whoever_keeps_the_store_leaves_after_all_others(pulses: list[Pulse]) -> None:
    keeper = threading.Thread(target=pulses[0].leave)
    keeper.start()
    pulses[1].leave()
    keeper.join(0.3)
    assert keeper.is_alive()
    pulses[2].leave()
    keeper.join(60)
    assert not keeper.is_alive()


class SlowStore:
    """Holds up the first beat that comes once it is armed, until the store is told to go on or has waited."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.is_armed, self.holds, self.goes_on = threading.Event(), threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        if self.is_armed.is_set() and not self.holds.is_set():
            self.holds.set()
            self.goes_on.wait(0.5)
        self.store.set(key, value)
        if " left " in value:
            self.goes_on.set()

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)


def test_the_word_of_a_rank_that_leaves_is_its_last() -> None:
    slow = SlowStore()
    pulse = Pulse(slow, 1, 2, keeper=None)  # type: ignore[arg-type]
    slow.is_armed.set()
    assert slow.holds.wait(40)  # the thread is about to write that this rank is on
    pulse.leave()
    pulse.close()
    last = parse_beat(Seal().open("lockstep/pulse/1", slow.store.get("lockstep/pulse/1")))
    assert last is not None
    assert last.has_left


def test_a_rank_that_never_leaves_is_not_waited_for_without_end(
    pulses: list[Pulse], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_S", 0.2)
    begun = module.time.monotonic()
    pulses[0].leave()
    assert 0.2 <= module.time.monotonic() - begun < 5
