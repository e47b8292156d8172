"""A pulse from every rank through the store, so that when an all-reduce fails the survivors can name who is missing.

A collective that fails says only that some connection broke. The pulse of a rank counts up twice a second beside the
step and buffer it last sent: one that no longer counts is dead or stopped, one that counts but lags never sent the
buffer the others wait for. A stopped one is ended by those on its host: its launcher would wait for it. Values are
sealed (`seal.py`) and of a fixed format; any other is as if it had not come. One that is older than the last is a
stranger's doing, and no silence of the rank. Where a rank cannot notice by itself that another is lost, `lookout.py`
looks at one rank's pulse all the time.
"""

import contextlib
import functools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch._C._distributed_c10d import Store

from lockstep.comm.census import name_machine
from lockstep.comm.meeting import peek
from lockstep.comm.seal import Seal
from lockstep.terminal import escape

INTERVAL_S = 0.5
# Two readings this far apart tell a living pulse from a dead one, also when the cores are shared by many ranks.
LISTEN_S = 3.0
FORMAT = re.compile(r"(\d{1,15}) (\d{1,15}) (\d{1,15}) (on|left) ([!-~]{0,300})", re.ASCII)
LOSS_FORMAT = re.compile(r"(\d{1,9}) (\d{1,15}) (\d{1,15}) ([!-~]{0,300})", re.ASCII)
LOSS_KEY = "lockstep/lost"  # the rank that one of the others found to be lost
FAILED_KEY = "lockstep/failed"  # which rank failed by itself, and its sentence
FAILED_FORMAT = re.compile(r"(\d{1,9}) ([ -~]{2,3600})", re.ASCII)
MOST_WORDS = 500  # letters of such a sentence: each may take six in JSON, and a sealed value has a limit
LEFT_KEY = "lockstep/left"  # how many have left in good order
LEAVE_S = 20.0
ANSWER_S = 3.0  # for the store: it answers in milliseconds, or never
ENDED = frozenset("ZX")  # the system's letters for what a process does
STOPPED = frozenset("Tt")


class Beat(NamedTuple):
    """One reading of a rank's pulse."""

    beats: int
    step: int
    buffer: int  # buffers of that step sent so far
    process: str = ""  # as `name_process` writes it
    has_left: bool = False  # in good order: it will not beat for long
    num_replays: int = 0  # of older beats of this rank, which only a stranger can have put in the place of this one

    @property
    def signs(self) -> int:
        """What stands still only while a rank is silent: one that a stranger drowns out is not."""
        return self.beats + self.num_replays


class Failed(NamedTuple):
    """A rank that could not go on, and its own sentence on why."""

    rank: int
    why: str


class Lost(NamedTuple):
    """The rank that the others wait for, and the first buffer it never sent."""

    rank: int
    is_dead: bool
    step: int
    buffer: int
    process: str = ""


NEVER = Beat(0, 0, 0)  # of a rank that has not beaten yet
Answer = TypeVar("Answer")


