"""A cluster to plan for: a preset's name or a file of the same grammar as a run's cluster file. Torch-free.

`comm/cluster_file.py` reads it; `collectives.py` turns its links into seconds and `search.py` asks for so many devices.
"""

import difflib
import tomllib
from dataclasses import dataclass, field
from importlib import resources

from lockstep.comm.cluster_file import ClusterFile, Machine, parse_cluster, read_cluster_file
from lockstep.comm.topology import Link
from lockstep.errors import LockstepError

MAX_DEVICES = 1_000_000
SLOWEST, LONGEST_S = 1e3, 10.0  # bytes per second and latency of a link: what is worse is a slip of the keyboard


@dataclass(frozen=True)
class Cluster:
    """Nodes that are all alike."""

    name: str
    summary: str
    devices_per_node: int
    num_nodes: int | None  # None: as many as are asked for
    intra: Link
    inter: Link
    machine: Machine


@dataclass(frozen=True)
class Shape:
    """So many devices of a cluster: the same number on every node."""

    num_nodes: int
    per_node: int
    intra: Link
    inter: Link
    machine: Machine = field(default_factory=Machine)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.per_node


def place_devices(cluster: Cluster, num_devices: int) -> Shape:
    """The fewest nodes that hold so many devices, each as many; what cannot be so is a sentence."""
    if not 1 <= num_devices <= MAX_DEVICES:
        raise LockstepError(f"{num_devices} devices cannot be planned for; give 1 to {MAX_DEVICES:,}.")
    num_nodes = -(-num_devices // cluster.devices_per_node)
    if cluster.num_nodes is not None and num_nodes > cluster.num_nodes:
        most = cluster.num_nodes * cluster.devices_per_node
        raise LockstepError(
            f"The cluster {cluster.name} has {most:,} devices, not {num_devices:,}; ask for fewer, or give a file with "
            "more nodes."
        )
    if num_devices % num_nodes:
        below = num_devices // cluster.devices_per_node * cluster.devices_per_node
        raise LockstepError(
            f"{num_devices:,} devices do not fill nodes of {cluster.devices_per_node} evenly; ask for {below:,} or "
            f"{below + cluster.devices_per_node:,}."
        )
    return Shape(num_nodes, num_devices // num_nodes, cluster.intra, cluster.inter, cluster.machine)


def list_clusters() -> list[Cluster]:
    """The presets, by name."""
    return [read_planned(name) for name in _preset_names()]


def read_planned(name_or_path: str) -> Cluster:
    """A preset, or a cluster file with both links and one number as `ranks_per_node`."""
    if name_or_path in _preset_names():
        text = (resources.files("lockstep.plan") / "clusters" / f"{name_or_path}.toml").read_text(encoding="utf-8")
        summary = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        where = f"The cluster {name_or_path}"
        return _build(name_or_path, summary, parse_cluster(tomllib.loads(text), where), where)
    if "/" not in name_or_path and "." not in name_or_path:
        near = difflib.get_close_matches(name_or_path, _preset_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_preset_names())}, or give a TOML file."
        raise LockstepError(f"There is no cluster {name_or_path[:100]}; {hint}")
    return _build(name_or_path, "", read_cluster_file(name_or_path), f"The cluster file {name_or_path}")


def _build(name: str, summary: str, found: ClusterFile, where: str) -> Cluster:
    if len(set(found.counts)) > 1:
        raise LockstepError(f"{where} has nodes of several sizes; a plan needs one number as ranks_per_node.")
    for level, link in (("intra", found.intra), ("inter", found.inter)):
        if link is None:
            raise LockstepError(f"{where} lacks [{level}]; a plan needs its latency_us and gbit_per_s.")
        if link.bytes_per_s < SLOWEST or link.latency_s > LONGEST_S:
            raise LockstepError(f"{where} has a link in [{level}] that is slower than any; check its units.")
    assert found.intra is not None
    assert found.inter is not None
    return Cluster(name, summary, found.counts[0], found.num_nodes, found.intra, found.inter, found.machine)


def _preset_names() -> list[str]:
    files = resources.files("lockstep.plan").joinpath("clusters").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))
