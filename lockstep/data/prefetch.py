"""Batches prepared ahead of the step (step 5 on the walk): a thread pool fills them, a side stream takes them over.

On the CPU each task also normalises its rows, so the step finds finished input. On CUDA the tasks fill pinned memory,
and the task that completes a batch starts its copy and normalisation on a stream of their own.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.augment import normalize, normalize_into
from lockstep.data.decode import Pixels

# Samples one task prepares at most: enough to hide a task's cost, few enough to spread a batch over the threads.
MAX_TASK_SAMPLES = 32

# Writes rows [start, stop) of a batch: pixels into the array given, which holds just those rows.
Fill = Callable[[int, int, Pixels], None]


class Pending(Protocol):
    """A batch on its way."""

    def fill_rows(self, fill: Fill, start: int, stop: int) -> None:
        """Prepare some rows, on a thread of the pool."""

    def finish(self) -> tuple[Tensor, Tensor]:
        """Images and labels for the step, once all rows are filled."""


class HostBatch:
    """A batch for the CPU: rows are normalised where they are filled."""

    def __init__(self, labels: NDArray[np.int64], size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._images = np.empty((len(labels), size, size, 3), np.float32)
        self._labels = labels
        self._mean, self._std = mean, std

    def fill_rows(self, fill: Fill, start: int, stop: int) -> None:
        pixels = np.empty((stop - start, *self._images.shape[1:]), np.uint8)
        fill(start, stop, pixels)
        normalize_into(pixels, self._mean, self._std, self._images[start:stop])

    def finish(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self._images).permute(0, 3, 1, 2), torch.from_numpy(self._labels)


class DeviceBatch:
    """A batch for a CUDA device: rows go to pinned memory, the whole batch to the device on a side stream."""

    def __init__(
        self,
        labels: NDArray[np.int64],
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        stream: torch.cuda.Stream,
    ) -> None:
        self._pixels = torch.empty((len(labels), size, size, 3), dtype=torch.uint8, pin_memory=True)
        self._labels = labels
        self._mean, self._std = mean, std
        self._stream = stream
        self._rows_left = len(labels)
        self._lock = threading.Lock()
        self._ready: tuple[Tensor, Tensor, torch.cuda.Event] | None = None

    def fill_rows(self, fill: Fill, start: int, stop: int) -> None:
        fill(start, stop, self._pixels.numpy()[start:stop])
        with self._lock:
            self._rows_left -= stop - start
            complete = self._rows_left == 0
        if complete:
            self._ready = self._copy()

    def _copy(self) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            # The allocator keeps pinned memory from reuse until the copies that read it are done.
            images = self._pixels.to(self._stream.device, non_blocking=True)
            labels = torch.from_numpy(self._labels).pin_memory().to(self._stream.device, non_blocking=True)
            return normalize(images, self._mean, self._std), labels, self._stream.record_event()

    def finish(self) -> tuple[Tensor, Tensor]:
        images, labels, copied = self._ready or self._copy()  # an empty batch has no task to copy it
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(copied)
        # Allocated on the side stream, used on this one: the memory must outlive this stream's use of it.
        images.record_stream(current)
        labels.record_stream(current)
        return images, labels


class Prefetcher:
    """Starts batches on a pool of decode threads and hands their tensors over."""

    def __init__(
        self, threads: int, image_size: int, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
    ) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lockstep-decode")
        self._image_size = image_size
        self._mean, self._std = mean, std
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def start(self, labels: NDArray[np.int64], fill: Fill) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin a batch with a row per label, which `fill` may still change; call the result to wait for it."""
        arguments = (labels, self._image_size, self._mean, self._std)
        batch: Pending = DeviceBatch(*arguments, self._stream) if self._stream else HostBatch(*arguments)
        # At least two tasks a thread, so that one slow image does not hold up the others' last rows.
        step = min(MAX_TASK_SAMPLES, -(-len(labels) // (2 * self._threads))) or 1
        tasks: list[Future[None]] = [
            self._pool.submit(batch.fill_rows, fill, start, min(start + step, len(labels)))
            for start in range(0, len(labels), step)
        ]

        def wait() -> tuple[Tensor, Tensor]:
            for task in tasks:
                task.result()
            return batch.finish()

        return wait

    def close(self) -> None:
        """Drop what is not yet started and stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
