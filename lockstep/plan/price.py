"""Messages on a cluster that nobody has: which all-reduces there are to choose from, and what each costs. Torch-free.

The backend's own is NCCL's choice (`nccl.py`) or a ring; ours go by the links (`collectives.py`). The result has the
form of what a run measures, so that the trainer's own functions propose reductions from it (`choose.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from lockstep.comm.cost import FLAT, GROUPED, Choice, Timing
from lockstep.comm.topology import Link
from lockstep.plan.choose import MAX_PEERS, MIN_BYTES
from lockstep.plan.cluster import Shape
from lockstep.plan.collectives import (
    Phase,
    is_regular,
    list_group_sizes,
    predict_phases,
    predict_scatter,
)
from lockstep.plan.nccl import BASE_US, NETWORK_US, NVLINK_US, PCIE_US, predict_nccl, predict_nccl_scatter

SIMPLE = 2  # the protocol that NCCL sends between two ranks by


def list_planned_choices(shape: Shape) -> list[Choice]:
    """Every all-reduce worth a look, the backend's own first; over NCCL groups are nodes, as in a run."""
    if shape.num_devices == 1:
        return [FLAT]
    choices = [Choice("doubling")]
    sizes = [shape.per_node] if shape.machine.backend == "nccl" else list_group_sizes(shape)
    choices += [Choice(algorithm, size) for size in sizes if size > 1 for algorithm in GROUPED]
    if shape.machine.backend == "nccl" and shape.num_nodes == 1:
        choices = []
    return [FLAT, *(c for c in choices if is_regular(c, shape) and _count_peers(c, shape) <= MAX_PEERS)]


def _count_peers(choice: Choice, shape: Shape) -> int:
    if choice.algorithm not in GROUPED:
        return (shape.num_devices - 1).bit_length() + 1
    num_groups = -(-shape.num_devices // choice.group_size)
    return choice.group_size - 1 + (num_groups - 1).bit_length() + 1


def price(choice: Choice, num_bytes: float, shape: Shape) -> tuple[Phase, ...]:
    """The phases of one all-reduce with their seconds."""
    if shape.num_devices == 1:
        return ()
    if shape.machine.backend == "nccl":
        if choice == FLAT:
            return (Phase("inter" if shape.num_nodes > 1 else "intra", predict_nccl(num_bytes, shape).seconds),)
        shape = _send_by_nccl(shape)
    return predict_phases(choice, num_bytes, shape)


@lru_cache(maxsize=64)
def _send_by_nccl(shape: Shape) -> Shape:
    """The links as NCCL's messages between two ranks find them: each round is a launch and a hop."""
    hop = (NVLINK_US if shape.machine.wiring == "nvlink" else PCIE_US)["ring"][SIMPLE]
    base, across = BASE_US["ring"][SIMPLE], NETWORK_US["ring"][SIMPLE]
    return replace(
        shape,
        intra=Link(max(shape.intra.latency_s, (base + hop) * 1e-6), shape.intra.bytes_per_s),
        inter=Link(max(shape.inter.latency_s, (base + across) * 1e-6), shape.inter.bytes_per_s),
    )


def name_choice(choice: Choice, num_bytes: float, shape: Shape) -> str:
    """A choice in words; of the backend's own, what NCCL takes."""
    if choice == FLAT and shape.machine.backend == "nccl" and shape.num_devices > 1:
        return f"NCCL {predict_nccl(num_bytes, shape).name}"
    return str(choice)


def expect_timings(choices: Sequence[Choice], max_bytes: float, shape: Shape) -> tuple[Timing, ...]:
    """What a run would measure there: each choice at sizes that double from 1 KiB to beyond the largest message."""
    sizes = [MIN_BYTES]
    while sizes[-1] < max_bytes:
        sizes.append(2 * sizes[-1])
    return tuple(
        Timing(choice, size, max(1e-9, sum(phase.seconds for phase in price(choice, size, shape))))
        for choice in choices
        for size in sizes
    )


def price_sharded(
    num_bytes: float, weight_bytes: float, shape: Shape, *, has_ratios: bool
) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """Gradients summed so that each device of a node has a part, and the new weights gathered: the phases of both.

    Inside a node a reduce-scatter, between nodes an all-reduce of each part among those that hold it, and after the
    update an all-gather. Rules with trust ratios must also sum their norms inside the node: one short message.
    """
    scatter = predict_nccl_scatter if shape.machine.backend == "nccl" else predict_scatter
    before = [Phase("intra", scatter(num_bytes, shape))] if shape.per_node > 1 else []
    if shape.num_nodes > 1:
        # Those that hold the same part, one on each node; the parts share the node's link.
        part = Link(shape.inter.latency_s, shape.inter.bytes_per_s / shape.per_node)
        machine = replace(shape.machine, nics_per_node=1, nccl=tuple(n for n in shape.machine.nccl if n != "nvls"))
        column = replace(shape, per_node=1, inter=part, machine=machine)
        before += price(FLAT, num_bytes / shape.per_node, column)
    after = [Phase("intra", scatter(weight_bytes, shape))] if shape.per_node > 1 else []
    if has_ratios and shape.per_node > 1:
        node = replace(shape, num_nodes=1)
        after = [*price(FLAT, 4 * 512, node), *after]
    return tuple(before), tuple(after)
