"""What a run measures of itself beside its speed: layers, noise, timelines, energy (step 10 on the walk).

Everything is measured at steps that end with a record, for which the host waits anyway: nothing here makes a device
wait, or sends anything at any other step. No number of the training depends on it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.comm.world import World
from lockstep.data.order import split_batch
from lockstep.data.pipeline import Batch, Made
from lockstep.engine.build import Parts
from lockstep.engine.energy import Energy
from lockstep.engine.noise import NoiseScale
from lockstep.engine.timeline import NUM_STEPS, Timeline
from lockstep.events import LayersMeasured, Sink, TimelineTaken
from lockstep.optim.rule import Norms

MOST_MEASURED = 100  # steps of a run whose layers are measured, but for the first few
# From one to the next, and how many of the first records have them: measuring takes half of a GPU's small step, and a
# few percent of a CPU's.
LEAST_STEPS, FIRST_RECORDS = 10, 5
GPU_LEAST_STEPS, GPU_FIRST_RECORDS = 64, 2
STEADY_STEPS = 12  # before a timeline: by then kernels are chosen, the step is recorded, the input is ahead
LATE_SHARE = 0.9  # of the run, when a second timeline is taken
MOST_TIMELINES = 64  # ranks: those of thousands would be larger than all other records together


class Cadence:
    """At which steps what is measured; a pure function of the run's length."""

    def __init__(self, start_step: int, total_steps: int, log_every: int, *, on_gpu: bool = False) -> None:
        self._start, self._total, self._every = start_step, total_steps, log_every
        least = GPU_LEAST_STEPS if on_gpu else LEAST_STEPS
        self._first_records = GPU_FIRST_RECORDS if on_gpu else FIRST_RECORDS
        self._stride = log_every * max(-(-least // log_every), -(-total_steps // log_every // MOST_MEASURED))
        # Each ends with a step that ends with a record, as the last one does.
        first = min(total_steps, -(-(start_step + STEADY_STEPS) // log_every) * log_every)
        late = int(LATE_SHARE * total_steps) // log_every * log_every
        self._timelines = {first, late} if late >= first + NUM_STEPS else {first}

    def is_measured(self, step: int) -> bool:
        """Whether layers and noise are measured."""
        if step in (self._start + 1, self._total):
            return True
        if step in self._timelines:  # which is to show a step as it usually is
            return False
        is_early = step <= self._start + self._first_records * self._every
        return step % (self._every if is_early else self._stride) == 0

    def begins_timeline(self, step: int) -> bool:
        """Whether this is the first step of a timeline."""
        return any(step == max(self._start + 1, end - NUM_STEPS + 1) for end in self._timelines)

    def ends_timeline(self, step: int) -> bool:
        """Whether this is the last step of a timeline."""
        return step in self._timelines


class Instruments:
    """One rank's instruments; every rank has them, and rank 0 speaks."""

    def __init__(self, parts: Parts, world: World, sink: Sink, cadence: Cadence) -> None:
        self._parts = parts
        self._world = world
        self._sink = sink
        self._cadence = cadence
        self._noise = NoiseScale()
        self._timeline: Timeline | None = None
        self.energy = Energy(world)

    def begin_step(self, step: int, list_made: Callable[[], Sequence[Made]] = tuple) -> None:
        """A step is about to begin, with its input; `list_made` tells when batches were made."""
        if self._cadence.begins_timeline(step):
            self._timeline = Timeline(self._parts, step, list_made)
        if self._cadence.is_measured(step):
            self._parts.rule.measures = self._parts.reducer.measures = True
            if self._parts.hybrid:
                self._parts.hybrid.squares = []

    def drop_step(self) -> None:
        """The step that was begun is not taken, so there is nothing to measure of it."""
        self._parts.rule.measures = self._parts.reducer.measures = False
        if self._parts.hybrid:
            self._parts.hybrid.squares = None

    def report(self, step: int, batch: Batch) -> float | None:
        """Say what was measured of the step that a record closes; returns the noise scale where it was measured.

        Every rank must call it.
        """
        self.energy.look()
        if self._timeline and self._cadence.ends_timeline(step):
            self._report_timeline(self._timeline.end(step))
            self._timeline = None
        return self._report_layers(step, batch) if self._parts.rule.measures else None

    def _report_timeline(self, mine: dict[str, Any]) -> None:
        taken = self._world.gather_values(mine if self._world.rank < MOST_TIMELINES else {})
        for rank, timeline in enumerate(taken[:MOST_TIMELINES]):
            self._sink.emit(TimelineTaken(rank=rank, **timeline))

    def _report_layers(self, step: int, batch: Batch) -> float | None:
        parts = self._parts
        parts.rule.measures = parts.reducer.measures = False
        squares: list[torch.Tensor] = []
        if parts.hybrid:
            squares, parts.hybrid.squares = parts.hybrid.squares or [], None
        norms = parts.rule.read_norms(parts.weights, parts.reducer.flat)
        if norms is None:
            return None
        weights, gradients = norms.weights.tolist(), norms.gradients.tolist()
        trust = [] if norms.trust is None else norms.trust.tolist()
        # All ranks have the same sums, so that all leave out a step whose gradients overflowed.
        if not torch.tensor([*weights, *gradients, *trust]).isfinite().all():
            return None
        self._sink.emit(
            LayersMeasured(
                step=step,
                weight_norms=_shorten(weights),
                gradient_norms=_shorten(gradients),
                trust_ratios=_shorten(trust),
            )
        )
        # Differences to an anchor have another noise than the gradients that the scale is about.
        return None if parts.rule.has_anchor else self._estimate_noise(squares, norms, batch)

    def _estimate_noise(self, squares: list[torch.Tensor], norms: Norms, batch: Batch) -> float | None:
        """From this rank's squares before the sum and everyone's after it; alone, from those of its first pass."""
        count, big = len(batch.labels), batch.global_size
        if self._world.size == 1:
            passes = list(split_batch(count, self._parts.max_batch_per_rank))
            if len(passes) < 2:  # nothing to compare the step with
                return None
            count, squares = passes[0][0].stop, [self._parts.reducer.first_square]
        own = torch.zeros(3, dtype=torch.float64)
        if count and squares:
            square = torch.stack(squares).sum() * norms.inverse.double() ** 2
            # Every rank divides by the global batch; the mean over those samples alone is that much larger.
            own = torch.tensor([square.item() * (big / count) ** 2, 1 / count, 1.0], dtype=torch.float64)
        small, inverse, ranks = self._world.sum(own).tolist()
        if not ranks:
            return None
        self._noise.add(
            small_square=small / ranks,
            small_inverse=inverse / ranks,
            big_square=norms.gradients.double().square().sum().item(),
            big=big,
        )
        return self._noise.samples


def _shorten(numbers: list[float]) -> list[float]:
    """Five digits are enough to draw them."""
    return [float(f"{number:.5g}") for number in numbers]
