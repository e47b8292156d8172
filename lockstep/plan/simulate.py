"""Tasks over resources -> when each runs, by list scheduling, until steps repeat (after `graph.py`). Torch-free.

A resource does one task at a time. When it is free it takes, of the tasks whose predecessors are done, the one that
stands first; nothing is interrupted. Steps are simulated until two in a row take the same time.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.plan.graph import COMPUTE, INTRA, NIC, StepCosts, Task, plan_tasks

FEWEST_STEPS, MOST_STEPS = 6, 96
SAME = 1e-9  # two steps are alike, as a share of their length


@dataclass(frozen=True)
class Scheduled:
    """A task and when it ran."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepParts:
    """What a step is made of, without gaps or overlaps: its parts add up to it."""

    input_s: float = 0.0  # waiting for a batch
    forward_s: float = 0.0
    backward_s: float = 0.0
    slowest_s: float = 0.0  # waiting for the slowest rank
    communicate_s: float = 0.0  # messages that nothing hides
    launch_s: float = 0.0  # waiting for the host
    update_s: float = 0.0

    @property
    def step_s(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class Simulation:
    """Steps until they repeat: their tasks, and the last of them in parts."""

    scheduled: tuple[Scheduled, ...]
    parts: StepParts
    num_steps: int

    @property
    def step_s(self) -> float:
        return self.parts.step_s


def schedule(tasks: Sequence[Task]) -> list[Scheduled]:
    """When each task runs."""
    waits_for = [len(set(task.after)) for task in tasks]
    frees: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in set(task.after):
            frees[before].append(number)
    ready: dict[str, list[int]] = defaultdict(list)
    for number, count in enumerate(waits_for):
        if not count:
            heapq.heappush(ready[tasks[number].resource], number)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    busy: set[str] = set()
    running: list[tuple[float, int]] = []
    now = 0.0
    changed = set(ready)
    while True:
        for resource in sorted(changed):
            if resource not in busy and ready[resource]:
                number = heapq.heappop(ready[resource])
                starts[number], ends[number] = now, now + tasks[number].seconds
                busy.add(resource)
                heapq.heappush(running, (ends[number], number))
        if not running:
            break
        now, _ = running[0]
        changed = set()
        while running and running[0][0] == now:
            _, number = heapq.heappop(running)
            busy.discard(tasks[number].resource)
            changed.add(tasks[number].resource)
            for after in frees[number]:
                waits_for[after] -= 1
                if not waits_for[after]:
                    heapq.heappush(ready[tasks[after].resource], after)
                    changed.add(tasks[after].resource)
    return [Scheduled(task, start, end) for task, start, end in zip(tasks, starts, ends, strict=True)]


def simulate(costs: StepCosts) -> Simulation:
    """Steps in a row until they take the same time."""
    num_steps = FEWEST_STEPS
    while True:
        scheduled = schedule(plan_tasks(costs, num_steps))
        ends = list_ends(scheduled, num_steps)
        last, one_before = ends[-1] - ends[-2], ends[-2] - ends[-3]
        if abs(last - one_before) <= SAME * max(last, one_before) or num_steps >= MOST_STEPS:
            return Simulation(tuple(scheduled), _cut(scheduled, costs, num_steps - 1, ends[-2]), num_steps)
        num_steps *= 2


def list_ends(scheduled: Sequence[Scheduled], num_steps: int) -> list[float]:
    """When each step is done."""
    ends = [0.0] * num_steps
    for span in scheduled:
        # A batch read ahead for a later step is no part of this one's end.
        if span.task.resource in (COMPUTE, INTRA, NIC):
            ends[span.task.step] = max(ends[span.task.step], span.end_s)
    return ends


def _cut(scheduled: Sequence[Scheduled], costs: StepCosts, step: int, begun: float) -> StepParts:
    """The parts of one step that began when the one before it ended."""
    own = [span for span in scheduled if span.task.step == step]
    computing = [span for span in own if span.task.resource == COMPUTE]
    passes, update = computing[:-1], computing[-1]
    messages = [span.end_s for span in own if span.task.name.startswith("buffer ")]
    computed = passes[-1].end_s
    summed = max([computed, *messages])
    done = max(span.end_s for span in own if span.task.resource in (COMPUTE, INTRA, NIC))
    factor = 1 + costs.slowdown
    times = {
        name: sum(span.task.seconds for span in passes if span.task.name == name) for name in ("forward", "backward")
    }
    slowest_s = computed - passes[0].start_s - sum(times.values()) / factor
    return StepParts(
        input_s=passes[0].start_s - begun,
        forward_s=times["forward"] / factor,
        backward_s=times["backward"] / factor,
        slowest_s=max(0.0, slowest_s),  # the sum of many pieces may be off in the last digit
        communicate_s=summed - computed + done - update.end_s,
        launch_s=update.start_s - summed,
        update_s=update.end_s - update.start_s,
    )
