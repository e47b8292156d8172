"""What each node's link carries, measured between one rank of each node; slow links are named with it."""

import time

import torch
import torch.distributed as dist

from lockstep.comm.topology import Topology
from lockstep.comm.world import World


def measure_links(world: World, topology: Topology, num_bytes: int = 1 << 20, repeats: int = 3) -> list[float]:
    """Bytes per second of each node's link, on every rank.

    Neighbouring nodes send a message there and back, one pair at a time. A pair is as slow as the slower of its two
    links, so a node's link is at least as fast as the best of its pairs; with two nodes the two cannot be told apart.
    """
    num_nodes = topology.num_nodes
    if num_nodes < 2:
        return []
    speeds = torch.zeros(num_nodes, dtype=torch.float64)
    message = torch.zeros(num_bytes // 4, device=world.device)
    for node in range(num_nodes if num_nodes > 2 else 1):
        first, second = topology.nodes[node][0], topology.nodes[(node + 1) % num_nodes][0]
        if world.rank not in (first, second):
            continue
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            if world.rank == first:
                dist.send(message, second)
                dist.recv(message, second)
            else:
                dist.recv(message, first)
                dist.send(message, first)
            if message.is_cuda:
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / 2)
        speeds[node] = num_bytes / best
    pairs = world.maximum(speeds).tolist()
    if num_nodes == 2:
        return [pairs[0], pairs[0]]
    return [max(pairs[node], pairs[node - 1]) for node in range(num_nodes)]
