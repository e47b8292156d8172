"""Seconds that work takes on a device, by its own clock, and how fast the device copies: what floors are made of."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

Call = Callable[[], object]
Result = TypeVar("Result")
COPY_BYTES = 1 << 30
COLD_BYTES = 256 << 20  # of copies of one array; the largest L2 caches hold about 60 MB
MIN_COPIES = 3
ROUNDS = 20


def measure_copy(device: torch.device) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 16
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / statistics.median(measure_calls(lambda: target.copy_(source), device, 20))


def measure_calls(call: Call, device: torch.device, rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls, after a warm-up."""
    for _ in range(3 if device.type == "cuda" else 1):
        call()
    if device.type == "cpu":
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    # The host may be slower than the device: it must not run dry between two events.
    torch.cuda._sleep(20_000_000)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def capture(call: Call) -> Call:
    """The call as a CUDA graph to replay."""
    warm_up(call)
    return record(call)[0].replay


def warm_up(call: Call) -> None:
    """Call it a few times as a recording will: on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)


def record(call: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """What a call launches as a CUDA graph, and the call's results; `pool` is another graph's memory to share."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = call()
    return graph, results


def count_copies(array_bytes: int) -> int:
    """How many copies of an array are far beyond the cache together."""
    return max(MIN_COPIES, math.ceil(COLD_BYTES / array_bytes))


def measure_cold(launches: Sequence[Call]) -> float:
    """Seconds of one launch, among the same on other copies; all results are kept, so that none is written twice."""
    return measure_replay(capture(lambda: [launch() for launch in launches])) / len(launches)


def measure_replay(replay: Call) -> float:
    """Seconds of one replay, the median of several."""
    return statistics.median(measure_calls(replay, torch.device("cuda"), ROUNDS))
