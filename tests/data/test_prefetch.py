"""Who does which rows: threads and nvJPEG share one queue, leftovers come first, and a failure is the batch's."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.data.block import Request, Rows
from lockstep.data.nvjpeg import MAX_IMAGES, NUM_THREADS
from lockstep.data.prefetch import Making, Pending, Prefetcher
from lockstep.errors import LockstepError


class Recording:
    """A batch that only notes which rows it was asked for."""

    def __init__(self, request: Request, known: int = 0) -> None:
        self.request = request
        self.known = known
        self.filled: list[int] = []
        self.by_nvjpeg: list[int] = []
        self.times_completed = 0
        self.bad_once: set[int] = set()
        self.error: Exception | None = None

    def known_rows(self) -> Rows:
        return np.arange(self.known)

    def fill(self, rows: Rows) -> Rows:
        if self.error:
            raise self.error
        time.sleep(0.001)
        failed = [row for row in rows.tolist() if row in self.bad_once]
        self.bad_once -= set(failed)
        self.filled += [row for row in rows.tolist() if row not in failed]
        return np.array(failed, np.int64)

    def complete(self) -> None:
        self.times_completed += 1

    def finish(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(self.request.samples)), torch.zeros(0)


class Recorder:
    """Makes recordings."""

    def __init__(self, known: int = 0) -> None:
        self.known = known

    def begin(self, request: Request) -> Recording:
        return Recording(request, self.known)


def made(batch: Pending) -> Recording:
    """What has recorded how a batch was made."""
    assert isinstance(batch.making, Recording)
    return batch.making


def request(count: int) -> Request:
    return Request(np.arange(count), 8, lambda rows, sides: (rows, rows), True, True, 8)


@pytest.mark.parametrize("count", [0, 1, 5, 100])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("known", [0, 1])
def test_every_row_is_filled_once_and_the_batch_completed_once(count: int, threads: int, known: int) -> None:
    prefetcher = Prefetcher(Recorder(min(known, count)), threads)
    pending = [prefetcher.start(request(count)) for _ in range(3)]
    for batch in pending:
        assert len(batch.wait()[0]) == count
        assert batch.is_ready
        assert sorted(made(batch).filled) == list(range(count))
        assert made(batch).times_completed == 1
    prefetcher.close()


def test_rows_that_turn_out_bad_are_filled_again() -> None:
    prefetcher = Prefetcher(Recorder(), 2)
    pending = prefetcher.start(request(40))
    made(pending).bad_once = {39}
    pending.wait()
    assert sorted(made(pending).filled) == list(range(40))
    prefetcher.close()


def by_nvjpeg(making: Making, rows: Rows) -> Rows:
    """Takes all but every tenth row."""
    assert isinstance(making, Recording)
    making.by_nvjpeg += [row for row in rows.tolist() if row % 10]
    assert len(rows) <= MAX_IMAGES
    return rows[rows % 10 == 0]


@pytest.mark.parametrize("host_decodes", [True, False])
def test_nvjpeg_and_the_threads_share_the_rows(host_decodes: bool) -> None:
    prefetcher = Prefetcher(Recorder(), 2, by_nvjpeg, host_decodes)
    for batch in [prefetcher.start(request(200)) for _ in range(4)]:
        batch.wait()
        making = made(batch)
        assert sorted(making.filled + making.by_nvjpeg) == list(range(200))
        assert making.times_completed == 1
        if not host_decodes:
            assert not set(making.by_nvjpeg) & set(range(0, 200, 10))
    prefetcher.close()


@pytest.mark.parametrize("helps", [False, True])
@pytest.mark.parametrize("known", [0, 1, 30, 50, 78])
def test_no_row_waits_for_somebody_who_is_never_woken(known: int, helps: bool) -> None:
    """Tasks of any size, such as all the rows whose images are on the device already, do not fill whole blocks."""

    def take_all(making: Making, rows: Rows) -> Rows:
        assert isinstance(making, Recording)
        making.by_nvjpeg += rows.tolist()
        return rows[:0]

    prefetcher = Prefetcher(Recorder(known), 2, take_all)
    prefetcher.balance.helps = helps
    for _ in range(3):
        batch = prefetcher.start(request(80))
        batch.done.result(timeout=60)
        assert sorted(made(batch).filled + made(batch).by_nvjpeg) == list(range(80))
    prefetcher.close()


@pytest.mark.parametrize("helps", [False, True])
def test_threads_help_nvjpeg_only_where_that_is_quicker(helps: bool) -> None:
    gate = threading.Event()

    def wait(making: Making, rows: Rows) -> Rows:
        gate.wait(60)
        return by_nvjpeg(making, rows)[:0]

    prefetcher = Prefetcher(Recorder(), 2, wait)
    prefetcher.balance.helps = helps
    pending = [prefetcher.start(request(320)) for _ in range(3)]
    # nvJPEG's threads wait with a block each; the decode threads do what they may meanwhile.
    expected = 3 * 320 - NUM_THREADS * MAX_IMAGES if helps else 0
    deadline = time.monotonic() + (20 if helps else 0.1)
    while (num_filled := sum(len(made(batch).filled) for batch in pending)) < max(1, expected):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert num_filled >= expected if helps else num_filled == 0
    gate.set()
    for batch in pending:
        batch.wait()
        assert made(batch).times_completed == 1
    prefetcher.close()


def test_leftovers_come_before_later_batches() -> None:
    gate = threading.Event()
    order: list[int] = []

    class Slow(Recording):
        def fill(self, rows: Rows) -> Rows:
            gate.wait(60)
            order.append(len(self.request.samples))
            return super().fill(rows)

    class Path:
        def begin(self, request: Request) -> Recording:
            return Slow(request)

    def leave_all(making: Making, rows: Rows) -> Rows:
        return rows if len(making.request.samples) == 7 else rows[:0]  # type: ignore[attr-defined]

    prefetcher = Prefetcher(Path(), 1, leave_all, host_decodes=False)
    pending = [prefetcher.start(request(count)) for count in (7, 6, 5)]
    pending[1].wait()
    pending[2].wait()  # nvJPEG has done these, and left the first batch to the one thread
    gate.set()
    pending[0].wait()
    assert set(order) == {7}
    prefetcher.close()


def test_an_error_reaches_whoever_waits_and_leaves_the_others_alone() -> None:
    prefetcher = Prefetcher(Recorder(), 2)
    good = prefetcher.start(request(30))
    making = Recording(request(30))
    making.error = LockstepError("The disk is gone; put it back.")
    prefetcher._path = type("Path", (), {"begin": lambda self, request: making})()
    bad = prefetcher.start(request(30))
    with pytest.raises(LockstepError, match="disk is gone"):
        bad.wait()
    good.wait()
    assert making.times_completed == 0
    prefetcher.close()
