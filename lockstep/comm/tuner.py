"""Measure every all-reduce over message sizes, choose by what was measured, and remember it in a readable file.

Runs in the first seconds of a run or by `lockstep tune`. All ranks measure together, rank 0 decides, so that all
ranks agree. What was learnt is kept by topology, backend and model; any entry can be pinned in the recipe instead.
"""

import math
import time
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w
import torch

from lockstep.comm.cost import Choice, Fit, Sample, fit_cost
from lockstep.comm.fusion import Buffer, ReductionPlan
from lockstep.comm.hybrid import FLAT, Hybrid
from lockstep.comm.topology import Topology, group_sizes
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from lockstep.layout import Layout

MIN_BYTES = 1024
MAX_ROUNDS = 9
# A choice this much slower than the best at a size is not measured there again.
HOPELESS = 2.0
# What is not PyTorch's own must beat it by this much: less is noise, and noise is no reason.
MARGIN = 0.05


@dataclass(frozen=True)
class Trial:
    """A whole plan, tried on real backward passes."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Tuning:
    """What was measured on a topology for a model, and the plan that follows from it."""

    name: str
    topology: str
    backend: str
    model: str
    seconds: float  # that tuning took
    samples: tuple[Sample, ...]  # medians
    trials: tuple[Trial, ...]
    plan: ReductionPlan

    @property
    def fits(self) -> dict[Choice, Fit]:
        """The cost of every choice that was measured at two sizes or more."""
        sizes: dict[Choice, set[int]] = {}
        for sample in self.samples:
            sizes.setdefault(sample.choice, set()).add(sample.num_bytes)
        return fit_cost([sample for sample in self.samples if len(sizes[sample.choice]) > 1])


def list_choices(topology: Topology) -> list[Choice]:
    """Everything worth measuring on a topology, PyTorch's own first."""
    choices = [FLAT, Choice("doubling")]
    for size in group_sizes(topology):
        choices += [Choice("hierarchical", size), Choice("torus", size)]
    # One group of all: the fewest messages, which is what counts where many ranks share a few cores.
    return [*choices, Choice("hierarchical", topology.num_ranks)] if topology.num_ranks > 2 else choices


