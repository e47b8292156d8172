"""Where the ranks stand: nodes, ranks per node, and the links inside a node and between nodes. Torch-free.

Found from one host name per rank, or read from a cluster file; `cost.py` turns it into seconds, and `plan_groups` into
the groups that the hierarchical and torus all-reduce work with.
"""

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

from lockstep.errors import LockstepError
from lockstep.files import read_small


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

MOST = 100_000  # nodes, or ranks on a node, in a cluster file
MAX_BYTES = 1 << 20  # of a cluster file; what is larger is none
LONGEST_SHOWN = 100  # characters of a value in a sentence


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


def read_cluster(path: str | Path) -> Topology:
    """The topology described by a cluster file.

    A cluster file is TOML. `ranks_per_node` is a number, with `nodes` beside it, or a list with one number per node.
    Ranks are counted node by node. A link that is left out is guessed.

        nodes = 4
        ranks_per_node = 8       # or, for uneven nodes and without `nodes`, [8, 8, 8, 4]

        [intra]                  # each rank's link to the others on its node
        latency_us = 3
        gbit_per_s = 400

        [inter]                  # each node's link to the other nodes, shared by its ranks
        latency_us = 20
        gbit_per_s = 100
    """
    where = f"The cluster file {path}"
    raw = _load(path)
    _check_keys(raw, ("nodes", "ranks_per_node", "intra", "inter"), where)
    first, nodes = 0, []
    for count in _counts(raw, where):
        nodes.append(tuple(range(first, first + count)))
        first += count
    intra = _link(raw, "intra", where) if "intra" in raw else GUESSED_INTRA
    inter = _link(raw, "inter", where) if "inter" in raw else GUESSED_INTER
    return Topology(tuple(nodes), intra, inter)


def _load(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(Path(path), MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise LockstepError(f"There is no cluster file {path}; give the path of a TOML file.") from None
    except OSError as error:
        raise LockstepError(f"Cannot read the cluster file {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise LockstepError(f"The cluster file {path} is not text in UTF-8; give a TOML file.") from None
    except RecursionError:
        raise LockstepError(f"The cluster file {path} is nested too deeply; give plain tables.") from None
    except ValueError as error:  # no TOML, or an integer of thousands of digits
        raise LockstepError(f"The cluster file {path} is not valid TOML: {str(error).rstrip('.')}.") from None


def _check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(known)}."
            raise LockstepError(f"{where} has an unknown key {repr(key[:LONGEST_SHOWN])[1:-1]}; {hint}")


def _counts(raw: Mapping[str, Any], where: str) -> list[int]:
    """Ranks on each node."""
    given, num_nodes = raw.get("ranks_per_node"), raw.get("nodes")
    if given is None:
        raise LockstepError(f"{where} lacks ranks_per_node; give a number, or a list with one number per node.")
    if num_nodes is not None and not _is_count(num_nodes):
        raise LockstepError(f"{where} has nodes = {_show(num_nodes)}; give the number of nodes, 1 or more.")
    if _is_count(given):
        if num_nodes is None:
            raise LockstepError(f"{where} lacks nodes; give the number of nodes, or a list as ranks_per_node.")
        return [given] * num_nodes
    if not (isinstance(given, list) and given and all(_is_count(count) for count in given)):
        raise LockstepError(
            f"{where} has ranks_per_node = {_show(given)}; give a number from 1, or a list of such numbers."
        )
    if num_nodes is not None and num_nodes != len(given):
        raise LockstepError(
            f"{where} has nodes = {num_nodes}, but ranks_per_node lists {len(given)}; correct one or drop nodes."
        )
    return given


def _is_count(value: object) -> TypeGuard[int]:
    # Beyond any cluster a slip of the keyboard would otherwise fill the memory.
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _link(raw: Mapping[str, Any], level: str, where: str) -> Link:
    table = raw[level]
    if not isinstance(table, dict):
        raise LockstepError(
            f"{where} has {level} = {_show(table)}; make it a table [{level}] with latency_us and gbit_per_s."
        )
    _check_keys(table, ("latency_us", "gbit_per_s"), f"{where}, in [{level}],")
    latency_us = _number(table, "latency_us", f"{where}, in [{level}],")
    gbit_per_s = _number(table, "gbit_per_s", f"{where}, in [{level}],")
    if latency_us < 0:
        raise LockstepError(f"{where}, in [{level}], has latency_us = {latency_us:g}; give 0 or more microseconds.")
    if gbit_per_s <= 0:
        raise LockstepError(f"{where}, in [{level}], has gbit_per_s = {gbit_per_s:g}; give more than 0.")
    return Link(latency_us * 1e-6, gbit_per_s * 1e9 / 8)


def _number(table: Mapping[str, Any], key: str, where: str) -> float:
    if key not in table:
        raise LockstepError(f"{where} lacks {key}; a link needs latency_us and gbit_per_s.")
    value = table[key]
    # Compared, not converted: TOML has infinity, not-a-number and integers too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST * 1e3 <= value <= MOST * 1e3:
        raise LockstepError(f"{where} has {key} = {_show(value)}; give a number.")
    return float(value)


def _show(value: object) -> str:
    """A value in a sentence; of one without end, its beginning."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, lists without end
        return "what was given"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