class Pulse:
    """Publishes this rank's beat from a thread of its own and reads the others'."""

    def __init__(
        self, store: Store, rank: int, num_ranks: int, *, keeper: int | None = 0, seal: Seal | None = None
    ) -> None:
        """`keeper` is the rank that keeps the store; None where the launcher does."""
        self._store = store
        self._keeper = keeper
        self._rank = rank
        self._num_ranks = num_ranks
        self._seal = seal or Seal()
        self._progress = (0, 0)
        self._last: dict[int, Beat] = {}  # the last that was well-formed and ours, of each rank read
        self._has_left = False
        self._count = 0
        self._telling, self._reading = threading.Lock(), threading.Lock()
        self._followed: int | None = None
        self._found: Lost | None = None  # by this rank, for all others to read
        self.rounds = 0  # that the thread has made; it stands still where the store does not answer
        self.is_cut = False  # the store has hung up
        self._is_mute = False  # the store has not answered the last question
        self.is_ending = False  # this rank cannot go on and is about to say why: it waits for nobody any more
        self.reported: Lost | None = None  # by any rank
        self._process = name_process(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lockstep-pulse", daemon=True)
        self._thread.start()

    def note(self, step: int, buffer: int) -> None:
        """This rank has sent `buffer` buffers of `step`; costs nothing, the thread will tell."""
        self._progress = (step, buffer)

    def follow(self, rank: int) -> None:
        """From now on read this rank's beat with every one of ours, and what others report: two questions a beat."""
        self._followed = rank

    @property
    def heard(self) -> Beat:
        """The last beat of the rank that is followed."""
        return NEVER if self._followed is None else self._last.get(self._followed, NEVER)

    def report(self, lost: Lost) -> None:
        """Let all others know, with the next beat: a rank that waits for the store must not hold this one up."""
        self._found = lost

    def leave(self, limit_s: float = LEAVE_S) -> None:
        """From now on say that this rank has done all it came for; whoever keeps the store waits for the others."""
        self._has_left = True
        with contextlib.suppress(RuntimeError):  # the store's keeper may be gone already
            self._tell()
            num_left = self._store.add(LEFT_KEY, 1)
            end = time.monotonic() + min(limit_s, LEAVE_S)
            # With the store gone, they would take this rank for lost.
            while self._rank == self._keeper and num_left < self._num_ranks and time.monotonic() < end:
                time.sleep(0.02)
                num_left = self._store.add(LEFT_KEY, 0)

    def fail(self, why: str) -> None:
        """This rank cannot go on. `why` is for those who miss it; empty where it is they who know."""
        if self.is_ending:
            return
        self.is_ending = True
        if why:
            _ask(lambda: self._leave_reason(escape(" ".join(why.split()))[:MOST_WORDS]), ANSWER_S)

    def _leave_reason(self, why: str) -> None:
        """Unless another rank was quicker, for want of which this one may have failed."""
        if self._read_failed() is None:
            value = self._seal.close(FAILED_KEY, f"{self._rank} {json.dumps(why)}")
            self._store.set(FAILED_KEY, value.decode())

    def find_failed(self) -> Failed | None:
        """The rank that said why it could not go on, if any has."""
        answers = _ask(self._read_failed, ANSWER_S)
        self._is_mute = not answers
        return answers[0] if answers else None

    def _read_failed(self) -> Failed | None:
        value = peek(self._store, FAILED_KEY)
        return parse_failed(self._seal.open(FAILED_KEY, value)) if value is not None else None

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(timeout=ANSWER_S)

    def find_lost(self) -> Lost | None:
        """The rank that stopped answering, or else the one furthest behind; None when nobody is.

        Whoever finds a dead rank first tells all others: it ends itself then, and must not be taken for the lost one.
        A store behind a cut network never answers, and no question to it has an end: it is taken for gone.
        """
        found = [] if self._is_mute else _ask(self._find_lost, LISTEN_S + ANSWER_S)
        return found[0] if found else self.lose_keeper()

    def _find_lost(self) -> Lost | None:
        lost = self._listen()
        if lost is None or not lost.is_dead:
            return lost
        with contextlib.suppress(RuntimeError):  # the store may be gone with it
            return self._share_loss(lost)
        return lost

    def _listen(self) -> Lost | None:
        try:
            before = self._read()
            # A process of this host that has ended needs no listening to; a rank that left in good order is not lost.
            dead = [rank for rank, beat in before.items() if is_gone(beat.process) and not beat.has_left]
            if not dead:
                time.sleep(LISTEN_S)
            after = self._read()
        except RuntimeError:
            # The store itself is gone, and with it whoever keeps it.
            return self.lose_keeper()
        # Its beat says what a rank has sent; what it never sent is the buffer after that.
        dead = dead or [rank for rank, beat in after.items() if beat.signs == before[rank].signs]
        if dead:
            rank = min(dead, key=lambda rank: (after[rank].step, after[rank].buffer))
            # Its last beat may be from many steps ago: no sum is complete here that it has not sent its part of.
            step, buffer = max((after[rank].step, after[rank].buffer), self._completed)
            return lose(rank, after[rank]._replace(step=step, buffer=buffer))
        rank = min(after, key=lambda rank: (after[rank].step, after[rank].buffer))
        if (after[rank].step, after[rank].buffer) < self._progress:
            return lose(rank, after[rank], is_dead=False)
        return None

    @property
    def _completed(self) -> tuple[int, int]:
        """The place up to which all sums are complete: a step's first buffer is sent after those of the step before."""
        step, buffer = self._progress
        return (step, 0) if buffer else (step - 1, 0)  # with none sent, the last of the step before may be on its way

    def lose_keeper(self) -> Lost | None:
        """The rank that keeps the store; None where it is no rank."""
        if self._keeper is None:
            return None
        return Lost(self._keeper, True, *self._progress, self._last.get(self._keeper, NEVER).process)

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                self._tell()
                if self._followed is not None:
                    self._exchange(self._followed)
                self._meet_keeper()
            except RuntimeError:
                self.is_cut = True
                return  # the store is gone, and the world with it
            self.rounds += 1
            self._stop.wait(INTERVAL_S)

    def _meet_keeper(self) -> None:
        """Learn which process keeps the store: once it is lost, there is no store to ask."""
        if self._keeper is not None and self._keeper not in (self._rank, *self._last):
            self._read_one(self._keeper)

    def _tell(self) -> None:
        key = _key(self._rank)
        # The thread's beat must not come after the one of `leave`, which says that this rank has left.
        with self._telling:
            self._count += 1
            step, buffer = self._progress
            state = "left" if self._has_left else "on"
            text = f"{self._count} {step} {buffer} {state} {self._process}"
            self._store.set(key, self._seal.close(key, text).decode())

    def _exchange(self, followed: int) -> None:
        """Read one rank's beat and who is reported lost, or report it; the first report stands."""
        self._read_one(followed)
        self.reported = self._read_loss() or self.reported
        if self._found is not None and self.reported is None:
            self.reported = self._share_loss(self._found)

    def _read_loss(self) -> Lost | None:
        """Who was reported lost, if anyone was."""
        value = peek(self._store, LOSS_KEY)
        return parse_loss(self._seal.open(LOSS_KEY, value)) if value is not None else None

    def _share_loss(self, lost: Lost) -> Lost:
        """Report a lost rank; the first report stands, and is the answer."""
        if reported := self._read_loss():
            return reported
        rank, _, *rest = lost
        text = " ".join(map(str, (rank, *rest)))
        self._store.set(LOSS_KEY, self._seal.close(LOSS_KEY, text).decode())
        return lost

    def _read(self) -> dict[int, Beat]:
        """The others' beats; a rank that never beat counts as dead from the start."""
        return {rank: self._read_one(rank) for rank in range(self._num_ranks) if rank != self._rank}

    def _read_one(self, rank: int) -> Beat:
        """A rank's last good beat: one that is not as a rank writes it, or older, leaves the one before it standing."""
        key = _key(rank)
        with self._reading:  # or what one thread read first and noted last would look like a replay
            last = self._last.get(rank, NEVER)
            value = peek(self._store, key)
            beat = parse_beat(self._seal.open(key, value)) if value is not None else None
            if beat is None:
                return last
            if beat.beats < last.beats:
                self._last[rank] = last._replace(num_replays=last.num_replays + 1)
            else:
                self._last[rank] = beat._replace(num_replays=last.num_replays)
            return self._last[rank]


def parse_beat(text: str | None) -> Beat | None:
    """What `_beat` writes, and nothing else."""
    found = FORMAT.fullmatch(text) if text is not None else None
    if found is None:
        return None
    beats, step, buffer, state, process = found.groups()
    return Beat(int(beats), int(step), int(buffer), process, state == "left")


def parse_loss(text: str | None) -> Lost | None:
    """What `_exchange` writes, and nothing else."""
    found = LOSS_FORMAT.fullmatch(text) if text is not None else None
    if found is None:
        return None
    rank, step, buffer, process = found.groups()
    return Lost(int(rank), True, int(step), int(buffer), process)


def parse_failed(text: str | None) -> Failed | None:
    """What `fail` writes, and nothing else; a sentence that cannot be printed is none."""
    found = FAILED_FORMAT.fullmatch(text) if text is not None else None
    if found is None:
        return None
    try:
        why = json.loads(found[2])
    except (ValueError, RecursionError):
        return None
    return Failed(int(found[1]), why) if isinstance(why, str) and why.isprintable() else None


def _ask(question: Callable[[], Answer], limit_s: float) -> list[Answer]:
    """The store's answer; none where it is gone, or does not come in time: a question to a store has no end itself."""
    answers: list[Answer] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(question())

    asking = threading.Thread(target=ask, name="lockstep-ask", daemon=True)
    asking.start()
    asking.join(limit_s)
    return answers[:1]


def lose(rank: int, beat: Beat, *, is_dead: bool = True) -> Lost:
    """A rank that is lost, by its last beat."""
    return Lost(rank, is_dead, beat.step, beat.buffer, beat.process)


def end_process(name: str) -> None:
    """Kill a process that is stopped, if it is on this host and still the one that had this name.

    The system says that it is stopped. The store alone is not believed: a stranger may hide the beats of a living one.
    """
    pid = _find_pid(name)
    if pid and name_process(pid) == name and _read_status(pid)[0] in STOPPED:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def is_gone(name: str) -> bool:
    """Whether a process of this host has ended; one of another host cannot be told."""
    pid = _find_pid(name)
    return bool(pid) and name_process(pid) != name


def _find_pid(name: str) -> int:
    """The number of a process of this host; 0 for any other."""
    host, _, rest = name.rpartition("/")
    number = rest.partition("@")[0]
    return int(number) if host == _name_host() and number.isascii() and number.isdigit() else 0


def name_process(pid: int) -> str:
    """Host, number and start: no other process ever has all three; empty for one that has ended or cannot be told."""
    state, started = _read_status(pid)
    return f"{_name_host()}/{pid}@{started}" if started and state not in ENDED else ""


def _read_status(pid: int) -> tuple[str, str]:
    """What a process does, by the system's letter, and when it started; both empty where that cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@functools.cache
def _name_host() -> str:
    """This machine, and where containers count their processes apart, which of them.

    Not by its name: many machines have one, and a neighbour's rank would be taken for a process that has ended.
    """
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{name_machine()}:{space}"


def _key(rank: int) -> str:
    return f"lockstep/pulse/{rank}"
