"""Threads that may hang: what is read in order, and who is waited for how long."""

import gc
import threading
import time

import pytest

from lockstep.data import threads
from lockstep.data.threads import MAX_HUNG, DaemonPool, GivenUp, Steps, Watch, look, read_each, read_one
from lockstep.errors import LockstepError
from tests.data.test_read_process import wait_until

LIMIT_S = 0.5


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LOOK_S", 0.01)


def count(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_no_more_threads_are_started_than_asked_for_and_all_jobs_are_done() -> None:
    pool, done = DaemonPool(3, "test-many"), []
    for number in range(100):
        pool.submit(lambda number=number: done.append(number))  # type: ignore[misc]
        assert count("test-many") <= 3
    wait_until(lambda: sorted(done) == list(range(100)))
    pool.close()
    assert count("test-many") == 0


def test_a_pool_that_is_forgotten_leaves_no_thread() -> None:
    pool = DaemonPool(2, "test-forgotten")
    pool.submit(lambda: None)
    del pool
    gc.collect()
    wait_until(lambda: count("test-forgotten") == 0)


def test_a_closed_pool_takes_no_job() -> None:
    pool = DaemonPool(2, "test-closed")
    pool.submit(lambda: None)
    pool.close()
    pool.submit(lambda: pytest.fail("nobody wants this"))
    assert count("test-closed") == 0


def test_a_thread_with_the_number_of_one_given_up_before_goes_on_working() -> None:
    """The system gives numbers of threads that have ended out again."""
    pool, numbers = DaemonPool(1, "test-again"), []
    for _ in range(5):
        gate, begun = threading.Event(), threading.Event()

        def hang(begun: threading.Event = begun, gate: threading.Event = gate) -> None:
            numbers.append(threading.get_ident())
            begun.set()
            gate.wait(60)
            raise GivenUp

        pool.submit(hang)
        assert begun.wait(60)
        assert pool.give_up(numbers[-1])
        gate.set()
        wait_until(lambda: count("test-again") == 1)
        done = []
        for _ in range(3):
            pool.submit(lambda done=done: done.append(1))  # type: ignore[misc]
        wait_until(lambda done=done: len(done) == 3)  # type: ignore[misc]
    pool.close()


def test_a_thread_given_up_is_replaced_and_takes_no_further_job() -> None:
    pool, gate, by = DaemonPool(1, "test-given-up"), threading.Event(), []

    def hang() -> None:
        by.append(threading.get_ident())
        gate.wait(60)
        raise GivenUp

    pool.submit(hang)
    wait_until(lambda: len(by) == 1)
    for _ in range(5):
        pool.submit(lambda: by.append(threading.get_ident()))
    assert not pool.give_up(threading.get_ident())
    assert pool.give_up(by[0])
    assert not pool.give_up(by[0])
    wait_until(lambda: len(by) == 6)
    gate.set()
    wait_until(lambda: count("test-given-up") == 1)
    for _ in range(5):
        pool.submit(lambda: by.append(threading.get_ident()))
    wait_until(lambda: len(by) == 11)
    assert by[0] not in by[1:]
    pool.close()


def test_threads_that_nobody_counts_end_with_the_pool() -> None:
    """One that was given up may be back before it hears of it, and wait for a job beside the one in its place."""
    pool, by = DaemonPool(2, "test-uncounted"), []
    pool.submit(lambda: by.append(threading.get_ident()))
    wait_until(lambda: len(by) == 1)
    assert pool.give_up(by[0])
    assert count("test-uncounted") == 2
    pool.close()
    wait_until(lambda: count("test-uncounted") == 0)


def test_a_thread_that_comes_back_too_late_is_told() -> None:
    watch, mine = Watch(0.05), threading.get_ident()
    watch.begin(7)
    assert watch.take_overdue(mine) is None
    time.sleep(0.1)
    assert watch.take_overdue(mine) == 7
    assert watch.take_overdue(mine) is None
    with pytest.raises(GivenUp):
        watch.end()
    watch.begin(8)
    watch.end()
    watch.close()
    with pytest.raises(GivenUp):
        watch.begin(9)


def test_everything_is_taken_in_order_with_the_reason_where_there_is_nothing() -> None:
    gate, taken = threading.Event(), []

    def read(number: int) -> int:
        if number in (2, 5):
            gate.wait(60)
        if number == 3:
            raise FileNotFoundError(2, "gone")
        return 10 * number

    read_each(7, read, lambda number, outcome: taken.append((number, outcome)), LIMIT_S, "a disk")
    gate.set()
    assert [number for number, _ in taken] == list(range(7))
    assert [outcome for _, outcome in taken if isinstance(outcome, int)] == [0, 10, 40, 60]
    assert [str(taken[number][1].strerror) for number in (2, 3, 5)] == [
        "not read within 0.5 s", "gone", "not read within 0.5 s",
    ]  # fmt: skip


def test_many_reads_that_hang_are_one_sentence() -> None:
    gate, taken = threading.Event(), []
    with pytest.raises(LockstepError, match=r"16 reads did not come within 0\.01 s, the last of a disk; see whether"):
        read_each(100, lambda _: gate.wait(60), lambda number, _: taken.append(number), 0.01, "a disk")
    gate.set()
    assert taken == list(range(MAX_HUNG - 1))


def test_an_error_of_the_work_reaches_the_caller() -> None:
    def take(number: int, outcome: object) -> None:
        raise LockstepError("The disk is full; free some space.")

    with pytest.raises(LockstepError, match="disk is full"):
        read_each(3, lambda number: number, take, LIMIT_S, "a disk")


def test_an_interrupted_caller_leaves_no_thread_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "wait", interrupt)
    taken: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        read_each(10**6, lambda _: time.sleep(0.001), lambda number, _: taken.append(number), LIMIT_S, "a disk")
    num_taken = len(taken)
    time.sleep(0.05)
    assert len(taken) == num_taken


def test_one_read_is_its_result_or_its_error() -> None:
    assert read_one(lambda: 7, LIMIT_S, "a disk") == 7
    gate = threading.Event()
    with pytest.raises(TimeoutError, match=r"not read within 0\.5 s"):
        read_one(lambda: gate.wait(60), LIMIT_S, "a disk")
    gate.set()


def test_what_is_looked_at_comes_back_or_its_error_does() -> None:
    def fail(steps: Steps) -> None:
        raise OSError(5, "broken")

    assert look(lambda steps: 7, LIMIT_S) == 7
    with pytest.raises(OSError, match="broken"):
        look(fail, LIMIT_S)


def test_a_look_that_moves_may_take_as_long_as_it_takes() -> None:
    def crawl(steps: Steps) -> int:
        for _ in range(8):
            steps.ask("a folder")
            time.sleep(0.1)
        return 8

    assert look(crawl, 0.3) == 8


def test_a_look_that_stands_still_is_a_sentence_and_its_thread_goes_no_further() -> None:
    released, ended = threading.Event(), threading.Event()

    def hang(steps: Steps) -> None:
        steps.ask("/far/train")
        released.wait(60)
        try:
            steps.ask("/far/val")
        except GivenUp:
            ended.set()

    with pytest.raises(LockstepError, match=r"^/far/train does not answer within 0\.1 s; see whether its disk does\.$"):
        look(hang, 0.1)
    released.set()
    assert ended.wait(60)
