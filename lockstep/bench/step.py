"""A whole training step beside PyTorch's own: DistributedDataParallel on several ranks, a bare loop on one.

All sides hold the same network, batch and update rule, are tuned for about the same time, and take turns in one
process, so that the machine's noise falls on all; what counts is the median of the ratios of each round. Where sides
do not fit into memory together, some are built for each turn and taken down after it (`step_memory.py`). Where there
are GPUs, ranks have one each or share one (`shared_gpu.py`), and DDP takes part compiled as well.
"""

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from lockstep.bench import ddp
from lockstep.bench.cases import (
    APART,
    TUNE_S,
    USUAL_CASES,
    Case,
    Lockstep,
    Opener,
    Precision,
    Step,
    count_gradient_bytes,
    fake_batch,
    gpu_case,
    model_case,
    open_bare,
    open_ddp,
    size_case,
)
from lockstep.bench.results import check_files, write_rows
from lockstep.bench.shared_gpu import describe_rank
from lockstep.bench.step_memory import choose_kept, give_back_memory, measure_pass
from lockstep.bench.step_report import build_tables, write_chart
from lockstep.bench.turns import first_line
from lockstep.bench.virtual import VirtualCluster, fork_ranks
from lockstep.comm.world import Membership, World, join_world, read_membership
from lockstep.config import PrecisionConfig
from lockstep.data.pipeline import Batch
from lockstep.engine.build import set_number_formats
from lockstep.errors import LockstepError
from lockstep.models import build_model

Against = Literal["ddp", "bare"]
Device = Literal["auto", "cpu", "cuda"]
Say = Callable[[str], object]
ROUNDS = 40
ROUND_S = 0.3
TIMEOUT_S = 600.0  # one rank may compile for minutes while the others wait
# What a GPU trains unless told otherwise.
GPU_MODEL, GPU_BATCH, GPU_IMAGE_SIZE = "resnet50", 256, 224
FIRST_STEPS = 6  # of a side on a GPU, before its turns: kernels are chosen, memory is found
# DDP's settings are tried in turns: at least so many, at most so many.
MIN_TURNS, MAX_TURNS = 3, 9


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
    precision: str
    batch: int  # of one rank
    images_per_second: float  # of all ranks together


@dataclass(frozen=True)
class Wanted:
    """What the ranks are to measure; travels to them as JSON."""

    model: str | None = None
    gradient_mb: float | None = None
    batch: int | None = None
    image_size: int | None = None
    precision: Precision | None = None
    device: Device = "cpu"  # "auto" has become one of the others
    shares_gpu: bool = False
    compiled: bool = True  # on GPUs, whether DDP takes part compiled too
    rounds: int = ROUNDS
    round_s: float = ROUND_S
    json_file: str | None = None
    html_file: str | None = None

    def list_cases(self) -> tuple[Case, ...]:
        """What is trained, one after the other."""
        precision: Precision = self.precision or ("fp16" if self.device == "cuda" else "fp32")
        if self.gradient_mb:
            return (replace(size_case(self.gradient_mb), precision=precision),)
        if self.device == "cuda":
            model, batch, size = self.model or GPU_MODEL, self.batch or GPU_BATCH, self.image_size or GPU_IMAGE_SIZE
            return (gpu_case(model, batch, size, precision),)
        return (model_case(self.model, self.batch, self.image_size),) if self.model else USUAL_CASES


