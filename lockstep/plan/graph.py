"""One step as tasks with what each must wait for, over the resources of one device: Shi, Chu and Li's DAG. Torch-free.

`search.py` fills in what a step costs, `simulate.py` schedules the tasks. Every rank does the same, so one device
stands for all: messages take what they take on all links at once, and computing takes what it takes the slowest rank.

Ranks differ by chance. With a rank's computing time normal, of relative standard deviation σ and drawn anew at each
step, all wait for the slowest of N, which is expected at 1 + σ · z(N), z the expected largest of N standard normal
numbers (Blom's Φ⁻¹((N − 0.375) / (N + 0.25))). A rank that is always slow is no chance, and not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from lockstep.plan.collectives import Phase

# What works one task at a time.
READER, DECODER, COPY, HOST, COMPUTE, INTRA, NIC = "reader", "decoder", "copy", "host", "compute", "intra", "nic"


@dataclass(frozen=True)
class Task:
    """So many seconds of one resource; `after` are the numbers of the tasks that must be done."""

    name: str
    resource: str
    step: int
    seconds: float
    after: tuple[int, ...]


@dataclass(frozen=True)
class StepCosts:
    """What one step costs one device, and in which order it may be done."""

    forward_s: float
    backward_s: float
    update_s: float
    # Of each buffer, in the order they are sent: when it is full, in seconds after the backward pass began, and the
    # phases of its all-reduce.
    ready_s: tuple[float, ...] = ()
    messages: tuple[tuple[Phase, ...], ...] = ()
    overlap: bool = True  # sent while backward still runs, or after it
    passes: int = 1  # forward and backward; buffers are filled in the last
    gather: tuple[Phase, ...] = ()  # weights, after an update of which each device did a part
    launch_s: float = 0.0  # of the host, for all of the step
    read_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    prefetch: int = 2  # batches ahead of the step; 0: none is begun before the step before it is done
    slowdown: float = 0.0  # of computing, by waiting for the slowest rank

    @property
    def compute_s(self) -> float:
        """Seconds of computing, alone."""
        return self.passes * (self.forward_s + self.backward_s) + self.update_s

    @property
    def comm_s(self) -> float:
        """Seconds of all messages, hidden or not."""
        return sum(phase.seconds for phases in (*self.messages, self.gather) for phase in phases)


def expect_slowest(num_ranks: int, jitter: float) -> float:
    """By how much the slowest of so many ranks is expected to take longer than the mean, as a share."""
    if num_ranks < 2:
        return 0.0
    return jitter * NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def plan_tasks(costs: StepCosts, num_steps: int) -> list[Task]:
    """The tasks of some steps in a row, in the order in which a free resource prefers them."""
    tasks: list[Task] = []
    taken: list[int] = []  # the tasks that take a batch, and leave room for another
    done: list[int] = []  # its last task
    for step in range(num_steps):
        first, last = _add_step(tasks, costs, step, taken, done)
        taken.append(first)
        done.append(last)
    return tasks


def _add_step(
    tasks: list[Task], costs: StepCosts, step: int, taken: Sequence[int], done: Sequence[int]
) -> tuple[int, int]:
    def add(name: str, resource: str, seconds: float, *after: int) -> int:
        tasks.append(Task(name, resource, step, seconds, after))
        return len(tasks) - 1

    before = done[-1:]
    # A batch is begun when there is room for it: as soon as one of those ahead is taken.
    room = done[-1:] if costs.prefetch == 0 else taken[-costs.prefetch :][:1] if step >= costs.prefetch else []
    batch = [*room]
    for name, resource, seconds in (
        ("read", READER, costs.read_s),
        ("decode", DECODER, costs.decode_s),
        ("copy", COPY, costs.copy_s),
    ):
        if seconds > 0:
            batch = [add(name, resource, seconds, *batch)]
    launch = [add("launch", HOST, costs.launch_s)] if costs.launch_s > 0 else []

    factor = 1 + costs.slowdown
    first = add("take", COMPUTE, 0.0, *before, *batch)
    computed = first
    if early := costs.passes - 1:  # nothing waits for any of them: as one
        computed = add("forward", COMPUTE, factor * early * costs.forward_s, computed)
        computed = add("backward", COMPUTE, factor * early * costs.backward_s, computed)
    computed = add("forward", COMPUTE, factor * costs.forward_s, computed)
    # The last backward pass, cut where a buffer is full.
    full: list[int] = []
    at = 0.0
    for ready_s in costs.ready_s:
        if ready_s > at:
            computed = add("backward", COMPUTE, factor * (ready_s - at), computed)
            at = ready_s
        full.append(computed)
    if costs.backward_s > at:
        computed = add("backward", COMPUTE, factor * (costs.backward_s - at), computed)
    sent: list[int] = []
    for number, phases in enumerate(costs.messages):
        start = [full[number] if costs.overlap else computed, *sent]
        for phase in phases:
            start = [add(f"buffer {number + 1}", NIC if phase.level == "inter" else INTRA, phase.seconds, *start)]
        sent = start[-1:]
    # The update is what the host launches last.
    last = add("update", COMPUTE, costs.update_s, computed, *sent, *launch)
    for phase in costs.gather:
        last = add("weights", NIC if phase.level == "inter" else INTRA, phase.seconds, last)
    return first, last
