"""Sums on real ranks: what they need beside their buffers is known, and taken, before any of them is sent."""

from typing import Literal

import pytest
import torch

from lockstep.comm.cost import FLAT, Choice
from lockstep.comm.hybrid import Hybrid, PlannedSum
from lockstep.comm.topology import Topology
from lockstep.comm.wire import Wire
from lockstep.comm.world import World
from tests.ranks import Backend, over_nccl, run_ranks

CHOICES = [FLAT, Choice("doubling"), *(Choice(name, size) for name in ("hierarchical", "torus") for size in (2, 4))]
# Short and long for doubling, for two masters, and around what a window holds at a time.
SIZES = [0, 1, 7, 70_001, 600_000, 1_100_003]
WIRES: list[tuple[Literal["fp32", "fp16", "bf16"], Literal["before", "split", "fp32"]]] = [
    ("fp32", "before"),
    ("fp16", "split"),
    ("bf16", "fp32"),
]


def sum_what_was_reserved(world: World, nodes: tuple[tuple[int, ...], ...]) -> list[str]:
    """Each sum in turn, reserved first; what still had to be taken for it, in words."""
    found = []
    topology = Topology(nodes)
    for precision, division in WIRES:
        hybrid = Hybrid(topology, world.rank, world.device, Wire(precision, division))
        hybrid.prepare(CHOICES)
        scratch = hybrid._groups[1].scratch
        for choice in CHOICES:
            for numel in SIZES:
                # Half gradients travel as they are, whatever the wire.
                for dtype in (torch.float32, torch.float16) if precision == "fp32" else (torch.float32,):
                    scratch._arrays.clear()
                    buffer = torch.ones(numel, dtype=dtype, device=world.device)
                    num_exact = min(2, numel)
                    hybrid.reserve([PlannedSum(buffer, choice, num_exact)])
                    reserved = {key: array.numel() for key, array in scratch._arrays.items()}
                    hybrid.run(buffer, choice, num_exact)
                    taken = {key: array.numel() for key, array in scratch._arrays.items()}
                    if reserved != taken or not torch.allclose(buffer, torch.full_like(buffer, world.size), rtol=0.01):
                        found.append(f"{choice} {numel} {dtype} {precision} {division}: {reserved}, then {taken}")
        hybrid.close()
    return found


@pytest.mark.parametrize("backend", ["gloo", over_nccl()])
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2, 3, 4),)])
def test_a_sum_takes_no_more_memory_than_was_reserved_for_it(
    backend: Backend, nodes: tuple[tuple[int, ...], ...]
) -> None:
    size = sum(map(len, nodes))
    assert run_ranks(sum_what_was_reserved, size, nodes, backend=backend, timeout_s=300) == [[]] * size


def reserve_alone(world: World) -> bool:
    """Whether one rank can reserve while the others do something else."""
    hybrid = Hybrid(Topology((tuple(range(world.size)),)), world.rank, world.device, Wire("fp16", "before"))
    hybrid.prepare(CHOICES[:4])
    if world.rank == 1:
        hybrid.reserve([PlannedSum(torch.ones(1 << 20, device=world.device), choice) for choice in CHOICES[:4]])
    world.barrier()
    buffer = torch.ones(100, device=world.device)
    hybrid.run(buffer, Choice("doubling"))
    hybrid.close()
    return bool((buffer == world.size).all())


def test_reserving_sends_nothing() -> None:
    assert all(run_ranks(reserve_alone, 2))
