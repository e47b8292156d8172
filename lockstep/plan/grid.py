"""A recipe over devices × batch × network: every setting that the sliders of a plan's page can take, simulated.

Nothing between two stops is guessed: what a page shows at any of its settings, `search.py` has predicted there. The
network is the links between nodes, or those inside one where no size needs a second. Torch-free and pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.comm.topology import Link
from lockstep.errors import LockstepError
from lockstep.plan.cluster import MAX_DEVICES, Cluster
from lockstep.plan.device import DeviceProfile
from lockstep.plan.prediction import Prediction
from lockstep.plan.search import build_case, predict
from lockstep.plan.sweep import choose_weak_batch
from lockstep.plan.workload import Workload

MOST_ASKED, MOST_SIZES = 12, 16  # stops of the devices: from those that were asked for, and in all
BEYOND = 4  # times the largest size that was asked for
SHARES = (0.25, 0.5, 1, 2, 4)  # of the recipe's global batch
SMALLER = (8, 4, 2, 1)  # the batch of one device, divided by each
BANDWIDTHS = (0.25, 0.5, 1, 2, 4)  # times the cluster's
LATENCIES = (0.25, 1, 4, 16)


@dataclass(frozen=True)
class Batches:
    """Stops of one slider for the batch: as many samples in all, or for each device."""

    sizes: tuple[int, ...]
    start: int
    # For each number of devices and each of the sizes, where it stands in `Grid.points`; a sentence where it cannot be.
    places: tuple[tuple[int | str, ...], ...]


@dataclass(frozen=True)
class Grid:
    """The stops of each slider, where they begin, and a prediction for every setting."""

    devices: tuple[int, ...]
    bandwidths: tuple[float, ...]  # bytes per second
    latencies: tuple[float, ...]  # seconds
    start_devices: int
    start_bandwidth: int
    start_latency: int
    is_between: bool  # whether the network is the links between nodes
    strong: Batches
    weak: Batches
    # Of each number of devices with a global batch: predictions over bandwidths, and over latencies for each.
    points: tuple[tuple[Prediction, ...], ...]

    @property
    def num_settings(self) -> int:
        return sum(map(len, self.points))


def build_grid(
    workload: Workload, profile: DeviceProfile, cluster: Cluster, asked: Sequence[int], batch_per_device: int = 0
) -> Grid:
    """Every stop of every slider; it begins at the largest size asked for at which the recipe can run."""
    start = _find_start(workload, profile, cluster, asked)
    sizes = sorted({start, *list_sizes(cluster, asked, workload.global_batch)})
    is_between = any(count > cluster.devices_per_node for count in sizes)
    link = cluster.inter if is_between else cluster.intra
    networks = [
        _change_link(cluster, is_between, Link(link.latency_s * slower, link.bytes_per_s * wider))
        for wider in BANDWIDTHS
        for slower in LATENCIES
    ]
    points: dict[tuple[int, int], tuple[Prediction, ...] | str] = {}
    numbers: dict[tuple[int, int], int] = {}

    def place(count: int, global_batch: int) -> int | str:
        key = count, global_batch
        if key not in points:
            points[key] = _predict_all(replace(workload, global_batch=global_batch), profile, networks, count)
            if not isinstance(points[key], str):
                numbers[key] = len(numbers)
        found = points[key]
        return found if isinstance(found, str) else numbers[key]

    totals = _list_shares(workload.global_batch)
    each = batch_per_device or choose_weak_batch(workload, profile)
    shares = sorted({each // part for part in SMALLER if each % part == 0} | {each})
    strong = Batches(
        tuple(totals),
        totals.index(workload.global_batch),
        tuple(tuple(place(count, total) for total in totals) for count in sizes),
    )
    weak = Batches(
        tuple(shares),
        shares.index(each),
        tuple(tuple(place(count, count * share) for share in shares) for count in sizes),
    )
    return Grid(
        devices=tuple(sizes),
        bandwidths=tuple(link.bytes_per_s * wider for wider in BANDWIDTHS),
        latencies=tuple(link.latency_s * slower for slower in LATENCIES),
        start_devices=sizes.index(start),
        start_bandwidth=BANDWIDTHS.index(1),
        start_latency=LATENCIES.index(1),
        is_between=is_between,
        strong=strong,
        weak=weak,
        points=tuple(found for found in points.values() if not isinstance(found, str)),
    )


def _find_start(workload: Workload, profile: DeviceProfile, cluster: Cluster, asked: Sequence[int]) -> int:
    reason = ""
    for count in sorted(asked, reverse=True):
        try:
            build_case(workload, profile, cluster, count)
        except LockstepError as error:
            reason = str(error)
        else:
            return count
    raise LockstepError(reason)


def list_sizes(cluster: Cluster, asked: Iterable[int], global_batch: int) -> list[int]:
    """What was asked for, and nodes that double from one on: up to a few times the largest, if there are as many."""
    sizes = sorted(set(asked))
    last = len(sizes) - 1
    wanted = set(sizes) if last < MOST_ASKED else {sizes[last * at // (MOST_ASKED - 1)] for at in range(MOST_ASKED)}
    limit = min(BEYOND * max(wanted), global_batch, MAX_DEVICES)
    if cluster.num_nodes is not None:
        limit = min(limit, cluster.num_nodes * cluster.devices_per_node)
    size = min(cluster.devices_per_node, min(wanted))
    doubled = []
    while size <= limit:
        doubled.append(size)
        # Below a node devices double as well; the first node is full.
        size = min(2 * size, cluster.devices_per_node) if size < cluster.devices_per_node else 2 * size
    while len(wanted | set(doubled)) > MOST_SIZES:
        doubled = doubled[::2]
    return sorted(wanted | set(doubled))


def _list_shares(global_batch: int) -> list[int]:
    """Parts and multiples of a batch that are whole numbers of samples."""
    return sorted(int(global_batch * share) for share in SHARES if global_batch * share % 1 == 0)


def _change_link(cluster: Cluster, is_between: bool, link: Link) -> Cluster:
    return replace(cluster, inter=link) if is_between else replace(cluster, intra=link)


def _predict_all(
    workload: Workload, profile: DeviceProfile, networks: Sequence[Cluster], count: int
) -> tuple[Prediction, ...] | str:
    """One size and batch over every network; a single node asks for no links between nodes, and is simulated once."""
    try:
        first = build_case(workload, profile, networks[0], count)
        if first.shape.num_nodes == 1 and networks[0].intra == networks[-1].intra:
            return (predict(first),)
        return tuple(predict(build_case(workload, profile, network, count)) for network in networks)
    except LockstepError as error:
        return str(error)
