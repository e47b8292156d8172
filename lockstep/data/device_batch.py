"""A batch made on the GPU: images decoded at any size go to the device, and one kernel crops them all (steps 3 to 5).

The decode threads write into pinned memory, a copy a block, on a stream beside the training step's; nvJPEG's images are
there already. Processes read for nvJPEG, or where there is none decode in the threads' place what Pillow would. On the
CPU, where tests run it, the same path has no stream and the kernel's plain version.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.block import Block, Request, Rows, decode_each, open_block
from lockstep.data.nvjpeg import Nvjpeg
from lockstep.data.read_process import ReadPool
from lockstep.data.reader import Fetch, SampleReader
from lockstep.data.resident import Resident
from lockstep.kernels import has_triton
from lockstep.kernels.crop import crop_resize, crop_resize_plain, crop_table, interleaved, planar

# Pinned memory that a thread fills before it sends it off: a block of photographs in one piece, of posters in several.
MAX_SLAB_BYTES = 1 << 26


class Lane:
    """The side stream on which input reaches a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of high priority: its kernels are short, and a step that waits for them leaves the whole device idle.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def enter(self) -> AbstractContextManager[object]:
        """While inside, this thread's work goes to the lane."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def allocate(self, num_bytes: int) -> Tensor:
        """Host memory to send from; PyTorch keeps pinned memory, and hands it out again when its copies are done."""
        with self.enter():  # pinned for this device: a thread that has not chosen one would open the first
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.stream is not None)

    def send(self, host: Tensor) -> Tensor:
        """Copy to the device in the lane's order; to be called inside it."""
        if self.stream and not host.is_pinned():
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)


