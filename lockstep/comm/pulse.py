"""A pulse from every rank through the store, so that when an all-reduce fails the survivors can name who is missing.

A collective that fails says only that some connection broke. The pulse of a rank counts up twice a second beside the
step and buffer it last sent: one that no longer counts is dead or stopped, one that counts but lags never sent the
buffer the others wait for. A stopped one is ended by those on its host: its launcher would wait for it. Values are
sealed (`seal.py`) and of a fixed format; any other is as if it had not come.
"""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from lockstep.comm.seal import Seal

INTERVAL_S = 0.5
# Two readings this far apart tell a living pulse from a dead one, also when the cores are shared by many ranks.
LISTEN_S = 3.0
FORMAT = re.compile(r"(\d{1,15}) (\d{1,15}) (\d{1,15}) ([ -~]{0,300}?)", re.ASCII)


class Beat(NamedTuple):
    """One reading of a rank's pulse."""

    beats: int
    step: int
    buffer: int  # buffers of that step sent so far
    process: str = ""  # as `_name_process` writes it


class Lost(NamedTuple):
    """The rank that the others wait for, and the first buffer it never sent."""

    rank: int
    is_dead: bool
    step: int
    buffer: int
    process: str = ""


NEVER = Beat(0, 0, 0)  # of a rank that has not beaten yet


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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lockstep-pulse", daemon=True)
        self._thread.start()

    def note(self, step: int, buffer: int) -> None:
        """This rank has sent `buffer` buffers of `step`; costs nothing, the thread will tell."""
        self._progress = (step, buffer)

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(timeout=5)

    def find_lost(self) -> Lost | None:
        """The rank that stopped answering, or else the one furthest behind; None when nobody is."""
        try:
            before = self._read()
            time.sleep(LISTEN_S)
            after = self._read()
        except RuntimeError:
            # The store itself is gone, and with it whoever keeps it.
            return None if self._keeper is None else Lost(self._keeper, True, *self._progress)
        # Its beat says what a rank has sent; what it never sent is the buffer after that.
        dead = [rank for rank, beat in after.items() if beat.beats == before[rank].beats]
        if dead:
            rank = min(dead, key=lambda rank: (after[rank].step, after[rank].buffer))
            return Lost(rank, True, *after[rank][1:])
        rank = min(after, key=lambda rank: (after[rank].step, after[rank].buffer))
        if (after[rank].step, after[rank].buffer) < self._progress:
            return Lost(rank, False, *after[rank][1:])
        return None

    def _beat(self) -> None:
        count = 0
        process = _name_process(os.getpid())
        while not self._stop.is_set():
            count += 1
            step, buffer = self._progress
            try:
                key = _key(self._rank)
                self._store.set(key, self._seal.close(key, f"{count} {step} {buffer} {process}").decode())
            except RuntimeError:
                return  # the store is gone, and the world with it
            self._stop.wait(INTERVAL_S)

    def _read(self) -> dict[int, Beat]:
        """The others' beats; a rank that never beat counts as dead from the start."""
        return {rank: self._read_one(rank) for rank in range(self._num_ranks) if rank != self._rank}

    def _read_one(self, rank: int) -> Beat:
        """A rank's last good beat: one that is not as a rank writes it leaves the one before it standing."""
        key = _key(rank)
        if self._store.check([key]):
            beat = parse_beat(self._seal.open(key, self._store.get(key)))
            self._last[rank] = beat or self._last.get(rank, NEVER)
        return self._last.get(rank, NEVER)


def parse_beat(text: str | None) -> Beat | None:
    """What `_beat` writes, and nothing else."""
    found = FORMAT.fullmatch(text) if text is not None else None
    if found is None:
        return None
    beats, step, buffer, process = found.groups()
    return Beat(int(beats), int(step), int(buffer), process)


def end_process(name: str) -> None:
    """Kill a process that no longer answers, if it is on this host and still the one that had this name."""
    host, _, rest = name.rpartition("/")
    number = rest.partition("@")[0]
    pid = int(number) if number.isascii() and number.isdigit() else 0
    if pid and host == socket.gethostname() and _name_process(pid) == name:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _name_process(pid: int) -> str:
    """Host, number and start: no other process ever has all three; empty where the system does not tell."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{socket.gethostname()}/{pid}@{started}"


def _key(rank: int) -> str:
    return f"lockstep/pulse/{rank}"
