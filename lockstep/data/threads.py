"""Threads that may hang in a read (steps 2 to 5 on the walk): given up after a while, and no obstacle to the end.

Nobody can wake a thread that waits for a disk. So threads that read are daemons, which die with the process; whoever
waits for one gives it up after a limit, and another does its work. What a given-up thread reads in the end is dropped.
What is looked at once, such as a folder or an index, has nobody else to do it: a disk that does not answer there is a
sentence. Torch-free.
"""

import errno
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from lockstep.errors import LockstepError

Result = TypeVar("Result")
Job = Callable[[], object]

CLOSE_S = 5.0  # for the threads of a pool to end: one image takes a second or two at worst
LOOK_S = 0.5  # between two looks whether a thread hangs
MAX_HUNG = 16  # reads that may hang before it is the disk and not a file that is to blame


class GivenUp(Exception):
    """In a thread: somebody else does this work now, or nobody wants it any more. A pool's thread ends with it."""


class DaemonPool:
    """Up to `count` threads that work off a queue, started as needed; `ThreadPoolExecutor` would wait for its own.

    A job that comes back to a thread that was given up raises GivenUp: only the job knows, without a race, whether it
    was still wanted when it came back.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()
        # Also when a pool is forgotten, and when the interpreter ends: a thread must not be amid C++ code then.
        self._end = weakref.finalize(self, _end_threads, self._jobs, self._threads)

    def submit(self, job: Job) -> None:
        """Have a job done, unless the pool is closed."""
        with self._lock:
            if self._end.alive:
                self._jobs.put(job)
                if len(self._threads) < self._count:
                    self._start()

    def give_up(self, thread: int) -> bool:
        """Put a new thread in the place of one that hangs; False for a thread of somebody else."""
        with self._lock:
            if thread not in self._threads:
                return False
            del self._threads[thread]
            self._start()
            return True

    def _start(self) -> None:
        thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
        thread.start()
        assert thread.ident is not None
        self._threads[thread.ident] = thread

    def close(self) -> None:
        """Drop what is not yet begun and wait a while for the threads to end."""
        self._end()


def _serve(jobs: "queue.SimpleQueue[Job | None]") -> None:
    """What a thread does: job after job, until there is an end to them or the thread was given up."""
    while job := jobs.get():
        try:
            job()
        except GivenUp:
            return
        del job  # and what it holds, before the next one comes
    jobs.put(None)  # the end is for all: also for a thread that nobody counts any more, or that starts just now


def _end_threads(jobs: "queue.SimpleQueue[Job | None]", threads: dict[int, threading.Thread]) -> None:
    while True:
        try:
            jobs.get_nowait()
        except queue.Empty:
            break
    jobs.put(None)
    deadline = time.monotonic() + CLOSE_S
    for thread in list(threads.values()):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def too_late(limit_s: float) -> OSError:
    """The error of a read that did not come."""
    return TimeoutError(errno.ETIMEDOUT, f"not read within {limit_s:g} s")


def disk_hangs(limit_s: float, what: str) -> LockstepError:
    """The sentence for a disk that has stopped answering."""
    return LockstepError(
        f"{MAX_HUNG} reads did not come within {limit_s:g} s, the last of {what}; see whether its disk answers."
    )


class Watch:
    """Which thread has been reading which sample since when: what it takes to see that one hangs."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._reads: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def begin(self, sample: int) -> None:
        """This thread is about to read; GivenUp when nobody wants that any more."""
        self.check()
        self._reads[threading.get_ident()] = sample, time.monotonic()

    def end(self) -> None:
        """This thread has read; GivenUp when it took too long for somebody."""
        with self._lock:
            if self._reads.pop(threading.get_ident(), None) is None:
                raise GivenUp

    def check(self) -> None:
        """GivenUp when nobody wants the work of any thread."""
        if self._is_closed:
            raise GivenUp

    def take_overdue(self, thread: int) -> int | None:
        """The sample that a thread has hung over for too long; the thread is told so if it ever comes back."""
        with self._lock:
            sample, start = self._reads.get(thread, (0, float("inf")))
            if time.monotonic() - start <= self.limit_s:
                return None
            del self._reads[thread]
            return sample

    def close(self) -> None:
        """Nobody wants anything any more: threads stop at their next sample."""
        self._is_closed = True


def read_each(
    count: int,
    read: Callable[[int], Result],
    take: Callable[[int, Result | OSError], object],
    limit_s: float,
    what: str,
) -> None:
    """Give `take` what was read for each number, in order, or why nothing was; LockstepError when the disk hangs.

    One thread does it all, at no cost by the number, until it hangs: then another goes on behind what it hung over.
    """
    numbers, watch = iter(range(count)), Watch(limit_s)

    def go_on() -> None:
        for number in numbers:
            outcome: Result | OSError
            watch.begin(number)
            try:
                outcome = read(number)
            except OSError as error:
                outcome = error
            watch.end()
            take(number, outcome)

    num_hung = 0
    while (hung := _run_until_hung(go_on, watch)) is not None:
        num_hung += 1
        if num_hung >= MAX_HUNG:
            raise disk_hangs(limit_s, what)
        take(hung, too_late(limit_s))


def _run_until_hung(work: Callable[[], None], watch: Watch) -> int | None:
    """Let a thread work, to its end or until it hangs over a number, which is returned."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="lockstep-read-each", daemon=True)
    thread.start()
    try:
        while wait([done], LOOK_S).not_done:
            assert thread.ident is not None
            if (hung := watch.take_overdue(thread.ident)) is not None:
                return hung
    except BaseException:  # an interrupted user: the thread shall not go on with what is being cleared away
        watch.close()
        thread.join(CLOSE_S)
        raise
    done.result()
    return None


class Steps:
    """How far a thread has come with the disk, for whoever waits for it."""

    def __init__(self) -> None:
        self.place: str | Path = ""  # that it asks the disk about
        self.count = 0  # answers so far: while it rises, the disk is slow and does not hang
        self.is_wanted = True

    def ask(self, place: str | Path) -> None:
        """This thread is about to ask for something there; GivenUp when nobody wants to know any more."""
        if not self.is_wanted:
            raise GivenUp
        self.place = place
        self.count += 1


def look(work: Callable[[Steps], Result], limit_s: float) -> Result:
    """What `work` finds on a disk; LockstepError when the disk gives no answer for `limit_s`.

    However long it takes as a whole: `work` counts its steps. Who waits here can be interrupted.
    """
    steps = Steps()
    done = _start(lambda: work(steps), "lockstep-look")
    tick_s = min(LOOK_S, limit_s / 4)
    # Ticks rather than a clock: a process that was stopped for a while has not waited for anybody.
    num_silent, before = 0, steps.count
    try:
        while wait([done], tick_s).not_done:
            num_silent = num_silent + 1 if steps.count == before else 0
            before = steps.count
            if num_silent * tick_s >= limit_s:
                raise LockstepError(f"{steps.place} does not answer within {limit_s:g} s; see whether its disk does.")
    finally:
        steps.is_wanted = False
    return done.result()


def _start(work: Callable[[], Result], name: str) -> "Future[Result]":
    """Let a daemon thread work."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def read_one(read: Callable[[], Result], limit_s: float, what: str) -> Result:
    """What `read` gives, or its OSError; it is a TimeoutError when nothing comes."""
    outcomes: list[Result | OSError] = []
    read_each(1, lambda _: read(), lambda _, outcome: outcomes.append(outcome), limit_s, what)
    if isinstance(outcomes[0], OSError):
        raise outcomes[0]
    return outcomes[0]
