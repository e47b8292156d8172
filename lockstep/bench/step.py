"""A whole training step beside PyTorch's own: DistributedDataParallel on several ranks, a bare loop on one.

Both sides hold the same network, batch and update rule, are tuned over the same buffer sizes, and take turns in one
process, so that the machine's noise falls on both; what counts is the median of the ratios.
"""

import itertools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.bench.virtual import VirtualCluster, fork_ranks
from lockstep.comm.world import Membership, World, join_world, read_membership
from lockstep.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts, assemble
from lockstep.engine.step import train_step
from lockstep.engine.tune import describe_plan, tune_parts
from lockstep.errors import LockstepError
from lockstep.models import build_model
from lockstep.models.initialize import initialize
from lockstep.optim.schedule import Schedule

Step = Callable[[], None]
BUFFER_MB = (1.0, 4.0, 25.0, 100.0)
TIMEOUT_S = 300.0
LR, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.9, 1e-4


@dataclass(frozen=True)
class Case:
    """What is trained: a ResNet-18 or a stack of linear layers, of some width, on `batch` images on each rank."""

    name: str
    width: int
    image_size: int
    batch: int
    is_stack: bool = False


CASES = (
    Case("quickstart's network, 0.7 M parameters", width=16, image_size=48, batch=64),
    Case("ResNet-18, 11.2 M parameters", width=64, image_size=64, batch=16),
)
# A stack of this many linear layers, twice as many tensors: communication with hardly anything to compute.
STACK_LAYERS = 31


def size_case(gradient_mb: float) -> Case:
    """A stack of linear layers with about this many megabytes of gradients."""
    width = max(1, round((gradient_mb * 1e6 / 4 / STACK_LAYERS) ** 0.5))
    name = f"{gradient_mb:g} MB of gradients in {2 * STACK_LAYERS} tensors"
    return Case(name, width=width, image_size=8, batch=2, is_stack=True)


def _build_stack(width: int, image_size: int) -> nn.Module:
    sizes = [3 * image_size**2, *[width] * (STACK_LAYERS - 1), 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Row:
    """One peer beside Lockstep; `ratio` above 1 means Lockstep's step is the faster."""

    case: str
    ranks: int
    peer: str
    peer_setting: str
    peer_s: float
    lockstep_setting: str
    lockstep_s: float
    ratio: float
    spread: float
    rounds: int


def measure_case(case: Case, world: World, *, rounds: int, round_s: float) -> Row:
    """Tune both sides, then let them take turns."""
    batch = _fake_batch(case, world)
    peers = _build_ddp_steps(case, world, batch) if world.size > 1 else _build_bare_steps(case, world, batch)
    ours = _build_lockstep_steps(case, world, batch)
    peer_setting, peer = _pick_fastest(peers, world, round_s)
    our_setting, own = _pick_fastest(ours, world, round_s)
    peer_times, our_times = _take_turns([peer, own], world, rounds, round_s)
    ratios = [theirs / mine for theirs, mine in zip(peer_times, our_times, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return Row(
        case=case.name,
        ranks=world.size,
        peer="DDP" if world.size > 1 else "bare loop",
        peer_setting=peer_setting,
        peer_s=statistics.median(peer_times),
        lockstep_setting=our_setting,
        lockstep_s=statistics.median(our_times),
        ratio=statistics.median(ratios),
        spread=quartiles[2] - quartiles[0],
        rounds=rounds,
    )


def run_parent(
    *,
    nodes: int,
    ranks_per_node: int,
    gradient_mb: float | None = None,
    gbit_per_s: float | None = None,
    rounds: int,
    round_s: float,
    json_file: Path | None = None,
) -> None:
    """Start the ranks on this machine and let them measure; without a size, one rank beside a bare loop comes first."""
    if json_file is not None:
        try:  # before minutes of measuring
            json_file.write_text("[]\n")
        except OSError as error:
            raise LockstepError(f"{json_file} cannot be written ({error.strerror}); choose another --json.") from error
    options = {
        "gradient_mb": gradient_mb,
        "rounds": rounds,
        "round_s": round_s,
        "json_file": str(json_file) if json_file else None,
    }
    argv = [sys.executable, "-m", "lockstep.bench.step", json.dumps(options)]
    for count_nodes, count_ranks in [(nodes, ranks_per_node)] if gradient_mb else [(1, 1), (nodes, ranks_per_node)]:
        if gbit_per_s is None or count_nodes == 1:
            cluster = VirtualCluster(count_nodes, count_ranks, pretend=True)
        else:
            cluster = VirtualCluster.open(count_nodes, count_ranks, gbit_per_s)
        with cluster:
            cluster.wait(cluster.start(argv, one_per_node=True))


def run_rank(
    membership: Membership, *, gradient_mb: float | None, rounds: int, round_s: float, json_file: str | None
) -> None:
    """Measure every case as one rank; rank 0 prints a line for each and appends it to `json_file`."""
    with join_world(membership, timeout_s=TIMEOUT_S) as world:
        for case in [size_case(gradient_mb)] if gradient_mb else CASES:
            row = measure_case(case, world, rounds=rounds, round_s=round_s)
            if world.is_first:
                print(describe_row(row), flush=True)
                if json_file is not None:
                    append_row(Path(json_file), row)


def describe_row(row: Row) -> str:
    """One line for a person."""
    return (
        f"{row.case}, {row.ranks} rank{'s' if row.ranks > 1 else ''}: {row.peer} {row.peer_s * 1e3:.1f} ms "
        f"({row.peer_setting}), lockstep {row.lockstep_s * 1e3:.1f} ms ({row.lockstep_setting}); "
        f"ratio {row.ratio:.3f} (median of {row.rounds}, quartiles {row.spread:.3f} apart)"
    )


def append_row(file: Path, row: Row) -> None:
    """Add a row to a JSON list in `file`."""
    rows = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*rows, asdict(row)], indent=2) + "\n")


