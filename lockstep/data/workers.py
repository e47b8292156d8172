"""Many jobs at once in processes of their own, with progress by the sample: what packing and verifying share.

The processes stop together when one fails or the user interrupts, and none outlives a parent that was killed.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_end
from typing import Any, TypeVar

from lockstep.errors import LockstepError

Job = TypeVar("Job")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]
Tick = Callable[[], None]  # a job calls it after each sample

POLL_S = 0.1  # between two looks at the progress of the processes


class Board:
    """What parent and processes share: how many samples are done, and whether to stop."""

    def __init__(self, context: multiprocessing.context.SpawnContext) -> None:
        self.done: Any = context.Value("q", 0)
        self.stop = context.Event()

    def tick(self) -> None:
        """Count a sample, or give up the job."""
        if self.stop.is_set():
            raise LockstepError("Stopped because another process failed.")
        with self.done.get_lock():
            self.done.value += 1


board: Board  # in a worker process, set by `_enter`


def run_jobs(
    work: Callable[[Job, Tick], Result],
    jobs: Sequence[Job],
    *,
    workers: int,
    done: int = 0,
    total: int,
    progress: Progress | None = None,
) -> list[Result]:
    """The result of each job, in order; `progress` is told (samples done, total), counted from `done`.

    `workers` 0 is one for each core that this process may use.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers or cores, len(jobs))
    show = progress or (lambda done, total: None)
    if workers <= 1:
        return _run_here(work, jobs, done, total, show)
    context = multiprocessing.get_context("spawn")  # so that a process holds no pipe of another's
    board = Board(context)
    pool = ProcessPoolExecutor(workers, context, initializer=_enter, initargs=(board,))
    try:
        futures = [pool.submit(_call, work, job) for job in jobs]
        pending, shown = set(futures), 0
        while pending:
            finished, pending = wait(pending, POLL_S, FIRST_COMPLETED)
            for future in finished:
                future.result()
            if (now := board.done.value) != shown:
                show(done + now, total)
                shown = now
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise LockstepError(
            "A worker process was killed, perhaps for want of memory; run the command again with fewer --workers."
        ) from error
    finally:
        board.stop.set()
        pool.shutdown(cancel_futures=True)


def _run_here(
    work: Callable[[Job, Tick], Result], jobs: Sequence[Job], done: int, total: int, show: Progress
) -> list[Result]:
    def tick() -> None:
        nonlocal done
        done += 1
        show(done, total)

    return [work(job, tick) for job in jobs]


def _enter(shared: Board) -> None:
    """Prepare a worker process."""
    global board
    board = shared
    follow_parent()


def follow_parent() -> None:
    """In a process started for a parent: Ctrl-C is for the parent to act on, and the parent's end is the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait_for_end([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _call(work: Callable[[Job, Tick], Result], job: Job) -> Result:
    return work(job, board.tick)
