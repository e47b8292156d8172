"""A pulse from every rank through the store, so that when an all-reduce fails the survivors can name who is missing.

A collective that fails says only that some connection broke. The pulse of a rank counts up twice a second beside the
step and buffer it last sent: one that no longer counts is dead or stopped, one that counts but lags never sent the
buffer the others wait for.
"""

import threading
import time
from typing import NamedTuple

from torch._C._distributed_c10d import Store

INTERVAL_S = 0.5
# Two readings this far apart tell a living pulse from a dead one, also when the cores are shared by many ranks.
LISTEN_S = 3.0


class Beat(NamedTuple):
    """One reading of a rank's pulse."""

    beats: int
    step: int
    buffer: int  # buffers of that step sent so far


class Lost(NamedTuple):
    """The rank that the others wait for, and the first buffer it never sent."""

    rank: int
    is_dead: bool
    step: int
    buffer: int


class Pulse:
    """Publishes this rank's beat from a thread of its own and reads the others'."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._progress = (0, 0)
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
            return Lost(0, True, *self._progress)  # the store itself is gone, and rank 0 keeps it
        # Its beat says what a rank has sent; what it never sent is the buffer after that.
        dead = [rank for rank, beat in after.items() if beat.beats == before[rank].beats]
        if dead:
            rank = min(dead, key=lambda rank: (after[rank].step, after[rank].buffer))
            return Lost(rank, True, after[rank].step, after[rank].buffer)
        rank = min(after, key=lambda rank: (after[rank].step, after[rank].buffer))
        if (after[rank].step, after[rank].buffer) < self._progress:
            return Lost(rank, False, after[rank].step, after[rank].buffer)
        return None

    def _beat(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            step, buffer = self._progress
            try:
                self._store.set(_key(self._rank), f"{count} {step} {buffer}")
            except RuntimeError:
                return  # the store is gone, and the world with it
            self._stop.wait(INTERVAL_S)

    def _read(self) -> dict[int, Beat]:
        """The others' beats; a rank that never beat counts as dead from the start."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        beats = {}
        for rank in others:
            known = self._store.check([_key(rank)])
            text = self._store.get(_key(rank)).decode() if known else "0 0 0"
            beats[rank] = Beat(*map(int, text.split()))
        return beats


def _key(rank: int) -> str:
    return f"lockstep/pulse/{rank}"
