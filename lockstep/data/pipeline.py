"""The input pipeline: order, source, decode, crop and prefetch chained into an iterator of `Batch`.

`TrainPipeline` runs epoch after epoch from any `Cursor`; `EvalPipeline` passes once over the validation set each time
it is iterated. What a batch holds depends on neither the number of ranks nor the number of threads.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from lockstep.data.augment import central_crop, draw_crops, random_crop, resize_central, resize_crop
from lockstep.data.decode import Pixels
from lockstep.data.order import Cursor, Ledger, Samples, StepPlan, plan_step
from lockstep.data.prefetch import Prefetcher
from lockstep.data.reader import SampleReader
from lockstep.data.sources import Source


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step, on its device."""

    images: Tensor  # float32, N × 3 × H × W, channels-last memory
    labels: Tensor  # int64
    global_size: int  # samples of the whole step, over all ranks
    epoch: int
    samples: Samples  # as planned, also where an unreadable one was replaced
    cursor: Cursor  # the state after this batch


class Pipeline:
    """What training and evaluation share: a source read by decode threads that stop with `close`."""

    def __init__(self, source: Source, bad_share: float, prefetcher: Prefetcher, prefetch_batches: int) -> None:
        self._source = source
        self._reader = SampleReader(source, bad_share)
        self._prefetcher = prefetcher
        self._prefetch_batches = prefetch_batches

    @property
    def bad(self) -> dict[int, str]:
        """Unreadable samples this rank met, with the reason."""
        return self._reader.bad

    def close(self) -> None:
        """Stop the decode threads."""
        self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TrainPipeline(Pipeline):
    """Endless training batches for one rank, prepared ahead of the step."""

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
        mean: tuple[float, ...],
        std: tuple[float, ...],
        threads: int,
        prefetch_batches: int,
        device: torch.device,
        start: Cursor,
        bad_share: float,
    ) -> None:
        super().__init__(source, bad_share, Prefetcher(threads, image_size, mean, std, device), prefetch_batches)
        self.ledger = Ledger()
        self._global_batch, self._rank, self._world_size, self._seed = global_batch, rank, world_size, seed
        self._crop_area, self._crop_ratio, self._flip = crop_area, crop_ratio, flip
        self._planned = start
        self._ahead: deque[tuple[StepPlan, Callable[[], tuple[Tensor, Tensor]]]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) <= self._prefetch_batches:
            self._start_next()
        plan, wait = self._ahead.popleft()
        images, labels = wait()
        self.ledger.add(plan.epoch, plan.samples)
        return Batch(images, labels, plan.global_size, plan.epoch, plan.samples, plan.next)

    def _start_next(self) -> None:
        plan = plan_step(
            self._planned, self._source.num_samples, self._global_batch, self._rank, self._world_size, self._seed
        )
        labels = self._source.labels[plan.samples]

        def fill(start: int, stop: int, pixels: Pixels) -> None:
            samples = plan.samples[start:stop]
            draws = draw_crops(self._seed, plan.epoch, samples, self._crop_area, self._crop_ratio, self._flip)
            for row, (sample, draw) in enumerate(zip(samples.tolist(), draws, strict=True)):
                image, taken = self._reader.read_or_next(sample)
                if taken != sample:
                    labels[start + row] = self._source.labels[taken]
                box = random_crop(image.shape[0], image.shape[1], draw, self._crop_ratio)
                resize_crop(image, box, pixels[row], draw.flip)

        self._ahead.append((plan, self._prefetcher.start(labels, fill)))
        self._planned = plan.next


class EvalPipeline(Pipeline):
    """One rank's batches of a pass over the validation set, each time it is iterated.

    Batches are cut by position in the whole set and dealt whole, round robin, so that a batch holds the same images on
    any number of ranks. Unreadable samples are left out, never replaced.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        image_size: int,
        eval_resize: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        threads: int,
        prefetch_batches: int,
        device: torch.device,
        bad_share: float,
    ) -> None:
        super().__init__(source, bad_share, Prefetcher(threads, image_size, mean, std, device), prefetch_batches)
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._image_size, self._eval_resize = image_size, eval_resize

    def __iter__(self) -> Iterator[Batch]:
        ahead: deque[Callable[[], Batch]] = deque()
        stride = self._batch_size * self._world_size
        for start in range(self._batch_size * self._rank, self._source.num_samples, stride):
            ahead.append(self._start(start))
            if len(ahead) > self._prefetch_batches:
                yield ahead.popleft()()
        while ahead:
            yield ahead.popleft()()

    def _start(self, first: int) -> Callable[[], Batch]:
        stop = min(first + self._batch_size, self._source.num_samples)
        samples = np.arange(first, stop, dtype=np.int64)
        readable = np.ones(len(samples), np.bool_)

        def fill(start: int, stop: int, pixels: Pixels) -> None:
            for row, sample in enumerate(samples[start:stop].tolist()):
                image = self._reader.read(sample)
                if image is None:
                    readable[start + row] = False
                    continue
                box = central_crop(image.shape[0], image.shape[1], self._eval_resize, self._image_size)
                resize_central(image, box, pixels[row])

        wait = self._prefetcher.start(self._source.labels[samples], fill)

        def take() -> Batch:
            images, labels = wait()
            if not readable.all():
                keep = torch.from_numpy(np.flatnonzero(readable)).to(images.device)
                images, labels = images[keep].contiguous(memory_format=torch.channels_last), labels[keep]
            kept = samples[readable]
            return Batch(images, labels, len(kept), 0, kept, Cursor(0, stop))

        return take