def _fake_batch(case: Case, world: World) -> Batch:
    generator = torch.Generator().manual_seed(world.rank)
    images = torch.randn(case.batch, 3, case.image_size, case.image_size, generator=generator)
    return Batch(
        images=images.to(world.device, memory_format=torch.channels_last),
        labels=torch.randint(0, 10, (case.batch,), generator=generator).to(world.device),
        global_size=case.batch * world.size,
        epoch=0,
        samples=np.arange(case.batch),
        cursor=Cursor(0, 0),
    )


def _build_network(case: Case, world: World) -> nn.Module:
    if case.is_stack:
        torch.manual_seed(0)
        return _build_stack(case.width, case.image_size).to(world.device)
    model = build_model("resnet18", 10, width=case.width, image_size=case.image_size)
    initialize(model, 0)
    return model.to(world.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _torch_step(model: nn.Module, batch: Batch) -> Step:
    """The loop everyone writes, with PyTorch's quickest SGD."""
    decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}],
        lr=LR,
        momentum=MOMENTUM,
        fused=True,
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(batch.images), batch.labels)
        loss.backward()
        optimizer.step()

    return step


def _build_bare_steps(case: Case, world: World, batch: Batch) -> dict[str, Step]:
    return {"fused SGD": _torch_step(_build_network(case, world), batch)}


def _build_ddp_steps(case: Case, world: World, batch: Batch) -> dict[str, Step]:
    steps: dict[str, Step] = {}
    for size in BUFFER_MB:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # newer releases rename the argument, older lack the new name
            model = DistributedDataParallel(
                _build_network(case, world),
                bucket_cap_mb=size,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # as ours: statistics are averaged before evaluation, not at every step
            )
        steps[f"bucket {size:g} MiB"] = _torch_step(model, batch)
    return steps


def _build_lockstep_steps(case: Case, world: World, batch: Batch) -> dict[str, Step]:
    """Our step under the plan the tuner chooses, as a run would."""
    config = RunConfig(
        data=DataConfig(image_size=case.image_size),
        optim=OptimConfig(name="sgd", lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        train=TrainConfig(global_batch=batch.global_size, duration="1ep"),  # type: ignore[arg-type]
    )
    parts = assemble(config, world, _build_network(case, world), Schedule("constant", LR, total_steps=1))
    tuning = tune_parts(config, parts, world, [], again=True)
    return {describe_plan(tuning.plan) if tuning else "one rank": _lockstep_step(parts, batch)}


def _lockstep_step(parts: Parts, batch: Batch) -> Step:
    def step() -> None:
        train_step(parts, batch, LR)

    return step


def _pick_fastest(candidates: dict[str, Step], world: World, round_s: float) -> tuple[str, Step]:
    """The candidate with the best median over three turns; rank 0 decides for all."""
    times = _take_turns(list(candidates.values()), world, rounds=3, round_s=round_s / 2)
    medians = [statistics.median(values) for values in times]
    best: int = world.broadcast_object(medians.index(min(medians)))
    return list(candidates.items())[best]


def _take_turns(steps: Sequence[Step], world: World, rounds: int, round_s: float) -> list[list[float]]:
    """Seconds per step of each, over rounds in which each runs for about `round_s`."""
    counts = [world.broadcast_object(max(1, int(round_s / _time_steps(step, 2, world)))) for step in steps]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, count, values in zip(steps, counts, times, strict=True):
            step()
            values.append(_time_steps(step, count, world))
    return times


def _time_steps(step: Step, count: int, world: World) -> float:
    """Seconds per step, from all ranks ready to all ranks done."""
    if world.size > 1:
        dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.size > 1:
        dist.barrier()
    return (time.perf_counter() - start) / count


def _main(options: dict[str, Any]) -> None:
    membership = read_membership(os.environ)
    assert membership is not None
    run_rank(membership, **options)


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(_main, json.loads(sys.argv[1]))))
