"""Seconds an all-reduce takes: from the links alone, or from a curve fitted to measurements. Torch-free and pure.

`topology.py` comes before it; the tuner, `fusion.py` and the planner ask it. The formulas are the field's α-β costs:
ring (Patarasuk and Yuan 2009), the hierarchy of Jia et al. 2018, the 2D torus (Mikami et al. 2018), recursive halving
and doubling (Thakur et al. 2005), with the links inside a node and between nodes kept apart.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from lockstep.comm.topology import Topology, plan_groups
from lockstep.errors import LockstepError

GROUPED = ("hierarchical", "torus")
NAMES = ("flat", *GROUPED, "doubling")
LARGE_BYTES = 256 * 2**10  # from here on bandwidth counts, and a fit's error is reported
NOISE = 0.01  # relative; two curves that are both this close to the measurements are equally good

Array = np.ndarray[Any, np.dtype[np.float64]]


class Choice(NamedTuple):
    """An algorithm with its group size; 1 where it has no groups."""

    algorithm: str
    group_size: int = 1

    def __str__(self) -> str:
        return f"{self.algorithm}/{self.group_size}" if self.algorithm in GROUPED else self.algorithm

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """Read back what `str` wrote: "flat", "doubling", "hierarchical/8", "torus/4"."""
        algorithm, slash, size = text.partition("/")
        if algorithm not in NAMES:
            raise LockstepError(f"There is no all-reduce {text!r}; choose one of {', '.join(NAMES)}.")
        if algorithm not in GROUPED:
            if slash:
                raise LockstepError(f"The all-reduce {text!r} has no groups; write {algorithm!r}.")
            return cls(algorithm)
        if not (size.isascii() and size.isdigit() and int(size) >= 1):
            raise LockstepError(f"The all-reduce {text!r} needs a group size of 1 or more; write '{algorithm}/8'.")
        return cls(algorithm, int(size))


class Line(NamedTuple):
    """Seconds as a straight line over the bytes of the whole message."""

    latency_s: float
    seconds_per_byte: float


# What runs at the same time; the phase is over when the slowest is done.
Phase = tuple[Line, ...]
Ranks = tuple[int, ...]


def predict_seconds(choice: Choice, num_bytes: float, topology: Topology) -> float:
    """Seconds one all-reduce of `num_bytes` takes, from the topology's links alone."""
    phases = _plan_phases(choice, topology)
    return sum(max(line.latency_s + line.seconds_per_byte * num_bytes for line in phase) for phase in phases)


@lru_cache(maxsize=256)
def _plan_phases(choice: Choice, topology: Topology) -> tuple[Phase, ...]:
    """The phases of one all-reduce, in order."""
    if choice.algorithm == "flat":
        # Backends number their ring by rank, whatever the nodes.
        return (_ring([tuple(range(topology.num_ranks))], 1, 2, topology),)
    if choice.algorithm == "doubling":
        return _halve_and_double(topology)
    groups = plan_groups(topology, choice.group_size)
    if choice.algorithm == "hierarchical":
        # A ring reduce is a reduce-scatter and a gather to the master, a broadcast a scatter and an all-gather.
        inside = _ring(groups, 1, 2, topology)
        return (inside, _ring([tuple(group[0] for group in groups)], 1, 2, topology), inside)
    if choice.algorithm == "torus":
        return _torus(groups, topology)
    raise LockstepError(f"There is no all-reduce {choice.algorithm!r}; choose one of {', '.join(NAMES)}.")