def measure_case(
    case: Case,
    world: World,
    *,
    rounds: int = ROUNDS,
    round_s: float = ROUND_S,
    compiled: bool = True,
    say: Say = lambda line: None,
    note: Callable[[list[Row]], object] = lambda rows: None,
) -> list[Row]:
    """Tune the sides, then let them take turns; every rank calls it and gets the same rows.

    `note` hears of them after every round from the second on, as far as they are known.
    """
    set_number_formats(PrecisionConfig(compute=case.precision))
    batch = fake_batch(case, world)
    num_bytes, pass_bytes = count_gradient_bytes(case), measure_pass(case, world, batch)
    ours = Lockstep(case, world, batch)
    sides: dict[str, Opener] = {}
    settings: dict[str, str] = {}
    apart: dict[str, Lockstep] = {}
    if world.size == 1:
        sides["bare loop"], settings["bare loop"] = partial(open_bare, case, world, batch), "fused SGD"
    else:
        tuned = tune_ddp(case, world, batch, num_bytes, pass_bytes, round_s, say)
        for name, (setting, is_compiled) in list_ddp_sides(tuned, compiled and world.device.type == "cuda").items():
            sides[name] = partial(open_ddp, case, world, batch, setting, compiled=is_compiled)
            settings[name] = str(setting)
    sides["lockstep"] = ours.open
    if world.size > 1 and world.device.type == "cuda":
        apart = {name: Lockstep(case, world, batch, pins) for name, pins in APART.items()}
        sides |= {name: side.open for name, side in apart.items()}
    recorded = {"lockstep", *(name for name, pins in APART.items() if pins.cuda_graph == "on")}
    kept = choose_kept(list(sides), recorded, num_bytes, pass_bytes, world)
    say(f"{len(sides)} sides take {rounds} turns each, {f'{len(kept)} of them' if kept else 'none'} kept in memory")

    def build_rows(times: Mapping[str, list[float]]) -> list[Row]:
        own = {"lockstep": ours.setting} | {name: side.setting for name, side in apart.items()}
        return [_build_row(case, world.size, num_bytes, name, (settings | own)[name], times) for name in times]

    def note_round(times: Mapping[str, list[float]]) -> None:
        if len(times.get("lockstep", ())) > 1:
            note(build_rows(times))

    times = take_turns(sides, world, rounds=rounds, round_s=round_s, kept=kept, say=say, note=note_round)
    if "lockstep" not in times:
        raise LockstepError("Lockstep's own side failed, as said above, and there is nothing to compare with.")
    for line in ours.trials:
        say(line)
    return build_rows(times)


def list_ddp_sides(tuned: ddp.Setting, compiled: bool) -> dict[str, tuple[ddp.Setting, bool]]:
    """By name: how DDP is set, and whether it is compiled, which only a GPU rewards.

    A compilation takes more than a minute, so the setting that is quickest without it is the one that is compiled.
    """
    sides = {"ddp default": (ddp.DEFAULT, False), "ddp tuned": (tuned, False)}
    return sides | ({"ddp tuned compiled": (tuned, True)} if compiled else {})


def tune_ddp(
    case: Case, world: World, batch: Batch, num_bytes: int, pass_bytes: int, round_s: float, say: Say
) -> ddp.Setting:
    """DDP's quickest setting: bucket sizes first, then with and without views, and sent in half; rank 0 decides.

    In half only where we send half gradients, too.
    """

    def pick(settings: list[ddp.Setting], budget_s: float) -> ddp.Setting:
        openers: dict[str, Opener] = {
            str(setting): partial(open_ddp, case, world, batch, setting, compiled=False) for setting in settings
        }
        kept = choose_kept(list(openers), (), num_bytes, pass_bytes, world)
        min_rounds = MIN_TURNS if kept else 1
        say(f"DDP: {len(settings)} settings for {budget_s:.0f} s or more, {min_rounds} turns at least")
        times = take_turns(
            openers,
            world,
            rounds=MAX_TURNS,
            round_s=round_s / 2,
            kept=kept,
            budget_s=budget_s,
            min_rounds=min_rounds,
            say=say,
        )
        give_back_memory()
        working = [setting for setting in settings if str(setting) in times]
        if not working:
            raise LockstepError("DDP failed in every setting, as said above; ask for a smaller --batch or fewer ranks.")
        quickest = min(range(len(working)), key=lambda index: statistics.median(times[str(working[index])]))
        best = working[int(world.broadcast_value(quickest))]
        say(f"DDP: {best}, {statistics.median(times[str(best)]) * 1e3:.1f} ms")
        return best

    best = pick(ddp.list_settings(), 0.75 * TUNE_S)
    others = [best._replace(is_view=False), ddp.DEFAULT]
    others += [best._replace(is_half=True)] if case.precision == "fp16" and world.device.type == "cuda" else []
    return pick(list(dict.fromkeys([best, *others])), 0.25 * TUNE_S)


