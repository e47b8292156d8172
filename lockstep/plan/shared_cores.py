"""Ranks that are processes on shared cores: what becomes of a step's costs there (between profile and `graph.py`).

N ranks of one thread on C cores compute N / C times as long as one whose neighbours are at work, for N above C, and
somewhat longer: who takes turns on a core finds its caches full of others' numbers. All wait for the slowest, whom the
scheduler served last. Both are known from one rank that was watched among others (`Crowd`). All-reduces work on the
same cores: one that is measured on all ranks, with nothing else going on, has what it takes of them in it already.
Under the backward pass it is another matter. While both run, a message has at most half of the cores, as a scheduler
gives to each of two that want all of them, and the backward pass has what is left. What a message waits for its link
costs nobody anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.plan.collectives import Phase
from lockstep.plan.device import BatchTime
from lockstep.plan.graph import StepCosts, expect_slowest

FAIR = 0.5  # of the cores, for a message among ranks that would compute on all of them


@dataclass(frozen=True)
class Sum:
    """One buffer's all-reduce: when the buffer is full after the backward pass began, seconds alone, share of cores."""

    ready_s: float
    seconds: float
    core_share: float


@dataclass(frozen=True)
class Crowd:
    """What becomes of a rank's computing among others."""

    loss: float = 0.0  # by taking turns on a core, beyond the turns: a share of its time
    jitter: float = 0.0  # from step to step, where every core has one at work: a share of its time
    turn_jitter: float = 0.0  # the same where they take turns


@dataclass(frozen=True)
class Cores:
    """So many ranks on so many cores."""

    num_ranks: int
    num_cores: int
    crowd: Crowd = Crowd()

    @property
    def stretch(self) -> float:
        """How much longer computing takes than alone on a core, up to the end of the slowest rank."""
        turns, crowd = max(1.0, self.num_ranks / self.num_cores), self.crowd
        jitter = crowd.turn_jitter if turns > 1 else crowd.jitter
        return turns * (1.0 + (crowd.loss if turns > 1 else 0.0)) * (1.0 + expect_slowest(self.num_ranks, jitter))

    @property
    def idle_share(self) -> float:
        """Of the cores, while all ranks compute."""
        return max(0.0, 1.0 - self.num_ranks / self.num_cores)


def share_cores(row: BatchTime | StepCosts, sums: Sequence[Sum], cores: Cores, *, overlap: bool) -> StepCosts:
    """A step of every rank, from that of one rank alone on one core; `ready_s` of the sums is that rank's, too."""
    stretch = cores.stretch
    sums = [replace(each, ready_s=each.ready_s * stretch) for each in sums]
    costs = StepCosts(
        forward_s=row.forward_s * stretch,
        backward_s=row.backward_s * stretch,
        update_s=row.update_s * stretch,
        ready_s=tuple(each.ready_s for each in sums),
        messages=tuple((Phase("inter", each.seconds),) for each in sums),
        overlap=overlap,
    )
    return _share_backward(costs, sums, cores) if overlap else costs


def _share_backward(costs: StepCosts, sums: Sequence[Sum], cores: Cores) -> StepCosts:
    """The backward pass and the sums under it, each as long as it takes beside the other."""
    now = progress = 0.0  # of the backward pass, in seconds that it would take alone
    full_s: list[float] = []  # when each buffer is
    lasting_s: list[float] = []
    end_s: float | None = None  # of the backward pass
    seconds = costs.backward_s
    for each in sums:
        ready = min(each.ready_s, seconds)
        if progress < ready:  # nothing is sent meanwhile
            now, progress = now + ready - progress, ready
        begun, left = now, each.seconds
        full_s.append(now)
        if progress < seconds and left > 0:
            speed = min(1.0, max(FAIR, cores.idle_share) / each.core_share) if each.core_share > 0 else 1.0
            taken = max(0.0, speed * each.core_share - cores.idle_share) / (1.0 - cores.idle_share)
            beside = min(left / speed, (seconds - progress) / (1.0 - taken))  # it never takes all
            now, progress, left = now + beside, progress + beside * (1.0 - taken), left - beside * speed
        if progress >= seconds * (1 - 1e-12) and end_s is None:
            end_s = now
        now += max(0.0, left)
        lasting_s.append(now - begun)
    backward_s = end_s if end_s is not None else now + seconds - progress
    return replace(
        costs,
        backward_s=backward_s,
        # A buffer that fills while another is sent waits for its turn; only the turn matters.
        ready_s=tuple(min(full, backward_s) for full in full_s),
        messages=tuple((Phase("inter", each),) for each in lasting_s),
    )
