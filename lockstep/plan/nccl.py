"""What NCCL would choose, and how long it takes: its tuner's latencies and bandwidths, the quickest pair. Torch-free.

NCCL weighs every algorithm with every protocol as latency + bytes / bandwidth and takes the least (its tuning.cc). The
constants below are its own, in microseconds. Left out: the correction for trees of middling size, by which NCCL lowers
a tree's bandwidth to as little as 0.4 between 64 KB and 2 MB. Bandwidths are the cluster's, as its file has them. Its
latency between nodes counts where it goes beyond the longest hop of NCCL's tables: the rest is added to each hop, as
NCCL adds what a network reports of itself.
"""

from typing import NamedTuple

from lockstep.plan.cluster import Shape

PROTOCOLS = ("LL", "LL128", "Simple")
BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
NVLINK_US = {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)}
PCIE_US = {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)}
NETWORK_US = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)}
# Shares of the bandwidth that Simple has: LL sends a flag with every 4 bytes, LL128 one with every 120.
RING_SHARES = (0.5, 0.92, 1.0)
TREE_SHARES = (0.92 / 3.8, 0.92 * 0.92, 0.92)
RING_LL_ACROSS_US = 1.0  # a hop inside a node, where the ring leaves it
SHARP_NETWORK_US, SHARP_INSIDE_US, SHARP_PEER_US = 31.0, 3.7, 0.4
NVLS_NETWORK_US, NVLS_TREE_NETWORK_US = 18.0, 14.0
SHARP_SHARE = 0.9
# From this size on, for each 16 ranks, a ring between nodes has more in flight than the network likes.
PLATEAU_BYTES = 65536
PLATEAU = {"nvlink": 1.4, "pcie": 1.9}  # factors on its latency, of newer and of older GPUs


class NcclTime(NamedTuple):
    """One way for NCCL to sum a message."""

    seconds: float
    name: str


def predict_nccl(num_bytes: float, shape: Shape) -> NcclTime:
    """The way NCCL chooses for an all-reduce, and its seconds."""
    return min(list_nccl(num_bytes, shape))


def list_nccl(num_bytes: float, shape: Shape) -> list[NcclTime]:
    """Every way that NCCL weighs for an all-reduce."""
    if shape.num_devices == 1:
        return [NcclTime(0.0, "nothing to send")]
    allowed, wiring = shape.machine.nccl, shape.machine.wiring
    # LL128 needs stores of 128 bytes that stay whole, which NVLink has.
    protocols = [p for p, name in enumerate(PROTOCOLS) if name != "LL128" or wiring == "nvlink"]
    found = []
    for algorithm, predict in (("ring", _ring), ("tree", _tree)):
        if algorithm in allowed:
            found += [NcclTime(predict(p, num_bytes, shape), f"{algorithm} {PROTOCOLS[p]}") for p in protocols]
    if "nvls" in allowed and shape.per_node > 1 and shape.machine.nvls:
        found += _nvls(num_bytes, shape)
    if "sharp" in allowed and shape.num_nodes > 1:
        inside = 2 * (SHARP_INSIDE_US + SHARP_PEER_US * (shape.per_node - 1)) if shape.per_node > 1 else 0.0
        bandwidth = SHARP_SHARE * min(shape.intra.bytes_per_s, shape.inter.bytes_per_s)
        latency = inside + SHARP_NETWORK_US + 2 * _beyond(shape)
        found.append(NcclTime(latency * 1e-6 + num_bytes / bandwidth, "SHARP"))
    return found or [NcclTime(_ring(2, num_bytes, shape), "ring Simple")]


def _hops(shape: Shape) -> dict[str, tuple[float, float, float]]:
    return NVLINK_US if shape.machine.wiring == "nvlink" else PCIE_US


def _beyond(shape: Shape) -> float:
    """Microseconds by which a hop between nodes takes longer than any in NCCL's tables."""
    return max(0.0, shape.inter.latency_s * 1e6 - max(NETWORK_US["ring"]))


def _bus(shape: Shape) -> float:
    """Bytes per second of a ring through all ranks: a node's NICs together, or the links inside it."""
    inside, across = shape.intra.bytes_per_s, shape.inter.bytes_per_s
    if shape.num_nodes == 1:
        return inside
    return across if shape.per_node == 1 else min(inside, across)


def _ring(protocol: int, num_bytes: float, shape: Shape) -> float:
    steps, across = 2 * (shape.num_devices - 1), 2 * (shape.num_nodes - 1)
    hop = _hops(shape)["ring"][protocol]
    if shape.num_nodes > 1 and PROTOCOLS[protocol] == "LL":
        hop = max(hop, RING_LL_ACROSS_US)
    latency = BASE_US["ring"][protocol] + (steps - across) * hop
    latency += across * (NETWORK_US["ring"][protocol] + _beyond(shape))
    if across and PROTOCOLS[protocol] == "Simple" and num_bytes >= shape.num_devices / 16 * PLATEAU_BYTES:
        latency *= PLATEAU[shape.machine.wiring]
    bandwidth = _bus(shape) * RING_SHARES[protocol] * shape.num_devices / steps
    return latency * 1e-6 + num_bytes / bandwidth


def _tree(protocol: int, num_bytes: float, shape: Shape) -> float:
    inside = (shape.per_node - 1) * _hops(shape)["tree"][protocol]
    across = _log2(shape.num_nodes) * (NETWORK_US["tree"][protocol] + _beyond(shape))
    bandwidth = _bus(shape) * TREE_SHARES[protocol] / 2
    return (BASE_US["tree"][protocol] + 2 * (inside + across)) * 1e-6 + num_bytes / bandwidth


def _nvls(num_bytes: float, shape: Shape) -> list[NcclTime]:
    """Sums inside the switch; between nodes by a tree, or by switches that add."""
    link = shape.machine.nvls
    assert link is not None
    inside = link.bytes_per_s * shape.per_node / (2 * (shape.per_node - 1))  # of the message, not of the bus
    if shape.num_nodes == 1:
        return [NcclTime(link.latency_s + num_bytes / inside, "NVLS")]
    across = _log2(shape.num_nodes) * 2 * (NVLS_TREE_NETWORK_US + _beyond(shape)) * 1e-6
    bandwidth = min(inside, shape.inter.bytes_per_s * TREE_SHARES[2] / 2)
    found = [NcclTime(link.latency_s + across + num_bytes / bandwidth, "NVLSTree")]
    if "sharp" in shape.machine.nccl:
        bandwidth = min(inside, SHARP_SHARE * shape.inter.bytes_per_s)
        latency_s = link.latency_s + (NVLS_NETWORK_US + 2 * _beyond(shape)) * 1e-6
        found.append(NcclTime(latency_s + num_bytes / bandwidth, "NVLS and SHARP"))
    return found


def predict_nccl_scatter(num_bytes: float, shape: Shape) -> float:
    """Seconds of a reduce-scatter, or of an all-gather, among the devices of a node: a ring, half an all-reduce."""
    if shape.per_node == 1:
        return 0.0
    steps, hops, bus = shape.per_node - 1, _hops(shape)["ring"], shape.intra.bytes_per_s
    return min(
        (BASE_US["ring"][p] + steps * hops[p]) * 1e-6 + num_bytes * steps / shape.per_node / (bus * RING_SHARES[p])
        for p, name in enumerate(PROTOCOLS)
        if name != "LL128" or shape.machine.wiring == "nvlink"
    )


def _log2(count: int) -> int:
    """Rounded down, as NCCL does."""
    return count.bit_length() - 1
