"""Every all-reduce beside PyTorch's own, in turns in one run, and beside what the cost model says.

Every other round is for learning: which group size, which algorithm for which message, what the model's curves are. The
rounds between are for judging: what is reported was measured there, and nothing was chosen by it. That they alternate
keeps a machine that slows down from looking like a wrong model.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from lockstep.bench.allreduce_report import build_table, describe_bytes, write_chart
from lockstep.bench.allreduce_rounds import MIN_ROUNDS, Plan, Run, Say, keep_best, plan_rounds, screen, take_turns
from lockstep.bench.results import check_files, write_rows
from lockstep.bench.virtual import VirtualCluster, fork_ranks
from lockstep.comm.allreduce import ALGORITHMS, Groups, build_groups
from lockstep.comm.cost import Choice, Fit, Timing, fit_cost
from lockstep.comm.topology import Topology, find_topology, plan_groups
from lockstep.comm.world import Membership, World, join_world, read_membership
from lockstep.errors import LockstepError
from lockstep.plan.choose import list_choices

SIZES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB
ROUNDS = 40
BUDGET_S = 420.0
TIMEOUT_S = 120.0  # a call that takes longer is not worth waiting for
TORCH, FLAT = Choice("torch"), Choice("flat")
# Anything else must beat PyTorch's own by this much to be chosen over it: less is noise, and noise is no reason.
MARGIN = 0.05


@dataclass(frozen=True)
class Row:
    """One algorithm at one size: median and distance of the quartiles over the judging rounds."""

    algorithm: str
    bytes: int
    median_s: float
    spread_s: float
    predicted_s: float | None  # by curves fitted to the learning rounds; None when only one size was measured
    group_size: int
    choice: str  # the algorithm with its group size; hybrid's is one of the others
    rounds: int
    topology: str


@dataclass(frozen=True)
class Trial:
    """What was measured at one size, in seconds a call."""

    size: int
    screened: dict[Choice, float]
    learned: dict[Choice, list[float]]
    judged: dict[Choice, list[float]]
    best: Choice


def measure_allreduce(
    world: World,
    topology: Topology,
    sizes: Sequence[int] = SIZES,
    *,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
    say: Say = lambda line: None,
) -> list[Row]:
    """Measure every algorithm at every size; every rank calls it and gets the same rows."""
    _check_request(world.size, sizes, rounds)
    runs = _build_runs(topology, world.rank)
    array = torch.zeros(max(sizes) // 4, device=world.device)
    start = time.perf_counter()
    screened = {size: screen(runs, array[: size // 4], world) for size in sorted(sizes)}
    left_s: float = world.broadcast_value(budget_s - (time.perf_counter() - start))
    plans = plan_rounds(screened, rounds, left_s)
    for plan in plans:
        say(f"{describe_bytes(plan.size):>8}: {plan.rounds} rounds of {len(plan.kept)} × {plan.repeats} calls")
    times = take_turns(plans, runs, array, world, lambda line: say(f"{line} of about {left_s:.0f} s"))
    trials = [_judge(plan, times[plan.size]) for plan in plans]
    for trial in trials:
        say(_describe_trial(trial))
    return _build_rows(trials, topology)


def run_rank(
    membership: Membership,
    *,
    sizes: Sequence[int],
    rounds: int,
    budget_s: float,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Measure as one rank of a world that a launcher started; rank 0 tells how far it is and writes the results."""
    with join_world(membership, timeout_s=TIMEOUT_S) as world:
        hosts = world.gather_values(os.environ.get("LOCKSTEP_NODE") or socket.gethostname())
        say: Say = partial(print, flush=True) if world.is_first else lambda line: None
        rows = measure_allreduce(world, find_topology(hosts), sizes, rounds=rounds, budget_s=budget_s, say=say)
    if world.is_first:
        values = [asdict(row) for row in rows]
        Console().print(build_table(values))
        if json_file is not None:
            write_rows(json_file, values)
        if html_file is not None:
            write_chart(html_file, values)


def run_parent(
    *,
    nodes: int,
    ranks_per_node: int,
    sizes: Sequence[int] = SIZES,
    gbit_per_s: float | None = None,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
    json_file: Path | None = None,
    html_file: Path | None = None,
) -> None:
    """Start the ranks on this machine: in a virtual cluster with limited links, or as pretended nodes without."""
    _check_request(nodes * ranks_per_node, sizes, rounds)
    check_files(json_file, html_file)
    if gbit_per_s is None:
        cluster = VirtualCluster(nodes, ranks_per_node, pretend=True)
    else:
        cluster = VirtualCluster.open(nodes, ranks_per_node, gbit_per_s)
    options = {
        "sizes": list(sizes),
        "rounds": rounds,
        "budget_s": budget_s,
        "json_file": str(json_file) if json_file else None,
        "html_file": str(html_file) if html_file else None,
    }
    with cluster:
        print(cluster.describe(), flush=True)
        argv = [sys.executable, "-m", "lockstep.bench.allreduce", json.dumps(options)]
        cluster.wait(cluster.start(argv, one_per_node=True))


