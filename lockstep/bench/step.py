"""A whole training step beside PyTorch's own: DistributedDataParallel on several ranks, a bare loop on one.

All sides hold the same network, batch and update rule, are tuned for about the same time, and take turns in one
process, so that the machine's noise falls on all; what counts is the median of the ratios of each round. Sides that
do not fit into memory together are built for each turn and taken down after it.
"""

import contextlib
import ctypes
import gc
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from lockstep.bench import ddp
from lockstep.bench.cases import (
    TUNE_S,
    USUAL_CASES,
    Case,
    Lockstep,
    Opener,
    Step,
    count_gradient_bytes,
    fake_batch,
    model_case,
    open_bare,
    open_ddp,
    size_case,
)
from lockstep.bench.results import check_files, write_rows
from lockstep.bench.step_report import build_tables, write_chart
from lockstep.bench.virtual import VirtualCluster, fork_ranks
from lockstep.comm.world import Membership, World, join_world, read_membership
from lockstep.data.pipeline import Batch
from lockstep.errors import LockstepError
from lockstep.models import build_model

Against = Literal["ddp", "bare"]
Say = Callable[[str], object]
ROUNDS = 40
ROUND_S = 0.3
TIMEOUT_S = 300.0
# DDP's settings are tried in turns: at least so many, at most so many.
MIN_TURNS, MAX_TURNS = 3, 9
# Weights, gradients and momentum of each side; half of the free memory is left to activations and to others.
ARRAYS_PER_SIDE = 3
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Row:
    """One side of one case; `ratio` is its step's time over Lockstep's, above 1 where Lockstep is the faster."""

    case: str
    ranks: int
    side: str
    setting: str
    median_s: float
    spread_s: float  # distance of the quartiles, here and below
    ratio: float
    ratio_spread: float
    rounds: int
    gradient_bytes: int


def measure_case(
    case: Case, world: World, *, rounds: int = ROUNDS, round_s: float = ROUND_S, say: Say = lambda line: None
) -> list[Row]:
    """Tune the sides, then let them take turns; every rank calls it and gets the same rows."""
    batch = fake_batch(case, world)
    num_bytes = count_gradient_bytes(case)
    ours = Lockstep(case, world, batch)
    sides: dict[str, Opener] = {}
    settings: dict[str, str] = {}
    if world.size == 1:
        sides["bare loop"], settings["bare loop"] = partial(open_bare, case, world, batch), "fused SGD"
    else:
        tuned = tune_ddp(case, world, batch, num_bytes, round_s, say)
        for name, setting in (("ddp default", ddp.DEFAULT), ("ddp tuned", tuned)):
            sides[name], settings[name] = partial(open_ddp, case, world, batch, setting), str(setting)
    sides["lockstep"] = ours.open
    fits = fit_together(world, len(sides), num_bytes)
    say(f"{len(sides)} sides take {rounds} turns each, {'all in memory' if fits else 'one in memory at a time'}")
    times = take_turns(sides, world, rounds=rounds, round_s=round_s, together=fits, say=say)
    settings["lockstep"] = ours.setting
    return [_build_row(case, world.size, num_bytes, name, settings[name], times) for name in sides]


def tune_ddp(case: Case, world: World, batch: Batch, num_bytes: int, round_s: float, say: Say) -> ddp.Setting:
    """DDP's quickest setting: bucket sizes first, then with and without views; rank 0 decides for all."""

    def pick(settings: list[ddp.Setting], budget_s: float) -> ddp.Setting:
        openers: dict[str, Opener] = {
            str(setting): partial(open_ddp, case, world, batch, setting) for setting in settings
        }
        fits = fit_together(world, len(settings), num_bytes)
        say(f"DDP: {len(settings)} settings for {budget_s:.0f} s or more, {MIN_TURNS if fits else 1} turns at least")
        times = take_turns(
            openers,
            world,
            rounds=MAX_TURNS,
            round_s=round_s / 2,
            together=fits,
            budget_s=budget_s,
            min_rounds=MIN_TURNS if fits else 1,
            say=say,
        )
        best: ddp.Setting = world.broadcast_object(min(settings, key=lambda s: statistics.median(times[str(s)])))
        say(f"DDP: {best}, {statistics.median(times[str(best)]) * 1e3:.1f} ms")
        return best

    best = pick(ddp.list_settings(), 0.75 * TUNE_S)
    return pick(list(dict.fromkeys([best, best._replace(is_view=False), ddp.DEFAULT])), 0.25 * TUNE_S)


def take_turns(
    sides: Mapping[str, Opener],
    world: World,
    *,
    rounds: int,
    round_s: float,
    together: bool,
    budget_s: float = float("inf"),
    min_rounds: int = 1,
    say: Say = lambda line: None,
) -> dict[str, list[float]]:
    """Seconds per step of each side, over rounds in which each runs for about `round_s`."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        steps = {name: stack.enter_context(opener()) for name, opener in sides.items()} if together else {}
        start = time.perf_counter()
        for number in range(rounds):
            if number >= min_rounds and world.broadcast_object(time.perf_counter() - start > budget_s):
                break
            for name, opener in sides.items():
                if together:
                    times[name].append(_take_turn(steps[name], name, counts, world, round_s))
                    continue
                with opener() as step:
                    times[name].append(_take_turn(step, name, counts, world, round_s))
                del step
                _give_back_memory()
                say(f"{name}: {times[name][-1] * 1e3:,.0f} ms a step, round {number + 1} of {rounds}")
    return times


def fit_together(world: World, num_sides: int, num_bytes: int) -> bool:
    """Whether so many sides of all ranks on this host fit into its memory, or its GPU's; rank 0 decides for all."""
    num_neighbours = world.gather_objects(socket.gethostname()).count(socket.gethostname())
    one_side = num_neighbours * ARRAYS_PER_SIDE * num_bytes
    free = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else read_available_bytes()
    fits, fits_alone = world.broadcast_object((num_sides * one_side <= MEMORY_SHARE * free, one_side <= free))
    if not fits_alone:
        raise LockstepError(
            f"{num_neighbours} ranks need more than {one_side / 1e9:.1f} GB on this host, of which {free / 1e9:.1f} GB "
            "are free; ask for fewer ranks or a smaller network."
        )
    return bool(fits)


