import random
import threading
import time

import pytest
import torch

from lockstep.comm.allreduce import ALGORITHMS, build_groups
from lockstep.comm.channel import Channel
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_work_runs_in_the_order_of_submission_on_one_other_thread() -> None:
    channel, log = Channel(CPU), []

    def note(number: int) -> None:
        time.sleep(random.random() * 0.002)
        log.append((number, threading.get_ident()))

    pending = [channel.submit(lambda number=number: note(number)) for number in range(30)]
    pending[-1].wait()
    numbers, threads = zip(*log, strict=True)
    assert numbers == tuple(range(30))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    channel.close()


def test_submit_returns_before_the_work_is_done() -> None:
    channel, gate = Channel(CPU), threading.Event()
    pending = channel.submit(lambda: gate.wait(10) and None)
    gate.set()  # never reached if submit ran the work itself within the ten seconds
    started = time.monotonic()
    pending.wait()
    assert time.monotonic() - started < 5
    channel.close()


def test_an_error_comes_out_of_wait_and_stops_what_follows() -> None:
    channel, log = Channel(CPU), []

    def fail() -> None:
        raise ValueError("a peer went away")

    good = channel.submit(lambda: log.append("before"))
    bad, later = channel.submit(fail), channel.submit(lambda: log.append("after"))
    good.wait()
    for pending in (bad, later, bad):
        with pytest.raises(ValueError, match="a peer went away"):
            pending.wait()
    assert log == ["before"]
    channel.close()


def test_close_returns_while_work_is_stuck_and_fails_what_has_not_begun() -> None:
    channel, gate, has_begun = Channel(CPU), threading.Event(), threading.Event()

    def hang() -> None:
        has_begun.set()
        gate.wait(30)

    stuck, later = channel.submit(hang), channel.submit(lambda: None)
    has_begun.wait(60)
    started = time.monotonic()
    channel.close()
    assert time.monotonic() - started < 5
    gate.set()
    stuck.wait()
    with pytest.raises(LockstepError, match="closed before"):
        later.wait()


def test_close_may_come_twice_and_without_work() -> None:
    channel = Channel(CPU)
    channel.close()
    channel.close()
    with pytest.raises(LockstepError, match="closed"):
        channel.submit(lambda: None).wait()


def sum_on_two_channels(world: World) -> list[bytes]:
    """Two channels at the same time, with pauses that differ by rank and run."""
    groups = [build_groups([range(2), range(2, world.size)], world.rank) for _ in range(2)]
    channels = [Channel(CPU) for _ in groups]
    results = []
    for _ in range(3):
        generator = torch.Generator().manual_seed(world.rank)
        buffers = [torch.randn(501, generator=generator) for _ in range(12)]
        pending = []
        for index, buffer in enumerate(buffers):
            algorithm = list(ALGORITHMS.values())[index % len(ALGORITHMS)]

            def work(buffer: torch.Tensor = buffer, index: int = index, algorithm=algorithm) -> None:  # type: ignore[no-untyped-def]
                time.sleep(random.random() * 0.005)
                algorithm(buffer, groups[index % 2])

            pending.append(channels[index % 2].submit(work))
            time.sleep(random.random() * 0.002)
        for each in random.sample(pending, len(pending)):
            each.wait()
        results.append(b"".join(buffer.numpy().tobytes() for buffer in buffers))
    for channel in channels:
        channel.close()
    return results


def test_two_channels_give_the_same_sums_whatever_the_timing() -> None:
    by_rank = run_ranks(sum_on_two_channels, 5)
    assert len({result for results in by_rank for result in results}) == 1


@pytest.mark.gpu
def test_on_a_gpu_the_current_stream_waits_and_not_the_host() -> None:
    device = torch.device("cuda")
    channel = Channel(device)
    torch.cuda.synchronize()
    values = torch.zeros(1000, device=device)
    values.mul_(3).add_(1).fill_(0)  # CUDA loads a kernel at its first use, which waits for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # a quarter of a second or more of work before the values are ready
    values.fill_(1)
    started = time.monotonic()

    def triple() -> None:
        values.mul_(3)

    pending = channel.submit(triple)
    pending.wait()
    values.add_(1)
    assert time.monotonic() - started < 0.1
    assert values.tolist() == [4.0] * 1000


@pytest.mark.gpu
def test_on_a_gpu_an_error_comes_out_of_wait() -> None:
    channel = Channel(torch.device("cuda"))

    def fail() -> None:
        raise ValueError("a peer went away")

    pending = channel.submit(fail)
    with pytest.raises(ValueError, match="a peer went away"):
        pending.wait()
