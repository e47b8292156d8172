"""Seconds of an all-reduce on nodes that are all alike, at any scale, without listing a single rank. Torch-free.

The same messages that `comm/cost.py` counts one by one, by formulas: what `comm.cost.predict_seconds` says of such a
topology, these say of a million devices. `nccl.py` has what NCCL chooses from; `graph.py` asks for phases, each on the
links inside nodes or between them.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lockstep.comm.cost import GROUPED, SHORT_BYTES, Choice, count_pieces
from lockstep.errors import LockstepError
from lockstep.plan.cluster import Shape

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Load:
    """Messages that travel at the same time, as shares of the whole message on what is busiest.

    `inside` is a rank's share of the links in its node. Between nodes `across` is a node's and `flow` one rank's: a
    rank has one of the node's NICs, however many there are.
    """

    inside: float = 0.0
    across: float = 0.0
    flow: float = 0.0


@dataclass(frozen=True)
class Phase:
    """One part of an all-reduce, by which links it takes longest on."""

    level: str  # "intra" or "inter"
    seconds: float


def predict_phases(choice: Choice, num_bytes: float, shape: Shape) -> tuple[Phase, ...]:
    """The phases of one all-reduce, in order; neighbours on the same links joined."""
    if choice.algorithm == "flat":
        return _ring(num_bytes, shape)
    size, num_groups = _groups(choice, shape)
    pieces = count_pieces(choice.algorithm, num_bytes, size) if choice.algorithm in GROUPED else 1
    is_short = num_bytes <= SHORT_BYTES * pieces
    phases: list[Phase] = []
    for load in _loads(size, num_groups, pieces, is_short, shape.per_node):
        phase = _time(load, num_bytes, shape)
        if phases and phases[-1].level == phase.level:
            phase = Phase(phase.level, phases.pop().seconds + phase.seconds)
        phases.append(phase)
    return tuple(phases)


def predict_all_reduce(choice: Choice, num_bytes: float, shape: Shape) -> float:
    """Seconds of one all-reduce, by the links alone."""
    return sum(phase.seconds for phase in predict_phases(choice, num_bytes, shape))


def is_regular(choice: Choice, shape: Shape) -> bool:
    """Whether the formulas hold: all groups alike."""
    if choice.algorithm not in GROUPED:
        return True
    if choice.group_size <= shape.per_node:
        return shape.per_node % choice.group_size == 0
    return shape.num_nodes % min(choice.group_size // shape.per_node, shape.num_nodes) == 0


def list_group_sizes(shape: Shape) -> list[int]:
    """Group sizes worth a look: a node, its half, and the whole nodes nearest to √p and √(p/2)."""
    per_node, num_nodes = shape.per_node, shape.num_nodes
    sizes = {per_node, per_node // 2} if per_node % 2 == 0 else {per_node}
    for target in (shape.num_devices**0.5, (shape.num_devices / 2) ** 0.5):
        whole = [count for count in _divisors(num_nodes) if 1 < count < num_nodes]
        if whole:
            sizes.add(per_node * min(whole, key=lambda count: abs(count * per_node - target)))
    return sorted(size for size in sizes if 1 < size < shape.num_devices or size == per_node > 1)


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def predict_scatter(num_bytes: float, shape: Shape) -> float:
    """Seconds of a reduce-scatter, or of an all-gather, round a ring inside each node."""
    count = shape.per_node
    return (count - 1) * (shape.intra.latency_s + num_bytes / count / shape.intra.bytes_per_s)


def _ring(num_bytes: float, shape: Shape) -> tuple[Phase, ...]:
    """Ranks in order: a ring leaves each node once."""
    count = shape.num_devices
    num_inter = shape.num_nodes - 1
    num_intra = count - 1 - num_inter
    sent = 2 * (count - 1) / count * num_bytes
    inside = sent / shape.intra.bytes_per_s if num_intra else 0.0
    across = sent / (shape.inter.bytes_per_s / shape.machine.nics_per_node) if num_inter else 0.0
    latency = 2 * (num_intra * shape.intra.latency_s + num_inter * shape.inter.latency_s)
    return (Phase("inter" if num_inter else "intra", latency + max(inside, across)),) if count > 1 else ()


def _time(load: Load, num_bytes: float, shape: Shape) -> Phase:
    intra, inter = shape.intra, shape.inter
    across = max(load.across, load.flow * shape.machine.nics_per_node)
    inside_s = intra.latency_s + load.inside * num_bytes / intra.bytes_per_s if load.inside else 0.0
    across_s = inter.latency_s + across * num_bytes / inter.bytes_per_s if across else 0.0
    return Phase("inter", across_s) if across_s >= inside_s else Phase("intra", inside_s)


def _groups(choice: Choice, shape: Shape) -> tuple[int, int]:
    """Ranks in a group, and how many groups there are."""
    if not is_regular(choice, shape):
        raise LockstepError(
            f"{choice} does not divide {shape.num_nodes} nodes of {shape.per_node} into equal groups; give another."
        )
    if choice.algorithm not in GROUPED:
        return 1, shape.num_devices
    size = choice.group_size
    if size > shape.per_node:
        size = shape.per_node * min(size // shape.per_node, shape.num_nodes)
    return size, shape.num_devices // size


@lru_cache(maxsize=4096)
def _loads(size: int, num_groups: int, pieces: int, is_short: bool, per_node: int) -> tuple[Load, ...]:
    """To the owners of the pieces, among the owners, and back."""
    to_owners = _spread(size, pieces, per_node)
    if size >= per_node:
        # Each owner of a piece has a node to itself among the owners of that piece.
        per_piece = pieces if size == per_node else max(1, pieces * per_node // size)
        middle = [Load(0.0, share * per_piece, share) for share in _shares(num_groups, 1 / pieces, is_short)]
    else:
        middle = [
            Load(share if near else 0.0, share * pieces * crossings, share if crossings else 0.0)
            for share, (near, crossings) in zip(
                _shares(num_groups, 1 / pieces, is_short),
                _crossings(num_groups, per_node // size, is_short),
                strict=True,
            )
        ]
    ends = [to_owners] if to_owners != Load() else []
    return (*ends, *middle, *ends)


def _spread(size: int, pieces: int, per_node: int) -> Load:
    """Every member of a group sends each piece to its owner."""
    if size <= per_node:
        # An owner takes from all others; who owns nothing sends all.
        sent = 1.0 if size > pieces else (pieces - 1) / pieces
        return Load(max((size - 1) / pieces, sent)) if size > 1 else Load()
    nodes = size // per_node
    owners = max(1, pieces // nodes)  # on a node that has any
    bare = nodes > pieces  # there are nodes without an owner
    inside = max((per_node - 1) / pieces, (owners - (pieces > nodes)) / pieces if per_node > 1 else 0.0)
    taken = owners * (size - per_node) / pieces
    sent = per_node * (pieces - (0 if bare else owners)) / pieces
    flow = max((size - per_node) / pieces, (pieces - (0 if bare else owners)) / pieces)
    return Load(inside, max(taken, sent), flow)


def _shares(count: int, share: float, is_short: bool) -> list[float]:
    """What travels in each round among so many owners of one piece."""
    rounds = count.bit_length() - 1
    fold = [share] if count > 1 << rounds else []
    halves = [share if is_short else share / 2 ** (number + 1) for number in range(rounds)]
    return [*fold, *halves, *([] if is_short else reversed(halves)), *fold]


@lru_cache(maxsize=256)
def _crossings(count: int, per_node: int, is_short: bool) -> tuple[tuple[bool, int], ...]:
    """For each round of `_shares`, with so many owners in a row on each node: whether any message stays inside a node,
    and how many at most leave one."""
    rounds = count.bit_length() - 1
    extra = count - (1 << rounds)
    if not extra and per_node & (per_node - 1) == 0:
        halves = [(True, 0) if 1 << number < per_node else (False, per_node) for number in range(rounds)]
        return (*halves, *(() if is_short else reversed(halves)))
    # Owners beyond a power of two shift the others against the nodes: counted, in arrays.
    places = np.concatenate([np.arange(0, 2 * extra, 2), np.arange(2 * extra, count)]) // per_node
    order = np.arange(len(places))
    halves = [_count_leaving(places, places[order ^ (1 << number)]) for number in range(rounds)]
    pairs = np.arange(0, 2 * extra, 2)
    fold = [_count_leaving((pairs + 1) // per_node, pairs // per_node)] if extra else []
    return (*fold, *halves, *(() if is_short else reversed(halves)), *fold)


def _count_leaving(sources: IntArray, targets: IntArray) -> tuple[bool, int]:
    leaving = sources != targets
    if not leaving.any():
        return True, 0
    most = max(int(np.bincount(ends[leaving]).max()) for ends in (sources, targets))
    return bool((~leaving).any()), most
