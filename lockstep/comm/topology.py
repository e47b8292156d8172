"""Where the ranks stand: nodes, ranks per node, and the links inside a node and between nodes. Torch-free.

Found from one host name per rank, or read from a cluster file (`cluster_file.py`); `cost.py` turns it into seconds, and
`plan_groups` into the groups that the hierarchical and torus all-reduce work with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from lockstep.errors import LockstepError


@dataclass(frozen=True)
class Link:
    """A connection: seconds before the first byte arrives, bytes per second after that in each direction."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0 and self.bytes_per_s > 0):
            raise LockstepError(f"{self} is no link; the latency must be at least 0 and the bandwidth above 0.")


# Rough guesses, until the tuner has measured: ranks of one node through its memory, nodes over 10 Gbit/s Ethernet.
GUESSED_INTRA = Link(latency_s=5e-6, bytes_per_s=5e9)
GUESSED_INTER = Link(latency_s=30e-6, bytes_per_s=1.25e9)


@dataclass(frozen=True)
class Topology:
    """The ranks on each node; `intra` is each rank's own link inside it, `inter` a node's link, shared by its ranks."""

    nodes: tuple[tuple[int, ...], ...]
    intra: Link = GUESSED_INTRA
    inter: Link = GUESSED_INTER

    def __post_init__(self) -> None:
        if not self.nodes or not all(self.nodes):
            raise LockstepError(f"The nodes {self.nodes} include none with a rank; every node needs at least one.")
        if sorted(self.order) != list(range(self.num_ranks)):
            raise LockstepError(f"The nodes {self.nodes} must hold each rank from 0 to {self.num_ranks - 1} once.")

    # Asked for at every prediction, and a thousand ranks take long to hash.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.intra, self.inter))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, node by node."""
        return tuple(rank for node in self.nodes for rank in node)

    @property
    def num_ranks(self) -> int:
        return len(self.order)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @cached_property
    def _home(self) -> dict[int, int]:
        return {rank: index for index, node in enumerate(self.nodes) for rank in node}

    def node_of(self, rank: int) -> int:
        """The index of the node that holds `rank`."""
        if rank not in self._home:
            raise LockstepError(
                f"There is no rank {rank}; the topology {self.key()} has ranks 0 to {self.num_ranks - 1}."
            )
        return self._home[rank]

    def key(self) -> str:
        """A short name such as "4x8" (nodes x ranks) or "2x8+1x4"; what was measured is remembered under it."""
        runs = [(len(list(run)), size) for size, run in groupby(len(node) for node in self.nodes)]
        name = "+".join(f"{count}x{size}" for count, size in runs)
        # A ring in rank order over ranks dealt out to nodes in turn crosses nodes at every hop: not the same machine.
        return name if self.order == tuple(range(self.num_ranks)) else f"{name}-interleaved"


def find_topology(hosts: Sequence[str]) -> Topology:
    """The topology of ranks that report these host names (or node ids), with guessed links."""
    if not hosts:
        raise LockstepError("A topology needs the host name of at least one rank, but there is none.")
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return Topology(tuple(tuple(ranks) for ranks in nodes.values()))


def plan_groups(topology: Topology, group_size: int) -> tuple[tuple[int, ...], ...]:
    """Groups of at most `group_size` ranks, in node order: parts of one node, or as many whole nodes as fit."""
    if group_size < 1:
        raise LockstepError(f"A group size of {group_size} is impossible; give 1 or more.")
    groups: list[tuple[int, ...]] = []
    joined: tuple[int, ...] = ()  # whole nodes, still open for the next one
    for node in topology.nodes:
        if joined and len(joined) + len(node) > group_size:
            groups.append(joined)
            joined = ()
        if len(node) > group_size:
            groups += [node[start : start + group_size] for start in range(0, len(node), group_size)]
        else:
            joined += node
    return (*groups, joined) if joined else tuple(groups)


def group_sizes(topology: Topology) -> list[int]:
    """The group sizes worth measuring: the node's, its neighbours, and those about √p and √(p/2), all in equal groups.

    √p is the best size for the torus and √(p/2) for the hierarchy when all links are alike (`cost.py`). Where ranks do
    not divide into equal groups, powers of two and the largest node stand in.
    """
    num_ranks, largest = topology.num_ranks, max(len(node) for node in topology.nodes)
    between = range(2, num_ranks)
    equal = {k for k in between if num_ranks % k == 0 and len({len(g) for g in plan_groups(topology, k)}) == 1}
    powers = set() if equal else {k for k in between if k & (k - 1) == 0}
    candidates = sorted(equal | powers | ({largest} & set(between)))
    chosen = {largest} & set(candidates)
    # Half a rank beside the node's size: its neighbours below and above, itself being taken already.
    for target in (largest - 0.5, largest + 0.5, math.sqrt(num_ranks), math.sqrt(num_ranks / 2)):
        chosen.update([k for k in candidates if k <= target][-1:], [k for k in candidates if k >= target][:1])
    return sorted(chosen)
