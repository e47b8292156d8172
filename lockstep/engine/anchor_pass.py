"""An anchor's pass over the data: the full gradient at the weights as they are, for svrg and halp (before step 1).

It is a pass of ordinary steps whose rule only adds up (`optim/full_gradient.py`), over the running epoch's samples in
the epoch's own order, batches and crops. Those are functions of seed, epoch and sample, so with an anchor at every
epoch's beginning the sum is that of the very functions that the steps of the epoch take one by one, batch norm
included. An inner loop that reaches into another epoch meets other crops there: noise that SVRG does not know of.

The pass is no part of the epoch: the run's ledger and cursor stay, and it has a ledger of its own, which its record
holds. A run that is asked to stop leaves it without a trace, and takes it again when it goes on.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Ledger, expected_ledger, share
from lockstep.data.pipeline import Batch
from lockstep.engine.anchored import find_anchored, refuse_chance, refuse_drawing
from lockstep.engine.apply import Step, build_launched
from lockstep.engine.build import Parts, count_steps
from lockstep.engine.giving_up import keep_statistics, put_statistics
from lockstep.engine.measure import fake_batch
from lockstep.engine.recorded import RecordedStep, as_written
from lockstep.engine.state import sum_ledger
from lockstep.engine.step import LOSS, STOP
from lockstep.engine.timing import Clock
from lockstep.errors import SharedError
from lockstep.events import MOST_AT_END, MOST_AT_ZERO, AnchorTaken
from lockstep.optim.full_gradient import FullGradient
from lockstep.optim.halp import Halp

LOOK_EVERY = 10  # batches after which a GPU is asked whether any rank is to stop: the host waits for the answer
FEWEST = 2  # samples that batch norm can take statistics of


class Anchors:
    """Takes a run's anchors; every rank has one of these, and all decide alike."""

    def __init__(
        self,
        parts: Parts,
        world: World,
        num_samples: int,
        every: int,
        take: Callable[[Parts], Step],
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """An anchor is due every so many steps; `take` makes the step that passes are taken by."""
        refuse_chance(parts.model)
        self._parts, self._world = parts, world
        self._num_samples, self._every = num_samples, every
        self._sum = FullGradient(parts.layout, world.device)
        # Its time is no step's, so it has a clock of its own; and no weight moves, so that no average follows.
        self._clock = Clock(world.device)
        self._take = take(replace(parts, rule=self._sum, clock=self._clock, average=None))
        self._warn = warn
        self._said: set[str] = set()

    def is_due(self, step: int) -> bool:
        """Whether an anchor comes before the step of this number."""
        return step % self._every == 0

    def take(self, batches: Iterable[Batch], step: int, epoch: int, asked: Callable[[], bool]) -> AnchorTaken | None:
        """Pass over an epoch's batches and move the anchor; None, and nothing is moved, if any rank was asked to stop.

        Every rank must call it.
        """
        begun = time.perf_counter()
        parts, ledger = self._parts, Ledger()
        loss = torch.zeros((), dtype=torch.float64, device=self._world.device)
        self._sum.total.zero_()
        kept = keep_statistics(parts)
        is_stopped = False
        for number, batch in enumerate(batches):
            side = self._take(batch, float(batch.global_size), asked())
            loss += side[LOSS].double() * batch.global_size
            ledger.add(batch.epoch, batch.samples)
            is_stopped = (not side.is_cuda or number % LOOK_EVERY == 0) and float(side[STOP]) > 0
            if is_stopped:
                break
        put_statistics(parts, kept)
        self._clock.take()  # or its marks would gather over the run
        parts.reducer.count_from(step)  # a lost rank is named with the run's own steps
        if is_stopped:
            return None
        seen = self._certify(ledger, epoch)
        rule = find_anchored(parts)
        reach = rule.measure_reach() if isinstance(rule, Halp) and step else None  # of offsets that begin anew here
        rule.recentre(parts.weights, self._sum.total / self._num_samples)
        norm = rule.full_gradient.double().norm().item()
        if not math.isfinite(norm):
            raise SharedError(
                f"The full gradient at step {step} is not finite; lower optim.lr or lengthen optim.warmup."
            )
        shares = None if reach is None else reach.tolist()
        if shares:
            self._judge_reach(*shares)
        return AnchorTaken(
            step=step,
            samples=seen.count,
            seconds=time.perf_counter() - begun,
            loss=loss.item() / self._num_samples,
            gradient_norm=norm,
            scale=rule.scale.item() if isinstance(rule, Halp) else None,
            ledger=f"{seen.value:016x}",
            share_at_end=shares[0] if shares else None,
            share_at_zero=shares[1] if shares else None,
        )

    def _judge_reach(self, at_end: float, at_zero: float) -> None:
        """Say, once of each, that the grid of the offsets is too narrow or too coarse."""
        if at_end > MOST_AT_END:
            share, what = at_end, "reached the end of their grid; lower optim.mu"
        elif at_zero > MOST_AT_ZERO:
            share, what = at_zero, "are still at zero, as their grid is coarse; raise optim.mu"
        else:
            return
        if what not in self._said and self._world.is_first:
            self._said.add(what)
            rule = find_anchored(self._parts)
            assert isinstance(rule, Halp)
            self._warn(f"{100 * share:.3g} % of the offsets {what} (now {rule.mu:g}).")

    def _certify(self, ledger: Ledger, epoch: int) -> Ledger:
        """What all ranks have seen, which must be every sample exactly once."""
        total = sum_ledger(ledger, self._world)
        if total != (expected := expected_ledger(self._num_samples, epoch)):
            raise SharedError(
                f"The pass for an anchor did not see every sample exactly once ({total}, expected {expected}); this is "
                "a defect of Lockstep, please report it."
            )
        return total


def build_anchors(
    config: RunConfig, parts: Parts, world: World, num_samples: int, recorded: bool, warn: Callable[[str], None]
) -> Anchors | None:
    """What takes the anchors of a run; None where its rule has none."""
    if not parts.rule.has_anchor:
        return None
    global_batch = config.train.global_batch
    start, stop = share(global_batch, world.rank, world.size)

    def take(summing: Parts) -> Step:
        if recorded:
            return RecordedStep(summing, stop - start, global_batch, warn)
        return build_launched(summing, stop - start)

    anchors = Anchors(parts, world, num_samples, plan_anchors(config, num_samples), take, warn)
    with as_written(parts.model):  # for a size that no step has
        refuse_drawing(parts, fake_batch(config, world, FEWEST).images)
    return anchors


def plan_anchors(config: RunConfig, num_samples: int) -> int:
    """Steps from one anchor to the next."""
    in_epoch, _ = count_steps(config, num_samples)
    return max(1, config.optim.anchor_every.steps(in_epoch))