def take_turns(
    sides: Mapping[str, Opener],
    world: World,
    *,
    rounds: int,
    round_s: float,
    kept: Sequence[str],
    budget_s: float = float("inf"),
    min_rounds: int = 1,
    say: Say = lambda line: None,
    note: Callable[[Mapping[str, list[float]]], object] = lambda times: None,
) -> dict[str, list[float]]:
    """Seconds per step of each side that can, over rounds in which each runs for about `round_s`; `note` hears of each.

    Those that are not `kept` in memory are opened for each turn, and after every turn memory is given back.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        steps: dict[str, Step] = {}
        for name in kept:
            if step := _open_side(name, sides[name], stack, world, say):
                steps[name] = step
            else:
                del times[name]
            if len(kept) < len(sides):
                give_back_memory()
        start = time.perf_counter()
        for number in range(rounds):
            if number >= min_rounds and world.broadcast_value(time.perf_counter() - start > budget_s):
                break
            for name in list(times):
                if name in kept:
                    times[name].append(_take_turn(steps[name], name, counts, world, round_s))
                    if len(kept) < len(sides):
                        give_back_memory()
                elif (seconds := _open_and_take_turn(name, sides[name], counts, world, round_s, say)) is not None:
                    times[name].append(seconds)
                    say(f"{name}: {seconds * 1e3:,.0f} ms a step, round {number + 1} of {rounds}")
                else:
                    del times[name]
            note(times)
    return times


def _open_side(name: str, opener: Opener, stack: contextlib.ExitStack, world: World, say: Say) -> Step | None:
    """A side's step, which `stack` closes; None, with a sentence, where it fails on any rank."""
    begun = time.perf_counter()
    failure = ""
    with contextlib.ExitStack() as own:
        try:
            step = own.enter_context(opener())
        except LockstepError:
            raise
        except Exception as error:  # compilers and drivers raise nearly anything
            failure = first_line(error)
        if failures := [text for text in world.gather_values(failure) if text]:
            say(f"{name} was left out, because it failed on {len(failures)} of {world.size} ranks: {failures[0]}")
            return None
        stack.push(own.pop_all())
    if world.device.type == "cuda":
        for _ in range(FIRST_STEPS):
            step()
        torch.cuda.synchronize()
        say(f"{name} was ready after {time.perf_counter() - begun:.0f} s")
    return step


def _open_and_take_turn(
    name: str, opener: Opener, counts: dict[str, int], world: World, round_s: float, say: Say
) -> float | None:
    """Seconds per step of a side that is in memory for this turn alone; None where it fails."""
    with contextlib.ExitStack() as stack:
        step = _open_side(name, opener, stack, world, say)
        seconds = _take_turn(step, name, counts, world, round_s) if step else None
    del step
    give_back_memory()
    return seconds


def run_parent(
    *,
    nodes: int,
    ranks_per_node: int,
    against: Against = "ddp",
    device: Device = "auto",
    gbit_per_s: float | None = None,
    json_file: Path | None = None,
    html_file: Path | None = None,
    **wanted: Any,
) -> None:
    """Start the ranks on this machine and let them measure; `wanted` are further fields of `Wanted`."""
    if against == "bare":
        nodes, ranks_per_node = 1, 1
    elif nodes * ranks_per_node < 2:
        raise LockstepError("DDP needs at least 2 ranks; ask for more --ranks-per-node, or measure --against bare.")
    num_gpus = count_gpus()
    device = choose_device(device, nodes, num_gpus)
    asked = Wanted(
        device=device,
        shares_gpu=device == "cuda" and ranks_per_node > num_gpus,
        json_file=str(json_file) if json_file else None,
        html_file=str(html_file) if html_file else None,
        **wanted,
    )
    check_wanted(asked)
    check_files(json_file, html_file)
    if gbit_per_s is None or nodes == 1:
        cluster = VirtualCluster(nodes, ranks_per_node, pretend=True)
    else:
        cluster = VirtualCluster.open(nodes, ranks_per_node, gbit_per_s)
    with cluster:
        argv = [sys.executable, "-m", "lockstep.bench.step", json.dumps(asdict(asked))]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        cluster.wait(cluster.start(argv, hidden, one_per_node=True))


