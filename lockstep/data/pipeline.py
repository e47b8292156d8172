"""The input pipeline: order, source, decode, crop and prefetch chained into an iterator of `Batch`.

`TrainPipeline` runs epoch after epoch from any `Cursor`; `EvalPipeline` passes once over the validation set each time
it is iterated. What a batch holds depends on neither the number of ranks nor the number of threads.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NamedTuple, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.augment import Boxes, Sides, central_crops, draw_crops, random_crops
from lockstep.data.block import Request, Rows
from lockstep.data.order import Cursor, Samples, StepPlan, plan_step
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.prefetch import Pending
from lockstep.data.reader import SampleReader
from lockstep.data.retouch import Augmentation, draw_retouch
from lockstep.data.sources import Source
from lockstep.data.workshop import Crew, Means, Workshop

# Batches ahead where nothing is set: at first, and at most.
FIRST_DEPTH, MAX_DEPTH = 2, 8
# Batches ahead that a setting asks for are at most so many bytes, however many it asks for; what any batch takes is no
# pixels but requests, tasks and draws.
MAX_AHEAD_BYTES, BATCH_BYTES = 4 << 30, 1 << 16
KEPT_TIMES = 32  # of batches that were handed over, for whoever draws a few steps
# Evaluation keeps this many times the output's pixels a side when it decodes at a reduced scale: nothing fine is lost.
EVAL_MARGIN = 2
NO_AUGMENTATION = Augmentation()


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step, on its device."""

    images: Tensor  # N × 3 × H × W, channels-last memory
    labels: Tensor  # int64; where samples are mixed N × 3 FP32: label, the other's label, the share of the first
    global_size: int  # samples of the whole step, over all ranks
    epoch: int
    samples: Samples  # as planned, also where an unreadable one was replaced
    cursor: Cursor  # the state after this batch


class Made(NamedTuple):
    """When a batch was made, by the host's clock."""

    ahead: int  # of the last one that was handed over, which is 0
    begun_s: float
    done_s: float | None  # None: not yet