def _give_back_memory() -> None:
    """Return what a closed side held to the system, or the next one would come on top of it."""
    gc.collect()  # hooks and parameters hold each other
    with contextlib.suppress(OSError, AttributeError):  # only glibc keeps it, and only glibc has this
        ctypes.CDLL(None).malloc_trim(0)


def read_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> float:
    """Memory that could be had without swapping; without end where the system does not tell."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf"))


def run_parent(
    *,
    nodes: int,
    ranks_per_node: int,
    against: Against = "ddp",
    model: str | None = None,
    gradient_mb: float | None = None,
    gbit_per_s: float | None = None,
    rounds: int = ROUNDS,
    round_s: float = ROUND_S,
    json_file: Path | None = None,
    html_file: Path | None = None,
) -> None:
    """Start the ranks on this machine and let them measure."""
    if model and gradient_mb:
        raise LockstepError("--model and --gradient-mb both say what to train; give one of them.")
    if model:
        case = model_case(model)
        with torch.device("meta"):  # says what is wrong with the name before any rank starts
            build_model(model, case.num_classes, image_size=case.image_size)
    if against == "bare":
        nodes, ranks_per_node = 1, 1
    elif nodes * ranks_per_node < 2:
        raise LockstepError("DDP needs at least 2 ranks; ask for more --ranks-per-node, or measure --against bare.")
    check_files(json_file, html_file)
    options = {
        "model": model,
        "gradient_mb": gradient_mb,
        "rounds": rounds,
        "round_s": round_s,
        "json_file": str(json_file) if json_file else None,
        "html_file": str(html_file) if html_file else None,
    }
    if gbit_per_s is None or nodes == 1:
        cluster = VirtualCluster(nodes, ranks_per_node, pretend=True)
    else:
        cluster = VirtualCluster.open(nodes, ranks_per_node, gbit_per_s)
    with cluster:
        argv = [sys.executable, "-m", "lockstep.bench.step", json.dumps(options)]
        cluster.wait(cluster.start(argv, one_per_node=True))


def run_rank(
    membership: Membership,
    *,
    model: str | None,
    gradient_mb: float | None,
    rounds: int,
    round_s: float,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Measure every case as one rank; rank 0 tells how far it is and writes the results, case by case."""
    cases = (model_case(model),) if model else (size_case(gradient_mb),) if gradient_mb else USUAL_CASES
    values: list[dict[str, Any]] = []
    with join_world(membership, timeout_s=TIMEOUT_S) as world:
        for case in cases:
            say: Say = partial(print, f"{case.name}:", flush=True) if world.is_first else lambda line: None
            values += [asdict(row) for row in measure_case(case, world, rounds=rounds, round_s=round_s, say=say)]
            if world.is_first and json_file is not None:
                write_rows(json_file, values)
    if world.is_first:
        Console().print(*build_tables(values), sep="\n")
        if html_file is not None:
            write_chart(html_file, values)


def _take_turn(step: Step, name: str, counts: dict[str, int], world: World, round_s: float) -> float:
    """Seconds per step of one turn; how many steps are a turn is settled in a side's first."""
    step()
    if name not in counts:
        step()  # DDP cuts its buckets anew after the first step
        seconds = _time_steps(step, 1, world)
        counts[name] = world.broadcast_object(max(1, int(round_s / seconds)))
        if counts[name] == 1:
            return seconds
    return _time_steps(step, counts[name], world)


def _time_steps(step: Step, count: int, world: World) -> float:
    """Seconds per step, from all ranks ready to all ranks done."""
    world.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.barrier()
    return (time.perf_counter() - start) / count


def _build_row(
    case: Case, ranks: int, num_bytes: int, name: str, setting: str, times: Mapping[str, list[float]]
) -> Row:
    ratios = [theirs / mine for theirs, mine in zip(times[name], times["lockstep"], strict=True)]
    return Row(
        case=case.name,
        ranks=ranks,
        side=name,
        setting=setting,
        median_s=statistics.median(times[name]),
        spread_s=_spread(times[name]),
        ratio=statistics.median(ratios),
        ratio_spread=_spread(ratios),
        rounds=len(ratios),
        gradient_bytes=num_bytes,
    )


def _spread(values: list[float]) -> float:
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]


def _main(options: dict[str, Any]) -> None:
    membership = read_membership(os.environ)
    assert membership is not None
    files = {key: Path(options[key]) if options[key] else None for key in ("json_file", "html_file")}
    run_rank(membership, **options | files)


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(_main, json.loads(sys.argv[1]))))
