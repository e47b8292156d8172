"""Batches prepared ahead of the step (step 5 on the walk): tasks of a few rows, and the threads that work them off.

Decode threads and, on a GPU, threads that hand blocks to nvJPEG take tasks from one queue. The decode threads do what
nvJPEG leaves over, and help it with the rest only where that is quicker (`balance.py`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from torch import Tensor

from lockstep.data.balance import Balance
from lockstep.data.block import Request, Rows
from lockstep.data.nvjpeg import MAX_IMAGES, NUM_THREADS
from lockstep.data.reader import SampleReader
from lockstep.data.threads import LOOK_S, DaemonPool, GivenUp

# Rows of one task at most: enough to hide a task's cost, few enough to spread a batch over the threads.
MAX_TASK_ROWS = 16
# Where processes decode them: what a task costs is then all that the threads do.
MAX_ASKED_ROWS = 32


class Making(Protocol):
    """A batch being made, on the host or on a device."""

    def known_rows(self) -> Rows:
        """Rows that need no decoding."""

    def fill(self, rows: Rows) -> Rows:
        """Prepare some rows on a decode thread; returns those whose images turned out bad."""

    def complete(self) -> None:
        """All rows are filled; called once, by the thread that filled the last."""

    def finish(self) -> tuple[Tensor, Tensor]:
        """Images and labels for the step."""


class Path(Protocol):
    """Where batches are made."""

    def begin(self, request: Request) -> Making:
        """A batch to be filled."""


class Pending:
    """A batch on its way, and how many of its rows are still missing."""

    def __init__(self, making: Making, num_rows: int, look: Callable[[], None]) -> None:
        self.making = making
        self._look = look  # after threads that hang
        self._rows_left = num_rows
        self._lock = threading.Lock()
        self.done: Future[None] = Future()
        # By the host's clock: a thread took its first rows; the last were done, or on their way to the device.
        self.begun_s: float | None = None
        self.done_s: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self.done.done()

    def wait(self) -> tuple[Tensor, Tensor]:
        """Images and labels for the step, or the error that kept them from being made."""
        while True:
            with suppress(TimeoutError):
                self.done.exception(LOOK_S)  # only to wait: an error of the batch may be a TimeoutError too
                break
            self._look()
        self.done.result()
        return self.making.finish()

    def run(self, work: Callable[[], int]) -> None:
        """Do some of the work, which returns how many rows it finished; a failure becomes the batch's.

        GivenUp when the thread was given up meanwhile, and the work is another's.
        """
        if self.begun_s is None:
            self.begun_s = time.perf_counter()
        try:
            finished = work()
            with self._lock:
                self._rows_left -= finished
                is_complete = self._rows_left == 0
            if is_complete:
                self.making.complete()
                self.done_s = time.perf_counter()
                self.done.set_result(None)
        except GivenUp:
            raise
        except Exception as error:
            with self._lock:
                if not self.done.done():
                    self.done.set_exception(error)


@dataclass(eq=False)
class Task:
    """Some rows to prepare."""

    pending: Pending
    rows: Rows
    host_only: bool = False


class Tally:
    """Rows made and the seconds that making them took, over all threads of a pool."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._rows, self._seconds = 0, 0.0

    def add(self, num_rows: int, seconds: float) -> None:
        with self._lock:
            self._rows += num_rows
            self._seconds += seconds

    @property
    def rate(self) -> float:
        """Rows a second of the whole pool if no thread ever waited for work."""
        return self._num_threads * self._rows / self._seconds if self._seconds else 0.0


