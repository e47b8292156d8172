"""A cluster in a TOML file: how many nodes of how many ranks, their links, and what else a planner may want to know.

A run reads where its ranks stand (`topology.py`) and what links carry; the planner reads the same file and the facts
about machines beside it, which a run leaves alone. One grammar, so that either takes the other's file. Torch-free.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from lockstep.comm.topology import GUESSED_INTER, GUESSED_INTRA, Link, Topology
from lockstep.errors import LockstepError
from lockstep.files import read_small

MOST = 100_000  # nodes, or ranks on a node, in a cluster file
MAX_BYTES = 1 << 20  # of a cluster file; what is larger is none
LONGEST_SHOWN = 100  # characters of a value in a sentence
LONGEST_NAME = 40  # characters of a device's name
MAX_RANKS = 1_000_000  # of a whole cluster

Backend = Literal["nccl", "gloo"]
Wiring = Literal["nvlink", "pcie"]
Collective = Literal["ring", "tree", "nvls", "sharp"]


@dataclass(frozen=True)
class Machine:
    """What a planner wants to know beyond links; None where nobody publishes it."""

    device: str = ""  # as device profiles name it
    backend: Backend = "nccl"  # that carries the backend's own all-reduce
    wiring: Wiring = "nvlink"  # inside a node: which of NCCL's latencies hold
    nccl: tuple[Collective, ...] = ("ring", "tree")  # what NCCL may choose from there
    nics_per_node: int = 1  # one flow takes one of them
    nvls: Link | None = None  # sums inside the switch of a node
    cores_per_node: int | None = None
    storage_bytes_per_s: float | None = None  # that a node can read
    dollars_per_device_hour: float | None = None
    watts_per_device: float | None = None  # its share of the whole node
    jitter: float = 0.01  # relative standard deviation of a rank's computing time


@dataclass(frozen=True)
class ClusterFile:
    """A file as read: ranks on each node (one number where the nodes are not counted), links, machine."""

    counts: tuple[int, ...]
    num_nodes: int | None  # None: as many as are asked for
    intra: Link | None
    inter: Link | None
    machine: Machine


def read_cluster(path: str | Path) -> Topology:
    """The topology described by a cluster file.

    A cluster file is TOML. `ranks_per_node` is a number, with `nodes` beside it, or a list with one number per node.
    Ranks are counted node by node. A link that is left out is guessed. What `read_machine` reads may stand there too.

        nodes = 4
        ranks_per_node = 8       # or, for uneven nodes and without `nodes`, [8, 8, 8, 4]

        [intra]                  # each rank's link to the others on its node
        latency_us = 3
        gbit_per_s = 400

        [inter]                  # each node's link to the other nodes, shared by its ranks
        latency_us = 20
        gbit_per_s = 100
    """
    found = read_cluster_file(path)
    if found.num_nodes is None:
        raise LockstepError(
            f"The cluster file {path} lacks nodes; give the number of nodes, or a list as ranks_per_node."
        )
    first, nodes = 0, []
    for count in found.counts:
        nodes.append(tuple(range(first, first + count)))
        first += count
    return Topology(tuple(nodes), found.intra or GUESSED_INTRA, found.inter or GUESSED_INTER)


def read_cluster_file(path: str | Path) -> ClusterFile:
    """Everything that a cluster file says; what is wrong with it is a sentence."""
    where = f"The cluster file {path}"
    return parse_cluster(_load(path), where)


def parse_cluster(raw: Mapping[str, Any], where: str) -> ClusterFile:
    """A cluster from the tables of a file that `where` names in sentences."""
    _check_keys(raw, ("nodes", "ranks_per_node", "intra", "inter", *MACHINE_KEYS), where)
    counts, num_nodes = _counts(raw, where)
    if sum(counts) > MAX_RANKS:
        raise LockstepError(f"{where} describes {sum(counts):,} ranks; give at most {MAX_RANKS:,}.")
    return ClusterFile(
        counts=tuple(counts),
        num_nodes=num_nodes,
        intra=_link(raw, "intra", where) if "intra" in raw else None,
        inter=_link(raw, "inter", where) if "inter" in raw else None,
        machine=read_machine(raw, where),
    )


MACHINE_KEYS = (
    "device",
    "backend",
    "wiring",
    "nccl",
    "nics_per_node",
    "nvls",
    "cores_per_node",
    "storage_gbyte_per_s",
    "dollars_per_device_hour",
    "watts_per_device",
    "jitter",
)


def read_machine(raw: Mapping[str, Any], where: str) -> Machine:
    """The keys of a file that only a planner uses; each may be left out.

    device = "H100"                  # whose profile holds; `lockstep plan clusters` names those of the presets
    backend = "nccl"                 # or "gloo"
    wiring = "nvlink"                # or "pcie": how devices of a node are joined
    nccl = ["ring", "tree", "nvls"]  # what NCCL may choose from; "sharp" where switches add
    nics_per_node = 8                # that share the node's link
    cores_per_node = 112
    storage_gbyte_per_s = 40
    dollars_per_device_hour = 4.9
    watts_per_device = 1275
    jitter = 0.01                    # relative standard deviation of a rank's computing time

    [nvls]                           # sums inside the node's switch
    latency_us = 25
    gbit_per_s = 3800
    """
    nccl = raw.get("nccl", ["ring", "tree"])
    if not isinstance(nccl, list) or not nccl or not all(name in get_args(Collective) for name in nccl):
        raise LockstepError(f"{where} has nccl = {_show(nccl)}; list some of {', '.join(get_args(Collective))}.")
    if "nvls" in nccl and "nvls" not in raw:
        raise LockstepError(f'{where} lists "nvls" but has no table [nvls]; give its latency_us and gbit_per_s.')
    jitter = _fact(raw, "jitter", where)
    if jitter is not None and jitter > 1:
        raise LockstepError(f"{where} has jitter = {jitter:g}; give a share from 0 to 1.")
    storage = _fact(raw, "storage_gbyte_per_s", where, above_zero=True)
    return Machine(
        device=_name(raw, where),
        backend=_word(raw, "backend", get_args(Backend), where),
        wiring=_word(raw, "wiring", get_args(Wiring), where),
        nccl=tuple(nccl),
        nics_per_node=_count(raw, "nics_per_node", where) or 1,
        nvls=_link(raw, "nvls", where) if "nvls" in raw else None,
        cores_per_node=_count(raw, "cores_per_node", where),
        storage_bytes_per_s=None if storage is None else storage * 1e9,
        dollars_per_device_hour=_fact(raw, "dollars_per_device_hour", where),
        watts_per_device=_fact(raw, "watts_per_device", where),
        jitter=0.01 if jitter is None else jitter,
    )


def _name(raw: Mapping[str, Any], where: str) -> str:
    name = raw.get("device", "")
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not name.isprintable() or "[" in name:
        raise LockstepError(f"{where} has device = {_show(name)}; give a device's short name, such as H100.")
    return name


def _word(raw: Mapping[str, Any], key: str, words: tuple[str, ...], where: str) -> Any:
    word = raw.get(key, words[0])
    if word not in words:
        raise LockstepError(f"{where} has {key} = {_show(word)}; give {' or '.join(words)}.")
    return word


def _count(raw: Mapping[str, Any], key: str, where: str) -> int | None:
    count = raw.get(key)
    if count is not None and not _is_count(count):
        raise LockstepError(f"{where} has {key} = {_show(count)}; give a whole number from 1.")
    return count


def _fact(raw: Mapping[str, Any], key: str, where: str, *, above_zero: bool = False) -> float | None:
    if key not in raw:
        return None
    value = _number(raw, key, where)
    if value < 0 or (above_zero and value == 0):
        raise LockstepError(f"{where} has {key} = {value:g}; give {'more than 0' if above_zero else '0 or more'}.")
    return value


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


def _counts(raw: Mapping[str, Any], where: str) -> tuple[list[int], int | None]:
    """Ranks on each node, and how many nodes there are, if that is said."""
    given, num_nodes = raw.get("ranks_per_node"), raw.get("nodes")
    if given is None:
        raise LockstepError(f"{where} lacks ranks_per_node; give a number, or a list with one number per node.")
    if num_nodes is not None and not _is_count(num_nodes):
        raise LockstepError(f"{where} has nodes = {_show(num_nodes)}; give the number of nodes, 1 or more.")
    if _is_count(given):
        return [given] * (num_nodes or 1), num_nodes
    if not (isinstance(given, list) and given and all(_is_count(count) for count in given)):
        raise LockstepError(
            f"{where} has ranks_per_node = {_show(given)}; give a number from 1, or a list of such numbers."
        )
    if num_nodes is not None and num_nodes != len(given):
        raise LockstepError(
            f"{where} has nodes = {num_nodes}, but ranks_per_node lists {len(given)}; correct one or drop nodes."
        )
    return given, len(given)


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