def count_gpus() -> int:
    """GPUs of this machine; ranks start as programs of their own, so asking does not spoil CUDA for them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(asked: Device, nodes: int, num_gpus: int) -> Device:
    """GPUs where there are some, unless the ranks are to stand on several nodes."""
    if asked == "cuda" and not num_gpus:
        raise LockstepError("--device cuda needs a GPU, and this machine shows none; leave it out.")
    if asked == "cuda" and nodes > 1:
        raise LockstepError("Ranks on GPUs are measured on one node; give --ranks instead of --nodes, or --device cpu.")
    return "cuda" if asked != "cpu" and num_gpus and nodes == 1 else "cpu"


def check_wanted(wanted: Wanted) -> None:
    """Say what cannot be measured before any rank starts."""
    if wanted.model and wanted.gradient_mb:
        raise LockstepError("--model and --gradient-mb both say what to train; give one of them.")
    if wanted.device == "cpu" and wanted.precision not in (None, "fp32"):
        raise LockstepError(f"--precision {wanted.precision} is measured on a GPU; CPU ranks train in fp32.")
    sized = wanted.batch or wanted.image_size
    if sized and (wanted.gradient_mb or not (wanted.model or wanted.device == "cuda")):
        raise LockstepError("--batch and --image-size go with a network; name it with --model.")
    for case in wanted.list_cases():
        if case.model != "stack":
            with torch.device("meta"):
                build_model(case.model, case.num_classes, image_size=case.image_size, **case.settings)


def run_rank(membership: Membership, wanted: Wanted) -> None:
    """Measure every case as one rank; rank 0 tells how far it is and writes the results, round by round."""
    values: list[dict[str, Any]] = []
    rounds, round_s = wanted.rounds, wanted.round_s
    backend = "nccl" if wanted.device == "cuda" else "auto"
    with join_world(membership, backend=backend, timeout_s=TIMEOUT_S) as world:

        def note(rows: list[Row]) -> None:
            if world.is_first and wanted.json_file is not None:
                write_rows(Path(wanted.json_file), [*values, *map(asdict, rows)])

        for case in wanted.list_cases():
            say: Say = partial(print, f"{case.name}:", flush=True) if world.is_first else lambda line: None
            measure = partial(measure_case, world=world, rounds=rounds, round_s=round_s, compiled=wanted.compiled)
            values += map(asdict, measure(case, say=say, note=note))
    if world.is_first:
        Console().print(*build_tables(values), sep="\n")
        if wanted.html_file is not None:
            write_chart(Path(wanted.html_file), values)


def _take_turn(step: Step, name: str, counts: dict[str, int], world: World, round_s: float) -> float:
    """Seconds per step of one turn; how many steps are a turn is settled in a side's first."""
    step()
    if name not in counts:
        step()  # DDP cuts its buckets anew after the first step
        seconds = _time_steps(step, 1, world)
        counts[name] = world.broadcast_value(max(1, int(round_s / seconds)))
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
        precision=case.precision,
        batch=case.batch,
        images_per_second=case.batch * ranks / statistics.median(times[name]),
    )


def _spread(values: list[float]) -> float:
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]


def _main(wanted: Wanted) -> None:
    if wanted.shares_gpu:
        os.environ |= describe_rank(os.environ["RANK"])  # before NCCL starts, which reads it once
    membership = read_membership(os.environ)
    assert membership is not None
    run_rank(membership, wanted)


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(_main, Wanted(**json.loads(sys.argv[1])))))