class Pipeline:
    """What training and evaluation share: a source read by decode threads that stop with `close`."""

    resident_share: ClassVar[float]  # of the free device memory, for images that are to stay there

    def __init__(
        self,
        source: Source,
        bad_share: float,
        read_timeout_s: float,
        prefetch_batches: int,
        batch_pixels: int,
        means: Means,
    ) -> None:
        self._source = source
        self.reader = SampleReader(source, bad_share, read_timeout_s)
        self._workshop = Workshop(self.reader, **means, share=self.resident_share)
        self._depth = limit_depth(prefetch_batches, batch_pixels, means) or FIRST_DEPTH

    @property
    def bad(self) -> dict[int, str]:
        """Unreadable samples this rank met, with the reason."""
        return self.reader.bad

    def describe(self) -> str:
        """How batches are made, in one sentence."""
        return f"Input: {self._workshop.describe()}, {self._depth} batches ahead."

    @property
    def depth(self) -> int:
        """Batches prepared ahead of the step."""
        return self._depth

    def crew(self) -> Crew:
        """Who makes batches now."""
        return self._workshop.crew()

    def close(self) -> None:
        """Stop the decode threads."""
        self._workshop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def limit_depth(prefetch_batches: int, batch_pixels: int, means: Means) -> int:
    """Batches ahead, as asked for where the memory of a machine can be expected to hold them."""
    num_bytes = 3 * batch_pixels * means.get("dtype", torch.float32).itemsize + BATCH_BYTES
    return min(prefetch_batches, max(MAX_DEPTH, MAX_AHEAD_BYTES // num_bytes))


class TrainPipeline(Pipeline):
    """Endless training batches for one rank, prepared ahead of the step.

    `image_sizes` are pairs (first epoch after, size), rising: until then images have that size, in the end
    `image_size`. With `prefetch_batches` 0 the pipeline works further ahead when that would have spared a wait.
    """

    resident_share = 0.2

    def __init__(
        self,
        source: Source,
        *,
        global_batch: int,
        rank: int,
        world_size: int,
        seed: int,
        image_size: int,
        crop_area: tuple[float, float],
        crop_ratio: tuple[float, float],
        flip: bool,
        prefetch_batches: int,
        start: Cursor,
        bad_share: float,
        read_timeout_s: float = READ_TIMEOUT_S,
        image_sizes: tuple[tuple[int, int], ...] = (),
        augmentation: Augmentation = NO_AUGMENTATION,
        flip_in_turn: bool = False,
        **means: Unpack[Means],
    ) -> None:
        largest = max([image_size, *(size for _, size in image_sizes)])
        batch_pixels = -(-global_batch // world_size) * largest**2
        super().__init__(source, bad_share, read_timeout_s, prefetch_batches, batch_pixels, means)
        self._global_batch, self._rank, self._world_size, self._seed = global_batch, rank, world_size, seed
        self._image_size, self._image_sizes = image_size, image_sizes
        self._crop_area, self._crop_ratio, self._flips = crop_area, crop_ratio, (flip, flip_in_turn)
        self._augmentation = augmentation
        self._max_depth = self._depth if prefetch_batches else MAX_DEPTH
        self._num_taken = 0
        self._planned = start
        self._ahead: deque[tuple[StepPlan, Pending]] = deque()
        self._times: deque[tuple[float | None, float | None]] = deque(maxlen=KEPT_TIMES)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        # Deep by and by: the first step waits for few batches, and a short run does not make more than it takes.
        while len(self._ahead) <= min(self._depth, MAX_DEPTH + self._num_taken):
            self._ahead.append(self._start(self._planned))
            self._planned = self._ahead[-1][0].next
        plan, pending = self._ahead.popleft()
        images, labels = self._take(pending)
        return Batch(images, labels, plan.global_size, plan.epoch, plan.samples, plan.next)

    def pass_over(self, epoch: int) -> Iterator[Batch]:
        """All of an epoch's batches as its steps see them, beside those that the steps themselves take."""
        ahead: deque[tuple[StepPlan, Pending]] = deque()
        planned = Cursor(epoch, 0)
        while ahead or planned.epoch == epoch:
            while planned.epoch == epoch and len(ahead) <= self._depth:
                ahead.append(self._start(planned))
                planned = ahead[-1][0].next
            plan, pending = ahead.popleft()
            images, labels = pending.wait()
            yield Batch(images, labels, plan.global_size, plan.epoch, plan.samples, plan.next)

    def list_made(self) -> list[Made]:
        """When the last batches were made, and those after them so far."""
        times = [*self._times, *((pending.begun_s, pending.done_s) for _, pending in self._ahead)]
        first = 1 - len(self._times)
        return [Made(first + place, begun, done) for place, (begun, done) in enumerate(times) if begun is not None]

    def size_at(self, epoch: int) -> int:
        """The side of an epoch's images."""
        return next((size for until, size in self._image_sizes if epoch < until), self._image_size)

    def _take(self, pending: Pending) -> tuple[Tensor, Tensor]:
        """Wait for a batch, and look whether working further ahead would have spared the wait."""
        must_wait = not pending.is_ready
        before = self._workshop.mark_step() if must_wait else None
        images, labels = pending.wait()
        felt = must_wait and (before is None or before.query())  # not if the device still had work queued
        self._workshop.note(felt)
        is_first = self._num_taken <= self._depth  # and has nobody to hide behind
        if felt and not is_first and self._workshop.is_idle and self._depth < self._max_depth:
            self._depth += 1
        self._num_taken += 1
        self._times.append((pending.begun_s, pending.done_s))
        return images, labels

    def _start(self, cursor: Cursor) -> tuple[StepPlan, Pending]:
        """Begin the batch of the step that starts at the cursor."""
        plan = plan_step(
            cursor,
            self._source.num_samples,
            self._global_batch,
            self._rank,
            self._world_size,
            self._seed,
            paired=self._augmentation.mixes,
        )
        size = self.size_at(plan.epoch)
        # For the whole batch at once: block by block it would cost the decode threads several times as much of Python.
        draws = draw_crops(self._seed, plan.epoch, plan.made, self._crop_area, self._crop_ratio, *self._flips)
        retouch = draw_retouch(self._seed, plan, size, self._augmentation)

        def place(rows: Rows, sides: Sides) -> tuple[Boxes, NDArray[np.bool_]]:
            return random_crops(sides, draws.crops[rows], self._crop_ratio), draws.flips[rows]

        request = Request(plan.made, size, place, confined=True, replaces=True, least=size, retouch=retouch)
        return plan, self._workshop.start(request)


class EvalPipeline(Pipeline):
    """One rank's batches of a pass over the validation set, each time it is iterated.

    Batches are cut by position in the whole set and dealt whole, round robin, so that a batch holds the same images on
    any number of ranks. Unreadable samples are left out, never replaced.
    """

    resident_share = 0.05

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        image_size: int,
        eval_resize: int,
        prefetch_batches: int,
        bad_share: float,
        read_timeout_s: float = READ_TIMEOUT_S,
        **means: Unpack[Means],
    ) -> None:
        super().__init__(source, bad_share, read_timeout_s, prefetch_batches, batch_size * image_size**2, means)
        self._batch_size = batch_size
        self._starts = range(batch_size * rank, source.num_samples, batch_size * world_size)
        self._image_size, self._eval_resize = image_size, eval_resize
        self._begun: tuple[deque[tuple[Request, Pending]], Iterator[int]] | None = None

    def prepare(self) -> None:
        """Begin the next pass, so that its first batches are ready when they are asked for."""
        if self._begun is None:
            starts = iter(self._starts)
            self._begun = deque(map(self._start, islice(starts, self._depth))), starts

    def __iter__(self) -> Iterator[Batch]:
        self.prepare()
        assert self._begun is not None
        (ahead, starts), self._begun = self._begun, None
        while ahead:
            ahead.extend(map(self._start, islice(starts, 1)))
            request, pending = ahead.popleft()
            images, labels = pending.wait()
            kept = request.samples[request.readable]
            yield Batch(images, labels, len(kept), 0, kept, Cursor(0, int(request.samples[-1]) + 1))

    def _start(self, first: int) -> tuple[Request, Pending]:
        stop = min(first + self._batch_size, self._source.num_samples)

        def place(rows: Rows, sides: Sides) -> tuple[Boxes, NDArray[np.bool_]]:
            return central_crops(sides, self._eval_resize, self._image_size), np.zeros(len(rows), np.bool_)

        request = Request(
            np.arange(first, stop, dtype=np.int64),
            self._image_size,
            place,
            confined=False,
            replaces=False,
            least=EVAL_MARGIN * self._image_size,
        )
        return request, self._workshop.start(request)
