"""Candidates and the pick: which ways to execute the step, which all-reduces, which cuts; pure functions, torch-free.

`engine/measure.py` asks here what is worth measuring, measures it, and asks again what to take. The planner asks the
same functions about clusters that nobody has.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lockstep.comm.cost import FLAT, Choice, Timing, predict_seconds
from lockstep.comm.fusion import Buffer, ReductionPlan, add_tail, plan_buffers, plan_merged, plan_two_segments
from lockstep.comm.topology import GUESSED_INTER, GUESSED_INTRA, Topology, group_sizes, plan_groups
from lockstep.config import CommConfig, TrainConfig
from lockstep.errors import LockstepError
from lockstep.layout import Layout
from lockstep.plan.cluster import Shape
from lockstep.plan.collectives import is_regular, predict_all_reduce
from lockstep.plan.plan import Compile, Execution
from lockstep.plan.profile import Trial

MIN_BYTES = 1024
# What is not PyTorch's own must beat it by this much: less is noise, and noise is no reason.
MARGIN = 0.05
# A rank opens a connection to each of its peers on first use, and keeps it.
MAX_PEERS = 64
# Times the best, by the links of a cluster file: a choice that is slower than that at every size is not measured.
WORTH_MEASURING = 4.0
# Compiling takes a minute or so for each way; it is tried unasked only in runs that have the time to earn it back.
WORTH_COMPILING_S = 1800.0
PLAIN = "PyTorch's own"  # all-reduce for buffers cut by the threshold rule


Array = np.ndarray[Any, np.dtype[np.float64]]


class Curve(NamedTuple):
    """Measured sizes of one choice, rising, and the seconds of each."""

    sizes: list[int]
    seconds: list[float]


def list_executions(train: TrainConfig, *, on_gpu: bool, has_own_kernels: bool) -> list[Execution]:
    """What to try first: launched and recorded, by own kernels where there are any; pins leave fewer."""
    recordings = {"auto": [False, True], "on": [True], "off": [False]}[train.cuda_graph] if on_gpu else [False]
    if train.compile in ("whole", "stage", "block"):
        return [Execution("torch", recorded, train.compile) for recorded in recordings]
    own = on_gpu and (has_own_kernels if train.own_kernels == "auto" else train.own_kernels == "on")
    return [Execution("own" if own else "torch", recorded) for recorded in recordings]


def list_compiled(train: TrainConfig) -> list[Execution]:
    """Ways to compile, each recorded unless that is ruled out; by block first, which leaves most to overlap."""
    ways: tuple[Compile, ...] = ("block", "stage", "whole")
    return [Execution("torch", train.cuda_graph != "off", way) for way in ways]


def is_worth_compiling(train: TrainConfig, num_steps: int, best_s: float, *, on_gpu: bool) -> bool:
    """Whether a run is long enough to try torch.compile without being asked."""
    return on_gpu and train.compile == "auto" and num_steps * best_s > WORTH_COMPILING_S


def list_choices(topology: Topology, backend: str) -> list[Choice]:
    """Every all-reduce worth measuring, the backend's own first; none has more than `MAX_PEERS` peers a rank.

    NCCL knows the links inside a node better than messages between pairs can: there ours are for several nodes alone.
    """
    choices = [Choice("doubling")]
    for size in group_sizes(topology):
        choices += [Choice("hierarchical", size), Choice("torus", size)]
    # One group of all: the fewest messages, which is what counts where many ranks share a few cores.
    choices += [Choice("hierarchical", topology.num_ranks)] if topology.num_ranks > 2 else []
    if backend == "nccl":
        on_a_node = max(len(node) for node in topology.nodes)
        choices = [c for c in choices if topology.num_nodes > 1 and c.group_size in (1, on_a_node)]
    # What ranks cannot have comes out first: nothing is hopeless beside it, and to count its messages takes longest.
    possible = [choice for choice in choices if count_peers(choice, topology) <= MAX_PEERS]
    return [FLAT, *_drop_hopeless(possible, topology)]


def count_peers(choice: Choice, topology: Topology) -> int:
    """How many other ranks one rank talks to at most."""
    if choice.algorithm == "flat":
        return 2  # a ring
    if choice.algorithm == "doubling":
        return (topology.num_ranks - 1).bit_length() + 1
    groups = plan_groups(topology, choice.group_size)
    return max(map(len, groups)) - 1 + (len(groups) - 1).bit_length() + 1


def has_links(topology: Topology) -> bool:
    """Whether a cluster file gave links; what is guessed says nothing."""
    return (topology.intra, topology.inter) != (GUESSED_INTRA, GUESSED_INTER)


def _drop_hopeless(choices: Sequence[Choice], topology: Topology) -> list[Choice]:
    """What the links of a cluster file leave a chance, the most promising first: time for measuring may run out.

    Without such links nothing is known yet.
    """
    if not has_links(topology):
        return list(choices)
    sizes = (MIN_BYTES, 2**20, 2**26)
    seconds = {c: [predict_by_links(c, size, topology) for size in sizes] for c in choices}
    best = [min(column) for column in zip(*seconds.values(), strict=True)]
    behind = {c: [s / b for s, b in zip(seconds[c], best, strict=True)] for c in choices}
    return sorted((c for c in choices if min(behind[c]) <= WORTH_MEASURING), key=lambda c: math.prod(behind[c]))


def expect_messages(choices: Sequence[Choice], max_bytes: int, topology: Topology) -> list[Timing]:
    """What messages should cost by the links of a cluster file, before any was sent; nothing without links."""
    if not has_links(topology):
        return []
    return [Timing(c, size, predict_by_links(c, size, topology)) for c in choices for size in list_sizes(max_bytes)]


def predict_by_links(choice: Choice, num_bytes: float, topology: Topology) -> float:
    """Seconds of an all-reduce by the links: by formulas where all nodes are alike, or each message counted.

    Every rank asks, and among thousands of ranks to count takes seconds.
    """
    per_node = len(topology.nodes[0])
    if all(len(node) == per_node for node in topology.nodes) and topology.order == tuple(range(topology.num_ranks)):
        shape = Shape(topology.num_nodes, per_node, topology.intra, topology.inter)
        if is_regular(choice, shape):
            return predict_all_reduce(choice, num_bytes, shape)
    return predict_seconds(choice, num_bytes, topology)


def list_sizes(max_bytes: int) -> list[int]:
    """Sizes by powers of four from 1 KiB, and the largest itself."""
    steps = int(math.log(max(max_bytes, MIN_BYTES) / MIN_BYTES, 4))
    sizes = [MIN_BYTES * 4**step for step in range(steps + 1)]
    return sizes if max_bytes <= sizes[-1] * 1.5 else [*sizes, max_bytes // 4 * 4]


def pin_choice(comm: CommConfig, topology: Topology) -> Choice | None:
    """The all-reduce the recipe pins, if it does."""
    if comm.algorithm == "auto":
        return None
    if comm.algorithm in ("hierarchical", "torus"):
        return Choice(comm.algorithm, comm.group_size or len(topology.nodes[0]))
    return Choice(comm.algorithm)


def pick_choice(messages: Sequence[Timing], num_bytes: float) -> tuple[Choice, float]:
    """The choice that was quickest around this size, by interpolation between the sizes it was measured at."""
    return _pick(_draw_curves(tuple(messages)), num_bytes)


def expect_seconds(messages: Sequence[Timing], choice: Choice, num_bytes: float) -> float:
    """Seconds of one choice at any size, by interpolation between the sizes it was measured at."""
    curves = _draw_curves(tuple(messages))
    if choice not in curves:
        raise LockstepError(f"{choice} was not measured; measure it, or choose one that was.")
    return _interpolate(curves[choice], num_bytes)


def _pick(curves: Mapping[Choice, Curve], num_bytes: float) -> tuple[Choice, float]:
    largest = max(curve.sizes[-1] for curve in curves.values())
    # A choice that was given up before this size has no say there.
    reach = min(num_bytes, largest)
    times = {choice: _interpolate(curve, num_bytes) for choice, curve in curves.items() if curve.sizes[-1] >= reach}
    choice = min(times, key=times.__getitem__)
    if FLAT in times and times[choice] > (1 - MARGIN) * times[FLAT]:
        choice = FLAT
    return choice, times[choice]


def _pick_seconds(curves: Mapping[Choice, Curve], sizes: Array) -> Array:
    """The seconds of `_pick` for many sizes at once, digit for digit."""
    reach = np.minimum(sizes, max(curve.sizes[-1] for curve in curves.values()))
    times = {
        choice: np.where(curve.sizes[-1] >= reach, _interpolate_all(curve, sizes), math.inf)
        for choice, curve in curves.items()
    }
    best = np.min(list(times.values()), axis=0)
    return np.where(best > (1 - MARGIN) * times[FLAT], times[FLAT], best) if FLAT in times else best


@lru_cache(maxsize=4)
def _draw_curves(messages: tuple[Timing, ...]) -> dict[Choice, Curve]:
    """Seconds over bytes of each choice; a plan asks for thousands of sizes, so they are drawn once."""
    curves: dict[Choice, Curve] = {}
    for timing in sorted(messages):
        curve = curves.setdefault(timing.choice, Curve([], []))
        curve.sizes.append(timing.num_bytes)
        curve.seconds.append(timing.seconds)
    return curves


def _interpolate(curve: Curve, num_bytes: float) -> float:
    """Seconds between measured sizes, a straight line in each interval; proportional beyond the last."""
    sizes, seconds = curve
    index = bisect_left(sizes, num_bytes)
    if index == 0:
        return seconds[0]
    if index == len(sizes):
        return seconds[-1] * num_bytes / sizes[-1]
    low, high, low_s, high_s = sizes[index - 1], sizes[index], seconds[index - 1], seconds[index]
    return low_s + (high_s - low_s) * (num_bytes - low) / (high - low)


def _interpolate_all(curve: Curve, num_bytes: Array) -> Array:
    """The same for many sizes at once, each operation in the same order."""
    sizes, seconds = np.array(curve.sizes, float), np.array(curve.seconds)
    index = np.searchsorted(sizes, num_bytes)
    after, before = np.minimum(index, len(sizes) - 1), np.maximum(index - 1, 0)
    low, high, low_s, high_s = sizes[before], sizes[after], seconds[before], seconds[after]
    width = np.where(high > low, high - low, 1.0)  # outside of all sizes there is none, and none is asked for
    between = low_s + (high_s - low_s) * (num_bytes - low) / width
    beyond = seconds[-1] * num_bytes / sizes[-1]
    found: Array = np.where(index == 0, seconds[0], np.where(index == len(sizes), beyond, between))
    return found


def assign_choices(
    buffers: Sequence[Buffer], messages: Sequence[Timing], *, overlap: bool, bytes_per_element: int = 4
) -> ReductionPlan:
    """The quickest choice for each buffer."""
    sizes = [min(bytes_per_element, buffer.element_bytes) * (buffer.end - buffer.start) for buffer in buffers]
    choices = tuple(pick_choice(messages, size)[0] for size in sizes)
    return ReductionPlan(tuple(buffers), choices, overlap)


def default_reduction(
    comm: CommConfig, layout: Layout, topology: Topology, bytes_per_element: int, backend: str = ""
) -> ReductionPlan:
    """What runs until something is measured: the threshold rule and, for each buffer, what is pinned.

    Where nothing is pinned, what the links of a cluster file make quickest, or PyTorch's own without such links; NCCL
    chooses by its own knowledge of them.
    """
    width = min(layout.head_element_bytes, bytes_per_element)
    buffers = add_tail(layout, plan_buffers(layout.head, comm.buffer_mb * 2**20, width))
    overlap = comm.overlap != "off"
    pinned = pin_choice(comm, topology)
    if pinned is None and topology.num_ranks > 1 and has_links(topology) and backend != "nccl":
        largest = max(buffer.num_bytes for buffer in buffers)
        expected = expect_messages(list_choices(topology, backend), largest, topology)
        return assign_choices(buffers, expected, overlap=overlap, bytes_per_element=bytes_per_element)
    return ReductionPlan(buffers, (pinned or FLAT,) * len(buffers), overlap)


def propose_reductions(
    comm: CommConfig,
    layout: Layout,
    ready_s: Sequence[float],
    messages: Sequence[Timing],
    bytes_per_element: int = 4,
) -> dict[str, ReductionPlan]:
    """The reductions worth trying, by name: what each fusion rule gives, under the backward pass and after it."""
    threshold, weight = comm.buffer_mb * 2**20, bytes_per_element

    head, width = layout.head, min(layout.head_element_bytes, weight)
    # Two of the rules weigh every run of slots: all at once, which is most of the time that a plan takes.
    edges = np.array([*(slot.offset for slot in head.slots), head.numel])
    sizes = np.unique((edges[None, :] - edges[:, None])[np.triu_indices(len(edges), 1)] * width)
    seconds = _pick_seconds(_draw_curves(tuple(messages)), sizes.astype(float))
    predict = dict(zip(sizes.tolist(), seconds.tolist(), strict=True)).__getitem__
    ready_s = ready_s[: len(head.slots)]
    rules: dict[str, Callable[[], tuple[Buffer, ...]]] = {
        "merged": lambda: plan_merged(head, ready_s, predict, width),
        "two-segments": lambda: plan_two_segments(head, ready_s, predict, width),
        "threshold": lambda: plan_buffers(head, threshold, width),
    }
    found: dict[str, ReductionPlan] = {}
    if comm.algorithm == "auto" and comm.fusion == "auto" and comm.overlap != "off":
        buffers = add_tail(layout, rules["threshold"]())
        found[PLAIN] = ReductionPlan(buffers, (FLAT,) * len(buffers), overlap=True)
    if comm.overlap != "on" and comm.fusion == "auto":
        whole = add_tail(layout, plan_buffers(head, float("inf")))
        found["one buffer"] = assign_choices(whole, messages, overlap=False, bytes_per_element=weight)
    for name, rule in rules.items():
        if comm.fusion not in ("auto", name):
            continue
        buffers = add_tail(layout, rule())
        for overlap in (True, False):
            if (comm.overlap == "on" and not overlap) or (comm.overlap == "off" and overlap):
                continue
            if not overlap and comm.fusion == "auto":
                continue  # nothing to overlap: the one buffer above saves every start-up but one
            plan = assign_choices(buffers, messages, overlap=overlap, bytes_per_element=weight)
            if plan not in found.values():
                found[f"{name}{'' if overlap else ', after'}"] = plan
    return found


def expect_reduction(messages: Sequence[Timing], reduction: ReductionPlan, bytes_per_element: int = 4) -> float:
    """Seconds of all messages of a step, one after the other, whatever hides them."""
    return sum(
        expect_seconds(messages, choice, min(bytes_per_element, buffer.element_bytes) * (buffer.end - buffer.start))
        for buffer, choice in zip(reduction.buffers, reduction.choices, strict=True)
    )


def keep_affordable(seconds: Mapping[str, float], budget_s: float) -> list[str]:
    """The first candidate whatever it takes, and each after it that still fits into the budget beside those kept."""
    first, *others = seconds
    kept, left_s = [first], budget_s - seconds[first]
    for name in others:
        if seconds[name] <= left_s:
            kept.append(name)
            left_s -= seconds[name]
    return kept


def pick_trial(trials: Sequence[Trial]) -> Trial | None:
    """The quickest that works; executed the same way, PyTorch's own reduction stays unless it is clearly slower."""
    working = [trial for trial in trials if not trial.failure]
    if not working:
        return None
    best = min(working, key=lambda trial: trial.seconds)
    plain = [trial for trial in working if trial.rule == PLAIN and trial.execution == best.execution]
    return plain[0] if plain and best.seconds > (1 - MARGIN) * plain[0].seconds else best


def explain_choice(trials: Sequence[Trial]) -> list[dict[str, object]]:
    """The trials as rows, quickest first, with the picked one marked: what an event holds of them."""
    best = pick_trial(trials)
    return [
        {
            "execution": str(trial.execution),
            "rule": trial.rule,
            "reduction": trial.reduction,
            "seconds": trial.seconds if math.isfinite(trial.seconds) else None,
            "failure": trial.failure,
            "chosen": trial is best,
        }
        for trial in sorted(trials, key=lambda trial: (bool(trial.failure), trial.seconds))
    ]