def list_sizes(max_bytes: int) -> list[int]:
    """Sizes by powers of four from 1 KiB, and the largest itself."""
    steps = int(math.log(max(max_bytes, MIN_BYTES) / MIN_BYTES, 4))
    sizes = [MIN_BYTES * 4**step for step in range(steps + 1)]
    return sizes if max_bytes <= sizes[-1] * 1.5 else [*sizes, max_bytes // 4 * 4]


def measure_choices(
    hybrid: Hybrid, world: World, array: torch.Tensor, choices: Sequence[Choice], sizes: Sequence[int], budget_s: float
) -> list[Sample]:
    """The median seconds of each choice at each size on the wire, measured in turns until the budget is spent.

    Messages are parts of `array`, which is left zero. The slowest rank's time counts. After each round rank 0 says
    which pairs go on: none that is hopeless, none at all when the time is up; larger sizes are left out when even one
    round of them would not fit.
    """
    hybrid.prepare(choices)
    array.zero_()  # and stays so, however often it is summed
    start = time.perf_counter()
    times: dict[tuple[int, Choice], list[float]] = {}
    for size in sizes:  # the first round goes up in size, so that a budget runs out on the largest
        left = budget_s - (time.perf_counter() - start)
        alive = world.broadcast_object(_shortlist(times, choices, size, sizes, left))
        if not alive:
            break
        _measure_round(hybrid, world, array, [(size, choice) for choice in alive], times, repeats=2)
    for _ in range(MAX_ROUNDS - 1):
        left = budget_s - (time.perf_counter() - start)
        pairs = world.broadcast_object(_prune(times, left))
        if not pairs:
            break
        _measure_round(hybrid, world, array, pairs, times)
    return [Sample(choice, size, median(values)) for (size, choice), values in sorted(times.items())]


def _shortlist(
    times: dict[tuple[int, Choice], list[float]],
    choices: Sequence[Choice],
    size: int,
    sizes: Sequence[int],
    left_s: float,
) -> list[Choice]:
    """What to measure at the next size: all, or the best two of the last size when time is short."""
    index = list(sizes).index(size)
    if index == 0:
        return list(choices)
    last = {choice: min(times[sizes[index - 1], choice]) for choice in choices if (sizes[index - 1], choice) in times}
    growth = size / sizes[index - 1]
    ranked = sorted(last, key=last.__getitem__)
    if 2 * growth * sum(last.values()) < 0.3 * left_s:
        return [choice for choice in choices if choice in last]
    keep = sorted({*ranked[:2], FLAT})
    return keep if 2 * growth * sum(last[choice] for choice in keep) < left_s else []


def _prune(times: dict[tuple[int, Choice], list[float]], left_s: float) -> list[tuple[int, Choice]]:
    """The pairs of the next round; none when it would not fit."""
    best: dict[int, float] = {}
    for (size, _), values in times.items():
        best[size] = min(best.get(size, math.inf), min(values))
    pairs = [(size, choice) for (size, choice), values in times.items() if min(values) <= HOPELESS * best[size]]
    while pairs and sum(median(times[pair]) for pair in pairs) > left_s:
        largest = max(size for size, _ in pairs)
        pairs = [pair for pair in pairs if pair[0] < largest]
    return pairs


def _measure_round(
    hybrid: Hybrid,
    world: World,
    array: torch.Tensor,
    pairs: Iterable[tuple[int, Choice]],
    times: dict[tuple[int, Choice], list[float]],
    repeats: int = 1,
) -> None:
    """Run each pair; the time that counts is the slowest rank's, exchanged once at the end of the round."""
    pairs = list(pairs)
    width = min(array.element_size(), hybrid.bytes_per_element)  # of one element on the wire
    seconds = torch.zeros(len(pairs), repeats, dtype=torch.float64)
    for row, (size, choice) in enumerate(pairs):
        for repeat in range(repeats):
            begun = time.perf_counter()
            hybrid.run(array[: size // width], choice)
            if array.is_cuda:
                torch.cuda.synchronize()
            seconds[row, repeat] = time.perf_counter() - begun
    world.maximum(seconds)
    for pair, values in zip(pairs, seconds.tolist(), strict=True):
        times.setdefault(pair, []).extend(values[-1:] if repeats > 1 else values)  # the first repeat warms up


def pick_choice(samples: Sequence[Sample], num_bytes: float) -> tuple[Choice, float]:
    """The choice that was quickest around this size, by interpolation between the sizes it was measured at."""
    curves = _draw_curves(tuple(samples))
    largest = max(curve[-1][0] for curve in curves.values())
    # A choice that was given up before this size has no say there.
    reach = min(num_bytes, largest)
    times = {choice: _interpolate(curve, num_bytes) for choice, curve in curves.items() if curve[-1][0] >= reach}
    choice = min(times, key=times.__getitem__)
    if FLAT in times and times[choice] > (1 - MARGIN) * times[FLAT]:
        choice = FLAT
    return choice, times[choice]


@lru_cache(maxsize=4)
def _draw_curves(samples: tuple[Sample, ...]) -> dict[Choice, list[tuple[int, float]]]:
    """Seconds over bytes of each choice; a plan asks for thousands of sizes, so they are drawn once."""
    curves: dict[Choice, list[tuple[int, float]]] = {}
    for sample in sorted(samples):
        curves.setdefault(sample.choice, []).append((sample.num_bytes, sample.seconds))
    return curves


def _interpolate(curve: Sequence[tuple[int, float]], num_bytes: float) -> float:
    """Seconds between measured sizes, a straight line in each interval; proportional beyond the last."""
    sizes = [size for size, _ in curve]
    index = bisect_left(sizes, num_bytes)
    if index == 0:
        return curve[0][1]
    if index == len(curve):
        return curve[-1][1] * num_bytes / sizes[-1]
    (low, low_s), (high, high_s) = curve[index - 1], curve[index]
    return low_s + (high_s - low_s) * (num_bytes - low) / (high - low)


def assign_choices(
    buffers: Sequence[Buffer], samples: Sequence[Sample], *, overlap: bool, bytes_per_element: int = 4
) -> ReductionPlan:
    """The quickest choice for each buffer."""
    sizes = [min(bytes_per_element, buffer.element_bytes) * (buffer.end - buffer.start) for buffer in buffers]
    choices = tuple(pick_choice(samples, size)[0] for size in sizes)
    return ReductionPlan(tuple(buffers), choices, overlap)


def describe_model(layout: Layout) -> str:
    """A name for what is reduced: slots and elements."""
    return f"{len(layout.slots)} gradients, {layout.numel} elements"


def tuning_name(topology: Topology, backend: str, layout: Layout, pins: str) -> str:
    """The name under which a tuning is remembered: topology, backend, model, and what the recipe pins."""
    name = f"{topology.key()}-{backend}-{len(layout.slots)}x{layout.numel}"
    if layout.split:
        name += f"-{layout.split}half"
    return f"{name}-{pins}" if pins else name


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Leave the tuning as TOML, for people and for later runs."""
    table: dict[str, Any] = {
        "name": tuning.name,
        "topology": tuning.topology,
        "backend": tuning.backend,
        "model": tuning.model,
        "seconds": tuning.seconds,
        "overlap": tuning.plan.overlap,
        "buffer": [
            asdict(b) | {"choice": str(choice)}
            for b, choice in zip(tuning.plan.buffers, tuning.plan.choices, strict=True)
        ],
        "trial": [{"name": trial.name, "seconds": trial.seconds} for trial in tuning.trials],
        "measured": [
            {"choice": str(sample.choice), "bytes": sample.num_bytes, "seconds": sample.seconds}
            for sample in tuning.samples
        ],
        "fit": [{"choice": str(choice), **fit.to_dict()} for choice, fit in tuning.fits.items()],
    }
    header = "# Measured by lockstep; delete this file, or run `lockstep tune` again, to measure anew.\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{time.time_ns()}")
        aside.write_text(header + tomli_w.dumps(table))
        aside.rename(path)
    except OSError as error:
        raise LockstepError(
            f"The tuning cannot be written to {path} ({error.strerror}); set LOCKSTEP_CACHE to another folder."
        ) from error


def read_tuning(path: Path) -> Tuning | None:
    """What an earlier run measured; None when there is nothing, or nothing usable."""
    try:
        table = tomllib.loads(path.read_text())
        buffers = tuple(
            Buffer(b["start"], b["end"], b["first"], b["last"], b.get("element_bytes", 4)) for b in table["buffer"]
        )
        choices = tuple(Choice.parse(b["choice"]) for b in table["buffer"])
        return Tuning(
            name=table["name"],
            topology=table["topology"],
            backend=table["backend"],
            model=table["model"],
            seconds=table["seconds"],
            samples=tuple(Sample(Choice.parse(m["choice"]), m["bytes"], m["seconds"]) for m in table["measured"]),
            trials=tuple(Trial(t["name"], t["seconds"]) for t in table["trial"]),
            plan=ReductionPlan(buffers, choices, table["overlap"]),
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, LockstepError):
        return None
