"""What the ranks of a virtual cluster measure for `forecast.py`: single all-reduces, then whole steps in turns.

Messages are timed on all ranks with nothing else going on, and with them the CPU seconds that all ranks together spend:
they decide how much a message and the computing beside it hold each other up. Steps take turns setting by setting, so
that the machine's noise falls on all.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, TypeVar

import torch

from lockstep.bench.virtual import fork_ranks
from lockstep.comm.cost import Choice
from lockstep.comm.fusion import ReductionPlan, plan_buffers
from lockstep.comm.world import World, count_cores, join_world, read_membership
from lockstep.config import CommConfig, DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.engine.apply import apply_reduction, build_launched
from lockstep.engine.build import Parts, assemble, build_network, set_number_formats
from lockstep.engine.measure import fake_batch
from lockstep.layout import Layout
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import list_sizes

CLASSES = 100
MESSAGE_S = 0.2  # of one turn of a message: the machine counts its work in hundredths
STEPS = 3  # of one turn
QUIET = 0.08  # of the cores: less is the kernel's own, which carries the messages

Side = TypeVar("Side", bound=Hashable)


class Turn(NamedTuple):
    """Seconds of one piece of work, CPU seconds of all ranks for it, and the share of the cores that others had."""

    seconds: float
    cpu_s: float
    others: float


class Taking(NamedTuple):
    """How turns are taken: on which ranks, how many, and for how long those that others disturbed are taken again."""

    world: World
    rounds: int
    patience_s: float


@dataclass(frozen=True)
class Case:
    """What is trained: the same on every rank."""

    model: str = "resnet18"
    width: int = 32
    image_size: int = 64
    batch: int = 8

    def build_config(self, num_ranks: int) -> RunConfig:
        """A run of it on so many ranks."""
        return RunConfig(
            data=DataConfig(image_size=self.image_size),
            model=ModelConfig(name=self.model, width=self.width),
            optim=OptimConfig(name="lars", lr=0.1),
            comm=CommConfig(tune_s=0.0),
            precision=PrecisionConfig(compute="fp32"),
            train=TrainConfig(global_batch=self.batch * num_ranks, duration="1ep", max_batch_per_rank=self.batch),  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Setting:
    """How gradients travel: buffers of at most so many MB, by one all-reduce, under the backward pass or after it."""

    buffer_mb: float
    choice: str
    overlap: bool

    def plan(self, layout: Layout) -> ReductionPlan:
        """As the reducer follows it."""
        buffers = plan_buffers(layout, self.buffer_mb * 2**20)
        return ReductionPlan(buffers, (Choice.parse(self.choice),) * len(buffers), self.overlap)

    def __str__(self) -> str:
        return f"{self.buffer_mb:g} MB, {self.choice}, {'under' if self.overlap else 'after'}"


@dataclass(frozen=True)
class Message:
    """One all-reduce, alone: seconds, and CPU seconds of all ranks together."""

    choice: str
    num_bytes: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class StepMeasured:
    """A setting's step: the median over its turns and the distance of the quartiles."""

    setting: Setting
    step_s: float
    spread_s: float
    others: float  # what other programs had of the cores meanwhile, as a share


def measure_ranks(
    world: World, case: Case, settings: Sequence[Setting], rounds: int, patience_s: float
) -> tuple[list[Message], list[StepMeasured]]:
    """Messages, then steps; every rank calls it and gets the same."""
    taking = Taking(world, rounds, patience_s)
    torch.set_num_threads(1)  # of N ranks on a few cores each has one
    config = case.build_config(world.size)
    set_number_formats(config.precision)
    parts = assemble(config, world, build_network(config, CLASSES), Schedule("constant", 0.1, total_steps=1))
    try:
        choices = [Choice.parse(name) for name in dict.fromkeys(setting.choice for setting in settings)]
        messages = _measure_messages(world, parts, choices, taking)
        return messages, _measure_steps(world, case, parts, settings, taking)
    finally:
        assert parts.hybrid is not None
        parts.hybrid.close()


