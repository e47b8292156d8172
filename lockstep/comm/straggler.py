"""Which rank or node holds the others up, and why: input, compute or network. Torch-free and pure.

In synchronous training every rank waits for the slowest, so all step times look alike. What tells them apart is what a
rank did *before* each all-reduce: the time it spent on input and computing until its gradients were ready.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# A rank or link that costs less than this share of a step is noise.
NOTABLE_SHARE = 0.1
# A node's link is slow when it carries less than this share of what the median link carries.
SLOW_LINK = 0.5


class RankTimes(NamedTuple):
    """One rank's seconds per step until its gradients were ready."""

    input_s: float
    compute_s: float


def typical_times(times: Sequence[RankTimes]) -> RankTimes:
    """The median over a run: one hiccup of a busy machine must not make a straggler."""
    return RankTimes(*(statistics.median(values) for values in zip(*times, strict=True)))


class Straggler(NamedTuple):
    """Who, why, what it costs in seconds a step, and the sentence that says so."""

    who: str
    reason: str  # input, compute or network
    cost_s: float
    text: str


def find_straggler(
    times: Sequence[RankTimes],
    step_s: float,
    links: Sequence[float] = (),
    num_bytes: float = 0.0,
    node_of: Sequence[int] = (),
) -> Straggler | None:
    """What holds the others up most, if anything does.

    `links` are bytes per second by node, `num_bytes` what a step sums over the ranks.
    """
    found = [*_find_slow_ranks(times, step_s, node_of), *_find_slow_link(links, num_bytes)]
    return max(found, key=lambda straggler: straggler.cost_s, default=None)


def _find_slow_ranks(times: Sequence[RankTimes], step_s: float, node_of: Sequence[int]) -> list[Straggler]:
    """The rank that waits longest for input and the one that computes longest, where that matters."""
    found = []
    for reason, values in (("input", [t.input_s for t in times]), ("compute", [t.compute_s for t in times])):
        rank = max(range(len(values)), key=values.__getitem__)
        excess = values[rank] - statistics.median(values[:rank] + values[rank + 1 :] or values)
        if excess > NOTABLE_SHARE * step_s:
            where = f" (node {node_of[rank]})" if node_of and max(node_of) > 0 else ""
            text = f"Rank {rank}{where} holds the others up by {excess * 1e3:.0f} ms a step: {reason}."
            found.append(Straggler(f"rank {rank}", reason, excess, text))
    return found


def _find_slow_link(links: Sequence[float], num_bytes: float) -> list[Straggler]:
    """The node with the slowest link, if it is much slower than the others'."""
    if len(links) < 2:
        return []
    node = min(range(len(links)), key=links.__getitem__)
    usual = statistics.median([*links[:node], *links[node + 1 :]])
    if links[node] >= SLOW_LINK * usual:
        return []
    # Every all-reduce sends about the whole message into a node and out of it.
    cost = 2 * num_bytes * (1 / links[node] - 1 / usual)
    text = (
        f"Node {node} holds the others up: network. Its link carries {links[node] / 1e6:,.1f} MB/s, "
        f"the others {usual / 1e6:,.1f} MB/s."
    )
    return [Straggler(f"node {node}", "network", cost, text)]
