"""Seconds an all-reduce takes: from the links alone, or from a curve fitted to measurements. Torch-free and pure.

`topology.py` comes before it; the tuner, `fusion.py` and the planner ask it. From the links: the α-β cost of the very
messages `allreduce.py` sends, in its order, with the links inside a node and between nodes kept apart; the backend's
own is taken for a ring (Patarasuk and Yuan 2009).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from lockstep.comm.topology import Topology, plan_groups
from lockstep.errors import LockstepError

GROUPED = ("hierarchical", "torus")
NAMES = ("flat", *GROUPED, "doubling")
# Chosen by measurement of 32 ranks on 2 cores over Gloo; a real network may want others.
SHORT_BYTES = 256 * 2**10  # up to here doubling whole pieces beats halving them first: half the rounds
TWO_MASTERS_BYTES = 2 * 2**20  # from here on a group's work is worth dividing between two masters
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


FLAT = Choice("flat")  # the backend's own


class Line(NamedTuple):
    """Seconds as a straight line over the bytes of the whole message."""

    latency_s: float
    seconds_per_byte: float


# What runs at the same time; the phase is over when the slowest is done.
Phase = tuple[Line, ...]
Ranks = tuple[int, ...]
# Sender, receiver, share of the whole message.
Transfer = tuple[int, int, float]


def count_pieces(algorithm: str, num_bytes: float, largest_group: int) -> int:
    """Into how many pieces with an owner each a grouped all-reduce cuts a message."""
    if algorithm == "torus":
        return largest_group
    return 2 if num_bytes >= TWO_MASTERS_BYTES and largest_group > 1 else 1


def predict_seconds(choice: Choice, num_bytes: float, topology: Topology) -> float:
    """Seconds one all-reduce of `num_bytes` takes, from the topology's links alone."""
    num_pieces = 1
    groups: tuple[Ranks, ...] = (topology.order,)
    if choice.algorithm in GROUPED:
        groups = tuple(map(tuple, plan_groups(topology, choice.group_size)))
        num_pieces = count_pieces(choice.algorithm, num_bytes, max(map(len, groups)))
    phases = _plan_phases(choice.algorithm, groups, num_pieces, num_bytes <= SHORT_BYTES * num_pieces, topology)
    return sum(max(line.latency_s + line.seconds_per_byte * num_bytes for line in phase) for phase in phases)


@lru_cache(maxsize=256)
def _plan_phases(
    algorithm: str, groups: tuple[Ranks, ...], num_pieces: int, is_short: bool, topology: Topology
) -> tuple[Phase, ...]:
    """The phases of one all-reduce, in order, as `allreduce.py` sends them."""
    if algorithm == "flat":
        # Backends number their ring by rank, whatever the nodes.
        return (_ring(tuple(range(topology.num_ranks)), topology),)
    if algorithm == "doubling":
        rounds = _sum_among(groups[0], 1.0, is_short)
    elif algorithm in GROUPED:
        rounds = _sum_by_pieces(groups, num_pieces, is_short)
    else:
        raise LockstepError(f"There is no all-reduce {algorithm!r}; choose one of {', '.join(NAMES)}.")
    return tuple(_exchange(transfers, topology) for transfers in rounds if transfers)


def _sum_by_pieces(groups: Sequence[Ranks], num_pieces: int, is_short: bool) -> list[list[Transfer]]:
    """Each piece to its owner in the group, summed among the owners in all groups, and back."""
    owners = [[group[piece * len(group) // num_pieces] for piece in range(num_pieces)] for group in groups]
    to_owners = [
        (member, owner, 1 / num_pieces)
        for group, owned in zip(groups, owners, strict=True)
        for owner in owned
        for member in group
        if member != owner
    ]
    # A rank that owns several pieces takes them by turns, and the others wait for it.
    turns: Counter[int] = Counter()
    rounds: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for column in zip(*owners, strict=True):
        turn = max(turns[rank] for rank in column)
        turns.update({rank: turn + 1 - turns[rank] for rank in column})
        for number, transfers in enumerate(_sum_among(column, 1 / num_pieces, is_short)):
            rounds[turn, number] += transfers
    back = [(owner, member, share) for member, owner, share in to_owners]
    return [to_owners, *(rounds[key] for key in sorted(rounds)), back]


def _sum_among(ranks: Ranks, share: float, is_short: bool) -> list[list[Transfer]]:
    """Recursive doubling of a short message, halving and doubling of a long one, with the nearest partner first."""
    # Ranks beyond a power of two fold into their neighbour first: one whole message there, one back.
    num_extra = len(ranks) - 2 ** (len(ranks).bit_length() - 1)
    fold = [(ranks[2 * i + 1], ranks[2 * i], share) for i in range(num_extra)]
    active = [*ranks[: 2 * num_extra : 2], *ranks[2 * num_extra :]]
    rounds: list[list[Transfer]] = []
    distance = 1
    while distance < len(active):
        part = share if is_short else share / (2 * distance)
        rounds.append([(rank, active[i ^ distance], part) for i, rank in enumerate(active)])
        distance *= 2
    unfold = [(target, source, part) for source, target, part in fold]
    return [fold, *rounds, *([] if is_short else reversed(rounds)), unfold]


def _ring(ring: Ranks, topology: Topology) -> Phase:
    """A reduce-scatter and an all-gather round one ring of all ranks."""
    hops = [(topology.node_of(a), topology.node_of(b)) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
    exits = Counter(here for here, there in hops if here != there)
    # A piece goes round past all members but one; of the crossings between nodes it is spared one.
    num_inter = max(exits.total() - 1, 0)
    num_intra = len(ring) - 1 - num_inter
    sent = 2 * (len(ring) - 1) / len(ring)
    inside = sent / topology.intra.bytes_per_s if num_intra else 0.0
    across = max(exits.values(), default=0) * sent / topology.inter.bytes_per_s
    latency = 2 * (num_intra * topology.intra.latency_s + num_inter * topology.inter.latency_s)
    return (Line(latency, max(inside, across)),)


def _exchange(transfers: Sequence[Transfer], topology: Topology) -> Phase:
    """Messages that travel at the same time: a rank's share the links inside its node, a node's its link to others."""
    loads: dict[tuple[str, str, int], float] = defaultdict(float)
    for source, target, share in transfers:
        here, there = topology.node_of(source), topology.node_of(target)
        level, ends = ("intra", (source, target)) if here == there else ("inter", (here, there))
        for way, end in zip(("out", "in"), ends, strict=True):
            loads[level, way, end] += share
    lines = []
    for level, link in (("intra", topology.intra), ("inter", topology.inter)):
        if busiest := max((load for (at, _, _), load in loads.items() if at == level), default=0.0):
            lines.append(Line(link.latency_s, busiest / link.bytes_per_s))
    return tuple(lines)


class Timing(NamedTuple):
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


def fit_cost(timings: Sequence[Timing]) -> dict[Choice, Fit]:
    """A curve for each choice that was measured, at two or more sizes; several timings of a size count by their median.

    The squared *relative* error is what is small: 1 KiB and 64 MiB weigh the same although one takes 1000 times longer.
    """
    measured: dict[Choice, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for choice, num_bytes, seconds in timings:
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
