"""A batch made on the CPU: each decode thread crops, resizes and normalises its rows (steps 3 to 5 without a GPU)."""

import threading
import weakref
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.augment import Normalizer, mirror_into, resize_central, resize_crop
from lockstep.data.block import Request, Rows, decode_each, open_block
from lockstep.data.decode import Pixels
from lockstep.data.reader import SampleReader

# Larger images than this, 5 million pixels, are rare, and a thread does not keep memory for them.
MAX_SCRATCH_BYTES = 1 << 24


class Recycler:
    """Arrays for batches: the memory of a batch that nobody holds any more becomes that of a new one.

    Fresh memory costs a page fault every 4 KiB, which is a tenth of the time it takes to fill a batch.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.float32]] = []

    def take(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array of this shape, contents undefined."""
        numel = int(np.prod(shape))
        memory = np.empty(0, np.float32)
        while memory.size < numel:
            memory = self._free.pop() if self._free else np.empty(numel, np.float32)
        array = memory[:numel].reshape(shape)
        # A tensor made of `array` keeps it alive, and with it all of the tensor's views.
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array


class HostPath:
    """What batches on the CPU have in common."""

    def __init__(
        self, reader: SampleReader, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype
    ) -> None:
        self.reader = reader
        self.dtype = dtype
        self.recycler = Recycler()
        self.normalizer = lru_cache(maxsize=4)(lambda size: Normalizer(mean, std, size))
        self._mine = threading.local()

    def describe(self) -> list[str]:
        """Nothing beyond who decodes."""
        return []

    def interrupt(self) -> None:
        """Threads wait for nobody here."""

    def close(self) -> None:
        """Nothing outlives the threads."""

    def scratch(self, num_bytes: int) -> Pixels | None:
        """This thread's memory for decoded images, one after the other; None for one too large to keep memory for."""
        if num_bytes > MAX_SCRATCH_BYTES:
            return None
        memory: Pixels | None = getattr(self._mine, "memory", None)
        if memory is None or memory.size < num_bytes:
            memory = self._mine.memory = np.empty(num_bytes, np.uint8)
        return memory

    def squares(self, size: int) -> tuple[Pixels, Pixels]:
        """This thread's memory for a resized image and its mirror image."""
        squares: Pixels | None = getattr(self._mine, "squares", None)
        if squares is None or squares.shape[1] != size:
            squares = self._mine.squares = np.empty((2, size, size, 3), np.uint8)
        return squares[0], squares[1]

    def begin(self, request: Request) -> "HostBatch":
        """A batch to be filled."""
        return HostBatch(self, request)


class HostBatch:
    """A batch whose rows are finished where they are filled."""

    def __init__(self, path: HostPath, request: Request) -> None:
        self._path, self._request = path, request
        self._images = path.recycler.take((len(request.samples), request.size, request.size, 3))

    def known_rows(self) -> Rows:
        """Rows that need no decoding: none here."""
        return np.empty(0, np.int64)

    def fill(self, rows: Rows) -> Rows:
        """Prepare some rows; returns those whose images turned out bad."""
        request, path = self._request, self._path
        block = open_block(request, rows, path.reader, full_size=False)
        normalizer, retouch = path.normalizer(request.size), request.retouch
        square, mirrored = path.squares(request.size)

        def take(index: int) -> None:
            image = block.decode(index, path.scratch(3 * int(block.sides[index].prod())))
            (resize_crop if request.confined else resize_central)(image, block.boxes[index], square)
            if block.flips[index]:
                mirror_into(square, mirrored)
            row = int(block.rows[index])
            levels = mirrored if block.flips[index] else square
            normalizer.normalize_into(retouch.change_levels(levels, row) if retouch else levels, self._images[row])
            if retouch:
                retouch.erase_part(self._images[row], row)

        return decode_each(block, path.reader, take)

    def complete(self) -> None:
        """All rows are filled: mix what is to be mixed."""
        if self._request.retouch:
            self._request.retouch.mix(self._images)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Images and labels for the step."""
        request = self._request
        images = torch.from_numpy(self._images).permute(0, 3, 1, 2)
        if not request.readable.all():
            keep = torch.from_numpy(np.flatnonzero(request.readable))
            images = images[keep].contiguous(memory_format=torch.channels_last)
        labels = self._path.reader.source.labels[request.taken[request.readable]].astype(np.int64)
        if request.retouch:
            images, labels = images[request.retouch.own], request.retouch.finish_labels(labels)
        return images.to(self._path.dtype), torch.from_numpy(labels)
