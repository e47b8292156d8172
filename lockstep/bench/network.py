"""The virtual cluster, shown and proved: latency and bandwidth of every node's link, measured by sending over it."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.bench.virtual import VirtualCluster, fork_ranks
from lockstep.comm.links import Transfer, measure_transfer
from lockstep.comm.world import World, join_world, read_membership
from lockstep.errors import LockstepError

SECONDS = 0.2  # that one transfer takes at the limit
UNLIMITED_BYTES = 64 << 20
NUM_PINGS = 30
GBIT = 8e-9  # of a byte


@dataclass(frozen=True)
class NodeLink:
    """A node's link as measured: its best to any other node, so that a slow node does not speak for its peers."""

    node: int
    limit_gbit_per_s: float | None
    sent_gbit_per_s: float
    received_gbit_per_s: float
    latency_s: float


def measure_network(world: World, masters: Sequence[int], limits: Sequence[float | None]) -> list[NodeLink]:
    """Send between the first ranks of all nodes, one pair at a time; every rank calls it and gets the same list."""
    mine: dict[tuple[int, int], Transfer] = {}
    for source, target in permutations(range(len(masters)), 2):
        pair_limits = [limit for limit in (limits[source], limits[target]) if limit is not None]
        num_bytes = int(min(pair_limits) * 1e9 / 8 * SECONDS) if pair_limits else UNLIMITED_BYTES
        world.barrier()  # one pair at a time has the network
        if found := measure_transfer(world, masters[source], masters[target], num_bytes, NUM_PINGS):
            mine[source, target] = found
    rows = [row for part in world.gather_values([(*pair, *way) for pair, way in mine.items()]) for row in part]
    measured = {(source, target): Transfer(*way) for source, target, *way in rows}
    return [
        NodeLink(
            node=node,
            limit_gbit_per_s=limits[node],
            sent_gbit_per_s=max(way.bytes_per_s for (source, _), way in measured.items() if source == node) * GBIT,
            received_gbit_per_s=max(way.bytes_per_s for (_, target), way in measured.items() if target == node) * GBIT,
            latency_s=min(way.latency_s for pair, way in measured.items() if node in pair),
        )
        for node in range(len(masters))
    ]


def run_parent(
    *,
    nodes: int,
    ranks_per_node: int = 1,
    gbit_per_s: float | None = None,
    delay_ms: float | None = None,
    slow: Mapping[int, float] | None = None,
) -> None:
    """Lay out a cluster, measure its links and print them."""
    if nodes < 2:
        raise LockstepError("A network needs at least 2 nodes; ask for more --nodes.")
    with VirtualCluster.open(nodes, ranks_per_node, gbit_per_s, delay_ms, slow) as cluster:
        print(cluster.describe(), flush=True)
        limits = [None if cluster.is_pretended else cluster.limits[node] for node in range(nodes)]
        argv = [sys.executable, "-m", "lockstep.bench.network", json.dumps(limits)]
        cluster.wait(cluster.start(argv, one_per_node=True))


def parse_slow(settings: Sequence[str]) -> dict[int, float]:
    """`2=0.1` -> node 2 has 0.1 Gbit/s."""
    slow = {}
    for setting in settings:
        node, _, rate = setting.partition("=")
        try:
            slow[int(node)] = float(rate)
        except ValueError:
            raise LockstepError(f"--slow {setting} is not NODE=GBIT_PER_S; write for example --slow 2=0.1.") from None
    return slow


def build_table(links: Sequence[NodeLink]) -> Table:
    """A line for each node."""
    table = Table(title="Links between nodes", title_style="bold")
    for name in ("node", "limit, Gbit/s", "sent, Gbit/s", "received, Gbit/s", "latency, µs"):
        table.add_column(name, justify="right")
    for link in links:
        table.add_row(
            str(link.node),
            "none" if link.limit_gbit_per_s is None else f"{link.limit_gbit_per_s:g}",
            f"{link.sent_gbit_per_s:.3f}",
            f"{link.received_gbit_per_s:.3f}",
            f"{link.latency_s * 1e6:.0f}",
        )
    return table


def _main(limits: list[float | None]) -> None:
    membership: Any = read_membership(os.environ)
    with join_world(membership, backend="gloo") as world:
        masters = range(0, world.size, world.local_size)
        links = measure_network(world, masters, limits)
    if world.is_first:
        Console().print(build_table(links))


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(_main, json.loads(sys.argv[1]))))