def parse_sizes(text: str) -> list[int]:
    """`1KiB,64KiB,4MiB` (or plain bytes) -> bytes."""
    units = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "b": 1, "": 1}
    sizes = []
    for part in text.lower().replace(" ", "").split(","):
        number = part.rstrip("kmgib")
        unit = part.removeprefix(number)
        if not number.isascii() or not number.isdigit() or unit not in units:
            raise LockstepError(f"{part!r} in --sizes is not a size; write for example 1KiB,64KiB,4MiB.")
        sizes.append(int(number) * units[unit])
    return sizes


def _check_request(num_ranks: int, sizes: Sequence[int], rounds: int) -> None:
    if num_ranks < 2:
        raise LockstepError("An all-reduce needs at least 2 ranks; ask for more nodes or more ranks per node.")
    if not sizes or any(size < 4 or size % 4 for size in sizes):
        raise LockstepError("Sizes to all-reduce must be multiples of 4 bytes, one or more; change --sizes.")
    if rounds < 2 * MIN_ROUNDS:
        raise LockstepError(f"{rounds} rounds are too few to learn from one half and judge by the other; ask for 6.")


def _build_runs(topology: Topology, rank: int) -> dict[Choice, Run]:
    """PyTorch's own all-reduce, and ours with each group size worth measuring."""
    choices = list_choices(topology, str(dist.get_backend()))
    groups: dict[int, Groups] = {}
    for size in sorted({choice.group_size for choice in choices}):
        first = next(iter(groups.values()), None)
        groups[size] = build_groups(
            plan_groups(topology, size), rank, nodes=topology.nodes, share=first, timeout_s=TIMEOUT_S
        )
    runs: dict[Choice, Run] = {TORCH: dist.all_reduce}
    for choice in choices:
        runs[choice] = _bind(choice, groups[choice.group_size])
    return runs


def _bind(choice: Choice, groups: Groups) -> Run:
    algorithm = ALGORITHMS[choice.algorithm]
    return lambda tensor: algorithm(tensor, groups)


def _judge(plan: Plan, times: dict[Choice, list[float]]) -> Trial:
    """Learn from every other round, choose, judge by the rounds between."""
    learned = {choice: values[0::2] for choice, values in times.items()}
    medians = {choice: statistics.median(values) for choice, values in learned.items()}
    judged = {choice: times[choice][1::2] for choice in keep_best(medians, 1)}
    return Trial(plan.size, plan.screened, learned, judged, _choose(learned))


def _choose(learned: dict[Choice, list[float]]) -> Choice:
    """What hybrid uses: the quickest of ours, if round by round it is quicker than the backend's own beyond noise."""
    ours = {choice: statistics.median(times) for choice, times in learned.items() if choice != TORCH}
    best = min(ours, key=ours.__getitem__)
    shares = [mine / theirs for mine, theirs in zip(learned[best], learned[FLAT], strict=True)]
    _, middle, upper = statistics.quantiles(shares, n=4, method="inclusive")
    return best if middle < 1 - MARGIN and upper < 1 else FLAT


def _build_rows(trials: Sequence[Trial], topology: Topology) -> list[Row]:
    fits = _fit(trials) if len(trials) > 1 else {}
    rows = []
    for trial in trials:
        for choice in (*trial.judged, trial.best):
            times = trial.judged[choice]
            quartiles = statistics.quantiles(times, n=4, method="inclusive")
            rows.append(
                Row(
                    algorithm=choice.algorithm,
                    bytes=trial.size,
                    median_s=statistics.median(times),
                    spread_s=quartiles[2] - quartiles[0],
                    predicted_s=fits[choice].predict(trial.size) if fits else None,
                    group_size=choice.group_size,
                    choice=str(choice),
                    rounds=len(times),
                    topology=topology.key(),
                )
            )
        rows[-1] = Row(**asdict(rows[-1]) | {"algorithm": "hybrid"})
    return rows


def _fit(trials: Sequence[Trial]) -> dict[Choice, Fit]:
    """The model's curves, from the learning rounds alone."""
    samples = []
    num_sizes = Counter(choice for trial in trials for choice in trial.learned)
    for trial in trials:
        for choice, times in trial.learned.items():
            samples += [Timing(choice, trial.size, seconds) for seconds in times]
        # The one call of a choice that was given up here counts only where there is little else to go by.
        few = [choice for choice in trial.screened if choice not in trial.learned and num_sizes[choice] < 3]
        samples += [Timing(choice, trial.size, trial.screened[choice]) for choice in few]
    return fit_cost(samples)


def _describe_trial(trial: Trial) -> str:
    torch_s, hybrid_s = (statistics.median(trial.judged[choice]) for choice in (TORCH, trial.best))
    return (
        f"{describe_bytes(trial.size):>8}: torch {torch_s * 1e3:.2f} ms, hybrid {hybrid_s * 1e3:.2f} ms "
        f"({trial.best}), ratio {torch_s / hybrid_s:.2f}, 2 × {len(trial.judged[TORCH])} rounds"
    )


def _main(options: dict[str, Any]) -> None:
    membership = read_membership(os.environ)
    assert membership is not None
    files = {key: Path(options[key]) if options[key] else None for key in ("json_file", "html_file")}
    run_rank(membership, **options | files)


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(_main, json.loads(sys.argv[1]))))
