"""Jobs in several processes: results in order, one failure for all, a killed process in a sentence."""

import os
import signal
import time

import pytest

from lockstep.data.workers import Tick, run_jobs
from lockstep.errors import LockstepError


def double(job: int, tick: Tick) -> int:
    for _ in range(job):
        tick()
    return 2 * job


def fail_on_one(job: int, tick: Tick) -> int:
    if job == 1:
        raise LockstepError("Job 1 cannot be done.")
    while True:  # until the others' failure stops this
        tick()
        time.sleep(0.001)


def die_on_one(job: int, tick: Tick) -> int:
    if job == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return job


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_every_sample_is_counted(workers: int) -> None:
    shown: list[tuple[int, int]] = []
    results = run_jobs(double, [3, 0, 5, 1], workers=workers, done=2, total=11, progress=lambda *now: shown.append(now))
    assert results == [6, 0, 10, 2]
    assert shown[-1] == (11, 11)
    assert shown == sorted(set(shown))


def test_one_failure_stops_all() -> None:
    with pytest.raises(LockstepError, match=r"Job 1 cannot be done\."):
        run_jobs(fail_on_one, [0, 1], workers=2, total=1)


def test_a_killed_process_is_one_sentence() -> None:
    with pytest.raises(LockstepError, match=r"killed, perhaps for want of memory; .* fewer --workers"):
        run_jobs(die_on_one, [0, 1], workers=2, total=1)
