"""Measuring all-reduces on real ranks: all get the same answer, within the time there is."""

import time

import pytest
import torch

from lockstep.comm.cost import FLAT, Choice, Timing
from lockstep.comm.hybrid import Hybrid, PlannedSum
from lockstep.comm.topology import Topology
from lockstep.comm.wire import Wire
from lockstep.comm.world import World
from lockstep.engine.messages import measure_messages
from lockstep.plan.choose import list_choices
from tests.ranks import run_ranks

SIZES = [1024, 4096, 65536]


def measure(world: World, budget_s: float) -> list[Timing]:
    topology = Topology(((0, 1), tuple(range(2, world.size)))) if world.size > 2 else Topology(((0, 1),))
    hybrid = Hybrid(topology, world.rank, world.device, Wire("fp32", "before"))
    array = torch.ones(65536, device=world.device)
    timings = measure_messages(hybrid, world, array, list_choices(topology, "gloo"), SIZES, budget_s)
    hybrid.close()
    return timings


def test_all_ranks_get_the_same_measurements() -> None:
    first, *others = run_ranks(measure, 3, 5.0)
    assert all(other == first for other in others)
    assert {timing.num_bytes for timing in first} == set(SIZES)
    assert FLAT in {timing.choice for timing in first}
    assert all(0 < timing.seconds < 5 for timing in first)


def test_without_time_the_backends_own_is_measured_at_the_smallest_size_and_nothing_else() -> None:
    ((choice, num_bytes, seconds),) = run_ranks(measure, 3, 1e-9)[0]
    assert (choice, num_bytes) == (FLAT, 1024)
    assert seconds > 0


def measure_where_rank_1_has_little_memory(world: World) -> list[Timing]:
    hybrid = Hybrid(Topology(((0, 1),)), world.rank, world.device, Wire("fp32", "before"))
    reserve = hybrid.reserve

    def reserve_little(sums: list[PlannedSum]) -> None:
        if world.rank == 1 and any(one.choice != FLAT and one.buffer.nbytes > 4096 for one in sums):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        reserve(sums)

    hybrid.reserve = reserve_little  # type: ignore[method-assign, assignment]
    array = torch.ones(65536, device=world.device)
    timings = measure_messages(hybrid, world, array, [FLAT, Choice("doubling")], SIZES, 5.0)
    hybrid.close()
    return timings


def test_what_one_rank_has_no_memory_for_is_sent_by_none() -> None:
    first, second = run_ranks(measure_where_rank_1_has_little_memory, 2)
    assert first == second
    assert {(choice, size) for choice, size, _ in first} == {
        *((FLAT, size) for size in SIZES),
        *((Choice("doubling"), size) for size in SIZES[:2]),
    }


class SlowHybrid:
    """An all-reduce of ours that takes long even for the first message."""

    bytes_per_element = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Choice, int]] = []

    def prepare(self, choices: list[Choice]) -> None: ...

    def reserve(self, sums: list[PlannedSum]) -> None: ...

    def run(self, buffer: torch.Tensor, choice: Choice) -> None:
        self.calls.append((choice, buffer.nbytes))
        time.sleep(0.001 if choice == FLAT else 0.15)


def test_the_bound_holds_for_the_first_size_too() -> None:
    from tests.ranks import world_of_one

    hybrid = SlowHybrid()
    choices = [FLAT, *(Choice("torus", size) for size in range(2, 40))]
    begun = time.perf_counter()
    timings = measure_messages(hybrid, world_of_one(), torch.ones(65536), choices, SIZES, 0.5)  # type: ignore[arg-type]
    assert time.perf_counter() - begun < 5  # all of them would take 11 s at the first size alone
    assert timings[0].choice == FLAT


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_nccl_ranks_measure_every_all_reduce_by_the_devices_clock(size: int) -> None:
    first, *others = run_ranks(measure, size, 10.0, backend="nccl")
    assert all(other == first for other in others)
    assert {timing.num_bytes for timing in first} == set(SIZES)
    assert len({timing.choice for timing in first}) > 1
