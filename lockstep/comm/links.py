"""What links carry, measured by sending over them: slow nodes are named with it, virtual clusters proved."""

import time
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.topology import Topology
from lockstep.comm.world import World


class Transfer(NamedTuple):
    """One way from a rank to another."""

    latency_s: float
    bytes_per_s: float


def measure_links(world: World, topology: Topology, num_bytes: int = 1 << 20, repeats: int = 3) -> list[float]:
    """Bytes per second of each node's link, on every rank.

    Neighbouring nodes send a message there and back, one pair at a time. A pair is as slow as the slower of its two
    links, so a node's link is at least as fast as the best of its pairs; with two nodes the two cannot be told apart.
    """
    num_nodes = topology.num_nodes
    if num_nodes < 2:
        return []
    speeds = torch.zeros(2, num_nodes, dtype=torch.float64)  # there and back
    for node in range(num_nodes if num_nodes > 2 else 1):
        pair = topology.nodes[node][0], topology.nodes[(node + 1) % num_nodes][0]
        for _ in range(repeats):
            for way, (source, target) in enumerate((pair, pair[::-1])):
                found = measure_transfer(world, source, target, num_bytes)
                speeds[way, node] = max(float(speeds[way, node]), found.bytes_per_s if found else 0.0)
    pairs = world.maximum(speeds).amin(dim=0).tolist()
    if num_nodes == 2:
        return [pairs[0], pairs[0]]
    return [max(pairs[node], pairs[node - 1]) for node in range(num_nodes)]


def measure_transfer(world: World, source: int, target: int, num_bytes: int, num_pings: int = 0) -> Transfer | None:
    """Send `num_bytes` from one rank to another, which gets the answer by its own clock alone; None on all others.

    With pings the latency is known and left out of the rest. It is the shortest that counts there: behind a long
    message on a limited link a ping may wait as long as the message took.
    """
    if world.rank not in (source, target):
        return None
    token = torch.zeros(1, dtype=torch.uint8, device=world.device)
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    if world.rank == source:
        for message in (*[token] * num_pings, payload):
            dist.recv(token, target)
            dist.send(message, target)
        return None
    round_trips = [_ask(source, token, token) for _ in range(num_pings)]
    seconds = _ask(source, token, payload) - min(round_trips, default=0.0)
    return Transfer(median(round_trips) / 2 if round_trips else 0.0, num_bytes / max(seconds, 1e-9))


def _ask(source: int, token: torch.Tensor, answer: torch.Tensor) -> float:
    """Seconds from a request to its answer."""
    start = time.perf_counter()
    dist.send(token, source)
    dist.recv(answer, source)
    if answer.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
