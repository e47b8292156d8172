"""A recipe at many sizes of a cluster, and the smallest that is quick enough (after `search.py`). Torch-free."""

from collections.abc import Iterable, Sequence

from lockstep.errors import LockstepError
from lockstep.plan.cluster import Cluster
from lockstep.plan.device import DeviceProfile
from lockstep.plan.prediction import Impossible, Prediction
from lockstep.plan.search import build_case, predict
from lockstep.plan.workload import Workload


def plan_sizes(
    workload: Workload,
    profile: DeviceProfile,
    cluster: Cluster,
    devices: Iterable[int],
    batch_per_device: int = 0,
) -> list[Prediction | Impossible]:
    """Strong scaling at every size, then weak scaling with as many images for each device; a sentence where none is."""
    sizes = list(devices)
    rows: list[Prediction | Impossible] = []
    for scaling, batch in (("strong", 0), ("weak", batch_per_device or choose_weak_batch(workload, profile))):
        for count in sizes:
            try:
                rows.append(predict(build_case(workload, profile, cluster, count, batch)))
            except LockstepError as error:
                rows.append(Impossible("strong" if scaling == "strong" else "weak", count, str(error)))
    return rows


def choose_weak_batch(workload: Workload, profile: DeviceProfile) -> int:
    """The largest power of two that is one pass, lies within the profile and fits the device."""
    most = min(workload.max_batch, max(row.batch for row in profile.batches))
    sizes = [1 << power for power in range(most.bit_length())]
    return max((size for size in sizes if profile.at(size).memory_bytes <= profile.memory_bytes), default=1)


def find_smallest(
    workload: Workload, profile: DeviceProfile, cluster: Cluster, target_s: float
) -> tuple[Prediction | None, Sequence[Prediction]]:
    """The fewest devices that train the recipe in so many seconds, by strong scaling, and all that were looked at."""
    seen: dict[int, Prediction] = {}

    def reaches(count: int) -> bool:
        if count not in seen:
            seen[count] = predict(build_case(workload, profile, cluster, count))
        return seen[count].train_s <= target_s

    per_node = cluster.devices_per_node
    most_nodes = min(workload.global_batch // per_node, cluster.num_nodes or workload.global_batch)
    if most_nodes < 1:
        sizes = [count for count in range(1, per_node + 1) if count <= workload.global_batch]
    else:
        sizes = [*range(1, per_node), *(per_node * nodes for nodes in range(1, most_nodes + 1))]
    # More devices are quicker up to a point: doubled until they reach it, then halved in between.
    low, high = -1, 0  # sizes[low] does not reach it, or there is none
    while not reaches(sizes[high]):
        if high == len(sizes) - 1:
            return None, list(seen.values())
        low, high = high, min(2 * high + 1, len(sizes) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(sizes[middle]) else (middle, high)
    return seen[sizes[high]], list(seen.values())