def _measure_messages(world: World, parts: Parts, choices: Sequence[Choice], taking: Taking) -> list[Message]:
    hybrid = parts.hybrid
    assert hybrid is not None
    hybrid.prepare(choices)
    array = parts.reducer.flat[1]
    array.zero_()
    pairs = [(size, choice) for size in list_sizes(4 * array.numel()) for choice in choices]
    counts: dict[tuple[int, Choice], int] = {}

    def take(pair: tuple[int, Choice]) -> Turn:
        size, choice = pair
        if pair not in counts:  # the first opens connections, the second says how many make a turn
            hybrid.run(array[: size // 4], choice)
            turn = time_turn(world, lambda: hybrid.run(array[: size // 4], choice), 1)
            counts[pair] = int(world.broadcast_value(max(1, min(200, int(MESSAGE_S / turn.seconds)))))
        return time_turn(world, lambda: hybrid.run(array[: size // 4], choice), counts[pair])

    return [
        Message(str(choice), size, median(turn.seconds for turn in turns), median(turn.cpu_s for turn in turns))
        for (size, choice), turns in take_turns(taking, pairs, take).items()
    ]


def _measure_steps(
    world: World, case: Case, parts: Parts, settings: Sequence[Setting], taking: Taking
) -> list[StepMeasured]:
    batch = fake_batch(case.build_config(world.size), world)
    step = build_launched(parts, len(batch.labels))

    def take(setting: Setting) -> Turn:
        apply_reduction(setting.plan(parts.layout), parts)
        step(batch, 0.0, False)
        return time_turn(world, lambda: step(batch, 0.0, False), STEPS)

    found = []
    for setting, turns in take_turns(taking, settings, take).items():
        seconds = [turn.seconds for turn in turns]
        others = median(turn.others for turn in turns)
        found.append(StepMeasured(setting, median(seconds), _spread(seconds), others))
    return found


def build_lone_step(case: Case, world: World) -> Callable[[], object]:
    """A step of one rank by itself, who computes and updates and sends nothing."""
    config = case.build_config(1)
    set_number_formats(config.precision)
    parts = assemble(config, world, build_network(config, CLASSES), Schedule("constant", 0.1, total_steps=1))
    batch = fake_batch(config, world)
    step = build_launched(parts, len(batch.labels))
    return lambda: step(batch, 0.0, False)


def take_turns(taking: Taking, sides: Sequence[Side], take: Callable[[Side], Turn]) -> dict[Side, list[Turn]]:
    """So many turns of each side, one after the other; those that others disturbed are taken again, for a while.

    Where quiet turns do not come, the quietest count.
    """
    world, rounds, patience_s = taking
    turns: dict[Side, list[Turn]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            turns[side].append(take(side))
    end = time.perf_counter() + patience_s
    restless = _find_restless(turns, rounds)
    while restless and world.broadcast_value(time.perf_counter() < end):
        for side in restless:
            turns[side].append(take(side))
        restless = _find_restless(turns, rounds)
    return {side: sorted(own, key=lambda turn: turn.others)[:rounds] for side, own in turns.items()}


def _find_restless(turns: dict[Side, list[Turn]], rounds: int) -> list[Side]:
    """Who has not had so many quiet turns; all ranks have heard the same of every turn."""
    return [side for side, own in turns.items() if sum(turn.others <= QUIET for turn in own) < rounds]


def time_turn(world: World, work: Callable[[], object], count: int) -> Turn:
    """One `work` of several."""
    world.barrier()
    start, cpu_start, busy_start = time.perf_counter(), time.process_time(), read_busy()
    for _ in range(count):
        work()
    took = time.perf_counter() - start
    cpu_s = world.sum(torch.tensor([time.process_time() - cpu_start], dtype=torch.float64)).item()
    busy_s, passed = read_busy() - busy_start, time.perf_counter() - start
    seconds = world.maximum(torch.tensor([took], dtype=torch.float64)).item()
    others = max(0.0, busy_s - cpu_s) / (passed * count_cores())
    return Turn(seconds / count, cpu_s / count, float(world.broadcast_value(others)))


def read_busy() -> float:
    """Seconds that all cores of this machine together have worked since it started, for whomever."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    user, nice, system, _idle, _waiting, *interrupts = fields
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _spread(values: Sequence[float]) -> float:
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (0.0, 0.0, 0.0)
    return high - low


def _main(options: dict[str, Any]) -> None:
    membership = read_membership(os.environ)
    case, settings = Case(**options["case"]), [Setting(**each) for each in options["settings"]]
    with join_world(membership, backend="gloo") as world:
        messages, steps = measure_ranks(world, case, settings, options["rounds"], options["patience_s"])
    if world.is_first:
        table = {"messages": [asdict(each) for each in messages], "steps": [asdict(each) for each in steps]}
        Path(options["file"]).write_text(json.dumps(table))


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(_main, json.loads(sys.argv[1]))))