def _torus(groups: Sequence[Ranks], topology: Topology) -> tuple[Phase, ...]:
    """Reduce-scatter in the group, all-reduce of each piece across groups, all-gather in the group."""
    # As many pieces as the largest group has members; in a smaller one a member owns several.
    width = max(len(group) for group in groups)
    columns = [tuple(group[piece * len(group) // width] for group in groups) for piece in range(width)]
    inside = _ring(groups, 1, 1, topology)
    return (inside, _ring(columns, 1 / width, 2, topology), inside)


def _halve_and_double(topology: Topology) -> tuple[Phase, ...]:
    """Half the message with the neighbour, a quarter with the next but one, …, and the same way back."""
    order = topology.order
    # Ranks beyond a power of two fold into their neighbour first: one whole message there, one back.
    num_extra = len(order) - 2 ** (len(order).bit_length() - 1)
    extra = [(order[2 * i + 1], order[2 * i]) for i in range(num_extra)]
    active = [*order[: 2 * num_extra : 2], *order[2 * num_extra :]]
    phases = [_exchange(extra, 1, topology)]
    distance = 1
    while distance < len(active):
        pairs = [(rank, active[i ^ distance]) for i, rank in enumerate(active)]
        phases.append(_exchange(pairs, 1 / (2 * distance), topology))
        distance *= 2
    return (*phases, *reversed(phases))


def _ring(rings: Sequence[Ranks], share: float, num_passes: int, topology: Topology) -> Phase:
    """Rings at work side by side, each on `share` of the message: a pass is a reduce-scatter or an all-gather."""
    hops = [[(topology.node_of(a), topology.node_of(b)) for a, b in zip(r, r[1:] + r[:1], strict=True)] for r in rings]
    # The nodes each ring leaves, hop by hop; a node's link carries what all rings send over it.
    exits = [[here for here, there in ring if here != there] for ring in hops]
    sent = [num_passes * share * (len(ring) - 1) / len(ring) for ring in rings]
    load: dict[int, float] = defaultdict(float)
    for nodes, amount in zip(exits, sent, strict=True):
        for node in nodes:
            load[node] += amount
    # A rank takes the rings it is in by turns, and the others in them wait for it.
    turns = Counter(rank for ring in rings for rank in ring)
    lines = set()
    for ring, nodes, amount in zip(rings, exits, sent, strict=True):
        # A piece goes round past all members but one; of the crossings between nodes it is spared one.
        num_inter = max(len(nodes) - 1, 0)
        num_intra = len(ring) - 1 - num_inter
        num_turns = max(turns[rank] for rank in ring)
        latency = num_passes * (num_intra * topology.intra.latency_s + num_inter * topology.inter.latency_s)
        inside = num_turns * amount / topology.intra.bytes_per_s if num_intra else 0.0
        across = max((load[node] for node in nodes), default=0.0) / topology.inter.bytes_per_s
        lines.add(Line(num_turns * latency, max(inside, across)))
    return tuple(lines)


def _exchange(pairs: Sequence[tuple[int, int]], share: float, topology: Topology) -> Phase:
    """One step in which the first of each pair sends `share` of the message to the second."""
    hops = [(topology.node_of(source), topology.node_of(target)) for source, target in pairs]
    leaving = Counter(here for here, there in hops if here != there)
    num_inside = sum(here == there for here, there in hops)
    inside = Line(topology.intra.latency_s, share / topology.intra.bytes_per_s) if num_inside else Line(0.0, 0.0)
    if not leaving:
        return (inside,)
    return (inside, Line(topology.inter.latency_s, share * max(leaving.values()) / topology.inter.bytes_per_s))


class Sample(NamedTuple):
    """One measured all-reduce."""

    choice: Choice
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Seconds over bytes as one straight line, or two that meet at the knee: short messages, then long ones."""

    latency_s: float
    seconds_per_byte: float  # of long messages
    knee_bytes: float = 0.0  # 0: one line
    short_seconds_per_byte: float = 0.0  # below the knee
    # |predicted / measured - 1| over the sizes from 256 KiB (or all, if none is), each size by its median.
    median_error: float = 0.0
    max_error: float = 0.0

    def predict(self, num_bytes: float) -> float:
        """Seconds for a message of `num_bytes`; a longer one never takes less."""
        short = min(num_bytes, self.knee_bytes)
        return self.latency_s + self.short_seconds_per_byte * short + self.seconds_per_byte * (num_bytes - short)

    def to_dict(self) -> dict[str, float]:
        """Plain numbers by name, as a TOML table holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Fit":
        """Read back what `to_dict` gave."""
        names = {field.name for field in fields(cls)}
        if wrong := sorted(names.symmetric_difference(table)):
            raise LockstepError(f"A fitted cost lacks or does not know {', '.join(wrong)}; tune again.")
        for name, value in table.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise LockstepError(f"A fitted cost has {name} = {value!r}, which is no number from 0 up; tune again.")
        return cls(**{name: float(value) for name, value in table.items()})


def fit_cost(samples: Sequence[Sample]) -> dict[Choice, Fit]:
    """A curve for each choice that was measured, at two or more sizes; several samples of a size count by their median.

    The squared *relative* error is what is small: 1 KiB and 64 MiB weigh the same although one takes 1000 times longer.
    """
    measured: dict[Choice, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for choice, num_bytes, seconds in samples:
        if not (num_bytes >= 0 and 0 < seconds < math.inf):
            raise LockstepError(f"{choice} was measured as {seconds} s for {num_bytes} bytes; measure again.")
        measured[choice][num_bytes].append(seconds)
    fits = {}
    for choice, by_size in measured.items():
        if len(by_size) < 2:
            raise LockstepError(f"{choice} was measured at one size only; measure two or more to fit its cost.")
        sizes = sorted(by_size)
        fits[choice] = _fit(np.array(sizes, float), np.array([median(by_size[size]) for size in sizes]))
    return fits


def _fit(sizes: Array, seconds: Array) -> Fit:
    """The better of one line and two, by Bayes' information criterion: a knee must earn its two numbers."""

    def error(fit: Fit) -> Array:
        return np.abs(np.array([fit.predict(size) for size in sizes]) / seconds - 1)

    def score(fit: Fit) -> float:
        num_numbers = 4 if fit.knee_bytes else 2
        return float(len(sizes) * np.log(np.mean(error(fit) ** 2) + NOISE**2) + num_numbers * np.log(len(sizes)))

    fits = [_fit_lines(sizes, seconds, 0.0)]
    if len(sizes) >= 5:
        # Two sizes or more on either side of the knee, so that no line hangs on one point: sought all over at first,
        # then more closely around the best place.
        low, high = sizes[1], sizes[-2]
        for _ in range(2):
            knees = np.geomspace(low, high, 34)
            fits += [_fit_lines(sizes, seconds, float(knee)) for knee in knees[:-1]]
            nearest = int(np.argmin([score(fit) for fit in fits[-33:]]))
            low, high = knees[max(nearest - 1, 0)], knees[nearest + 1]
    best = min(fits, key=score)
    which = sizes >= LARGE_BYTES if sizes[-1] >= LARGE_BYTES else sizes >= 0
    return replace(best, median_error=float(np.median(error(best)[which])), max_error=float(np.max(error(best)[which])))


def _fit_lines(sizes: Array, seconds: Array, knee: float) -> Fit:
    """Least squares of the relative error with no negative number: no message costs less than a shorter one."""
    short = np.minimum(sizes, knee)
    columns = np.stack([np.ones_like(sizes), sizes - short, short], axis=1)[:, : 3 if knee else 2] / seconds[:, None]
    scale = np.linalg.norm(columns, axis=0)
    columns = columns / scale
    best, least = np.zeros(len(scale)), math.inf
    # The best non-negative solution is the free one over some of the columns; with three there are seven to try.
    for count in range(len(scale), 0, -1):
        for chosen in map(list, combinations(range(len(scale)), count)):
            part = np.linalg.lstsq(columns[:, chosen], np.ones_like(sizes), rcond=None)[0]
            residual = float(np.sum((columns[:, chosen] @ part - 1) ** 2))
            if (part >= 0).all() and residual < least:
                best, least = np.zeros(len(scale)), residual
                best[chosen] = part
        if least < math.inf and count == len(scale):
            break  # nothing held back: no smaller set can be better
    latency, long, *rest = (best / scale).tolist()
    return Fit(latency, long, knee, *rest)