class DevicePath:
    """What batches on one device have in common."""

    def __init__(
        self,
        reader: SampleReader,
        device: torch.device,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dtype: torch.dtype,
        resident: Resident | None,
        nvjpeg: Nvjpeg | None,
        read_processes: int = 0,
    ) -> None:
        self.reader, self.resident, self.nvjpeg = reader, resident, nvjpeg
        self.read_pool = ReadPool(reader.source, read_processes, reader.watch.limit_s, decodes=nvjpeg is None)
        self.mean, self.std, self.dtype = mean, std, dtype
        self.lane = Lane(device)
        # Triton compiles at the first launch, which two threads must not do at once.
        self._launch_lock = threading.Lock()

    @property
    def has_kernels(self) -> bool:
        """Whether batches are changed by kernels, or by their plain version."""
        return self.lane.stream is not None and has_triton()

    def begin(self, request: Request) -> "DeviceBatch":
        """A batch to be filled."""
        return DeviceBatch(self, request)

    def describe(self) -> list[str]:
        """Who reads, and what stays on the device."""
        reading = [self.read_pool.describe()] if self.read_pool else []
        return reading + (["decoded images stay on the device"] if self.resident else [])

    def interrupt(self) -> None:
        """No thread waits for a process that does not answer any more."""
        self.read_pool.kill()

    def retire_readers(self) -> None:
        """End the processes that read once every image is on the device, or is bad."""
        if self.resident and self.read_pool and self.resident.num_missing <= len(self.reader.bad):
            self.read_pool.retire()

    def close(self) -> None:
        """When all threads have stopped: end the processes that read, and wait for what is still on the lane."""
        self.read_pool.close()
        if self.lane.stream:
            self.lane.stream.synchronize()

    def crop(self, table: Tensor, out: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Fill `out` from the images of the table, in the lane."""
        self.launch(crop_resize if out.is_cuda else crop_resize_plain, table, out, mean, std)

    def launch(self, function: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Call what launches kernels, one thread at a time."""
        with self._launch_lock:
            function(*arguments, **options)


class DeviceBatch:
    """A batch whose images gather on the device, until the last of them is there and all are cropped."""

    def __init__(self, path: DevicePath, request: Request) -> None:
        self._path, self._request = path, request
        count = len(request.samples)
        self._addresses = np.zeros(count, np.int64)
        self._strides = np.zeros((count, 3), np.int64)
        self._sides = np.zeros((count, 2), np.int64)
        self._boxes = np.zeros((count, 4))
        self._flips = np.zeros(count, np.bool_)
        self._kept: list[Tensor] = []  # whatever the addresses point to
        self._ready: tuple[Tensor, Tensor, torch.cuda.Event | None] | None = None

    def known_rows(self) -> Rows:
        """Rows that need no decoding, because their images are on the device already."""
        resident = self._path.resident
        if resident is None:
            return np.empty(0, np.int64)
        taken = self._request.samples
        if self._request.replaces:
            taken = self._path.reader.replace_known_bad(taken)
        return np.flatnonzero(resident.holds(taken))

    def fill(self, rows: Rows) -> Rows:
        """Bring some rows' images to the device; returns those that turned out bad."""
        rows = self._fill_known(rows)
        if not len(rows):
            return rows
        if self._path.nvjpeg:  # whose the processes are
            return self._decode(rows, None)
        with self._path.read_pool.lend() as process:
            return self._decode(rows, process.load if process else None)

    def _decode(self, rows: Rows, fetch: Fetch | None) -> Rows:
        block = open_block(self._request, rows, self._path.reader, self._path.resident is not None, fetch)
        ends = np.cumsum(3 * block.sides.prod(axis=1))
        if not len(ends) or ends[-1] <= MAX_SLAB_BYTES:
            return self._fill_slab(block)
        parts = np.split(np.arange(len(ends)), np.flatnonzero(np.diff(ends // MAX_SLAB_BYTES)) + 1)
        return np.concatenate([self._fill_slab(block.select(part)) for part in parts])

    def _fill_slab(self, block: Block) -> Rows:
        """Decode images into one piece of pinned memory and send it; returns the rows of those that turned out bad."""
        lane = self._path.lane
        bounds = np.concatenate([[0], np.cumsum(3 * block.sides.prod(axis=1))])
        slab = lane.allocate(int(bounds[-1]))
        memory, places = slab.numpy(), bounds.tolist()

        def take(index: int) -> None:
            block.decode(index, memory[places[index] : places[index + 1]])

        failed = decode_each(block, self._path.reader, take)
        with lane.enter():
            sent = lane.send(slab)
        addresses = sent.data_ptr() + bounds[:-1]
        if len(failed):
            good = np.flatnonzero(~np.isin(block.rows, failed))
            block, addresses = block.select(good), addresses[good]
        self._place(block, addresses, interleaved(block.sides[:, 1]), [sent])
        return failed

    def fill_by_nvjpeg(self, rows: Rows) -> Rows:
        """Let nvJPEG decode some rows; returns those that it leaves to the decode threads."""
        nvjpeg = self._path.nvjpeg
        assert nvjpeg is not None
        rows = self._fill_known(rows)
        with self._path.read_pool.lend() as process:
            return self._decode_by_nvjpeg(nvjpeg, rows, process.load if process else None)

    def _decode_by_nvjpeg(self, nvjpeg: Nvjpeg, rows: Rows, fetch: Fetch | None) -> Rows:
        block = open_block(self._request, rows, self._path.reader, self._path.resident is not None, fetch)
        # What libjpeg-turbo decodes at a reduced scale would take nvJPEG up to 64 times the memory.
        fit = np.array([nvjpeg.can_decode(image) for image in block.images], np.bool_) & (block.factors == 1)
        part = block.select(np.flatnonzero(fit))
        planes = nvjpeg.decode([image.data for image in part.images], self._path.lane.stream)
        if planes is None:
            return block.rows
        addresses = np.array([plane.data_ptr() for plane in planes], np.int64)
        sides = np.array([plane.shape[1:] for plane in planes], np.int64).reshape(-1, 2)
        strides = planar(sides[:, 0], sides[:, 1])
        as_expected = (sides == part.sides).all(axis=1)
        self._place(part.select(np.flatnonzero(as_expected)), addresses[as_expected], strides[as_expected], planes)
        return np.concatenate([block.rows[~fit], part.rows[~as_expected]])

    def _fill_known(self, rows: Rows) -> Rows:
        """Find rows' images among those on the device; returns the rows whose are not there."""
        resident = self._path.resident
        if resident is None:
            return rows
        request = self._request
        taken = request.samples[rows]
        if request.replaces:
            taken = self._path.reader.replace_known_bad(taken)
        held = resident.holds(taken)
        known, taken = rows[held], taken[held]
        request.taken[known] = taken
        self._addresses[known], self._strides[known], self._sides[known] = resident.find(taken)
        self._boxes[known], self._flips[known] = request.place(known, self._sides[known])
        return rows[~held]

    def _place(
        self, block: Block, addresses: NDArray[np.int64], strides: NDArray[np.int64], memory: list[Tensor]
    ) -> None:
        """Note where the images of a block lie on the device."""
        rows = block.rows
        self._addresses[rows], self._strides[rows], self._sides[rows] = addresses, strides, block.sides
        self._boxes[rows], self._flips[rows] = block.boxes, block.flips
        self._kept += memory
        if self._path.resident is not None:
            self._path.resident.keep(self._request.taken[rows], addresses, strides, block.sides, memory)
            self._path.retire_readers()

    def complete(self) -> None:
        """All images are on their way: crop them behind the last copy."""
        request, path = self._request, self._path
        rows = np.flatnonzero(request.readable)
        table = crop_table(
            self._addresses[rows],
            self._strides[rows],
            self._sides[rows],
            self._boxes[rows],
            self._flips[rows],
            confined=request.confined,
        )
        labels = path.reader.source.labels[request.taken[rows]].astype(np.int64)
        shape = (len(rows), 3, request.size, request.size)
        lane, retouch = path.lane, request.retouch
        if retouch:
            labels = retouch.finish_labels(labels)
        with lane.enter():
            images = torch.empty(shape, dtype=path.dtype, device=lane.device, memory_format=torch.channels_last)
            table = lane.send(table)
            if retouch:
                launch = path.launch if path.has_kernels else None
                images = retouch.make_batch(table, images, path.crop, path.mean, path.std, lane.send, launch)
            else:
                path.crop(table, images, path.mean, path.std)
            sent = lane.send(torch.from_numpy(labels))
            done = lane.stream.record_event() if lane.stream else None
        self._ready = images, sent, done
        if path.nvjpeg:
            path.nvjpeg.hold(self._kept, done)
        self._kept = []

    def finish(self) -> tuple[Tensor, Tensor]:
        """Images and labels for the step, on its stream."""
        assert self._ready is not None
        images, labels, done = self._ready
        if done:
            current = torch.cuda.current_stream(images.device)
            current.wait_event(done)
            # Allocated on the side stream, used on this one: the memory must outlive this stream's use of it.
            images.record_stream(current)
            labels.record_stream(current)
        return images, labels