class Prefetcher:
    """Starts batches on a pool of threads and hands their tensors over.

    `fill_by_nvjpeg` hands rows of a batch to nvJPEG and returns those it leaves to the decode threads; with
    `host_decodes` off, these are all that the decode threads get. So many `processes` decode for them, or none. The
    rows of a thread that hangs in a read of the `reader` are done by another, while somebody waits for them.
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        fill_by_nvjpeg: Callable[[Making, Rows], Rows] | None = None,
        host_decodes: bool = True,
        reader: SampleReader | None = None,
        processes: int = 0,
    ) -> None:
        self._path = path
        self._reader = reader
        self._most_rows = MAX_ASKED_ROWS if processes else MAX_TASK_ROWS
        self._num_decoding = processes or threads
        self._fill_by_nvjpeg = fill_by_nvjpeg
        self._host_decodes = host_decodes
        self.balance = Balance()
        self._tallies = Tally(threads), Tally(NUM_THREADS)  # of the decode threads, and of those that drive nvJPEG
        self._tasks: deque[Task] = deque()
        self._lock = threading.Lock()
        self._in_hand: dict[int, tuple[Pending, Rows]] = {}  # by thread
        self._pool = DaemonPool(threads, "lockstep-decode")
        self._nvjpeg_pool = DaemonPool(NUM_THREADS, "lockstep-decode-nvjpeg")

    @property
    def is_idle(self) -> bool:
        """Whether some thread has nothing to do."""
        return not self._tasks

    def rate(self) -> float | None:
        """Images a second that all threads could make if none ever waited for work; None before the first."""
        return sum(tally.rate for tally in self._tallies) or None

    def start(self, request: Request) -> Pending:
        """Begin a batch."""
        making = self._path.begin(request)
        known = making.known_rows()
        rows = np.setdiff1d(np.arange(len(request.samples)), known)
        step = self._most_rows
        if not self._fill_by_nvjpeg:  # which takes several tasks at once, as long as they fill a block
            # At least two tasks a decoder, so that one slow image does not hold up the others' last rows.
            step = min(step, -(-len(rows) // (2 * self._num_decoding))) or 1
        parts = [rows[start : start + step] for start in range(0, len(rows), step)]
        if len(known) or not parts:
            parts.append(known)
        # A batch without rows counts as one row, so that somebody completes it.
        pending = Pending(making, len(request.samples) or 1, self._give_up_hanging)
        with self._lock:  # all at once, so that nvJPEG finds enough for a whole block
            self._tasks.extend(Task(pending, part) for part in parts)
        # Nobody is woken who would find nothing to do: Python runs one thread at a time.
        if self._fill_by_nvjpeg:
            for _ in range(NUM_THREADS):
                self._nvjpeg_pool.submit(self._work_by_nvjpeg)
        if self._host_decodes and (self.balance.helps or not self._fill_by_nvjpeg):
            for _ in parts:
                self._pool.submit(self._work)
        return pending

    def _leave(self, pending: Pending, rows: Rows) -> None:
        """Give the decode threads what others have left over: it is wanted before what nobody has looked at."""
        for start in range(0, len(rows), MAX_TASK_ROWS):
            with self._lock:
                self._tasks.appendleft(Task(pending, rows[start : start + MAX_TASK_ROWS], host_only=True))
            self._pool.submit(self._work)

    def _give_up_hanging(self) -> None:
        """Leave the rows of threads that hang in a read to others; the samples they hang over are bad."""
        for thread in list(self._in_hand):
            sample = self._reader.watch.take_overdue(thread) if self._reader else None
            if sample is not None:
                pending, rows = self._in_hand.pop(thread)
                _ = self._pool.give_up(thread) or self._nvjpeg_pool.give_up(thread)
                pending.run(partial(self._count_overdue, sample))
                self._leave(pending, rows)

    def _count_overdue(self, sample: int) -> int:
        assert self._reader is not None
        self._reader.count_overdue(sample)
        return 0  # rows finished

    def _do(self, pending: Pending, rows: Rows, work: Callable[[], int]) -> None:
        """Do some of a batch's work on this thread."""
        thread = threading.get_ident()
        self._in_hand[thread] = pending, rows
        pending.run(work)
        del self._in_hand[thread]  # unless this thread was given up: whoever did sees to its rows

    def _work(self) -> None:
        """Do the next task, if there still is one for it, on a decode thread."""
        with self._lock:
            if not self._tasks or self._is_in_hand(self._tasks[0]):
                return
            task = self._tasks.popleft()

        def fill() -> int:
            rows, begun = task.rows, time.perf_counter()
            while len(rows):
                rows = task.pending.making.fill(rows)  # again for bad images, whose neighbours take their place
            self._tallies[0].add(len(task.rows), time.perf_counter() - begun)
            return len(task.rows) or 1

        self._do(task.pending, task.rows, fill)

    def _is_in_hand(self, task: Task) -> bool:
        """Whether a task is left to nvJPEG."""
        return self._fill_by_nvjpeg is not None and not task.host_only and not self.balance.helps

    def _work_by_nvjpeg(self) -> None:
        """Hand tasks to nvJPEG as long as there are any for it."""
        while tasks := self._take_for_nvjpeg():
            self._hand_to_nvjpeg(tasks)

    def _hand_to_nvjpeg(self, tasks: list[Task]) -> None:
        """What it leaves becomes a task for the decode threads."""
        pending, rows = tasks[0].pending, np.concatenate([task.rows for task in tasks])

        def fill() -> int:
            assert self._fill_by_nvjpeg is not None
            begun = time.perf_counter()
            left = self._fill_by_nvjpeg(pending.making, rows)
            self._tallies[1].add(len(rows) - len(left), time.perf_counter() - begun)
            self._leave(pending, left)
            return (len(rows) or 1) - len(left)

        self._do(pending, rows, fill)

    def _take_for_nvjpeg(self) -> list[Task]:
        """The first tasks nvJPEG may do, all of one batch, up to MAX_IMAGES rows."""
        taken: list[Task] = []
        num_rows = 0
        with self._lock:
            for task in list(self._tasks):
                if task.host_only:
                    continue
                if taken and (task.pending is not taken[0].pending or num_rows + len(task.rows) > MAX_IMAGES):
                    break
                taken.append(task)
                num_rows += len(task.rows)
                self._tasks.remove(task)
        return taken

    def close(self) -> None:
        """Drop what is not yet started and stop the threads; one that hangs is not waited for."""
        if self._reader:
            self._reader.watch.close()
        with self._lock:
            self._tasks.clear()
        for pool in (self._pool, self._nvjpeg_pool):
            pool.close()
