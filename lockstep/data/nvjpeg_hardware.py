"""nvJPEG's hardware decoder through its C interface: one call and one piece of memory for many images.

torchvision calls the same library, which its package brings along, but hands out a tensor for each image. What is known
of this decoder and not in its manual: it writes when it is called, in no stream's order, and its state must be idle
before it is used again.
"""

import ctypes
import weakref
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_void_p
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.augment import Sides

HARDWARE_BACKEND, INTERLEAVED_RGB = 3, 5
# Each image ends with a short kernel. Beside a training step it would stand behind a whole long one, and so would all
# that follow it, were its stream not the first that a free multiprocessor turns to.
HIGHEST_PRIORITY = -3
# An `nvjpegImage_t` in 8-byte words: the addresses of four channels, then their rows' strides.
IMAGE_WORDS, FIRST_STRIDE = 8, 4


@dataclass
class _Desk:
    """What one call at a time needs: a state, prepared for so many images, and a stream."""

    stream: torch.cuda.Stream
    state: c_void_p = field(default_factory=c_void_p)
    num_images: int = 0


class HardwareDecoder:
    """The decoder of one device; OSError or RuntimeError where there is none. Several threads may decode at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library = ctypes.CDLL(find_library())
        self._handle = c_void_p()
        with torch.cuda.device(device):
            _check(self._library.nvjpegCreateEx(HARDWARE_BACKEND, None, None, 0, ctypes.byref(self._handle)))
        self._idle: list[_Desk] = []
        # At the end of the process the driver may be gone already, and frees everything itself.
        weakref.finalize(self, _close, self._library, self._handle, self._idle).atexit = False

    def decode(self, encoded: list[bytes], sides: Sides) -> tuple[Tensor, NDArray[np.int64]] | None:
        """Height × width × RGB of all images in one piece, and where each begins; None when one is refused.

        The sides are taken for granted: an image whose frame header says otherwise would be written beyond its place.
        """
        ends = np.cumsum(3 * sides.prod(axis=1))
        starts = ends - 3 * sides.prod(axis=1)
        with torch.cuda.device(self._device):
            desk = self._idle.pop() if self._idle else self._open_desk()
            with torch.cuda.stream(desk.stream):
                slab = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8, device=self._device)
            images = np.zeros((len(encoded), IMAGE_WORDS), np.int64)
            images[:, 0], images[:, FIRST_STRIDE] = slab.data_ptr() + starts, 3 * sides[:, 1]
            status = self._decode(desk, encoded, images)
            desk.stream.synchronize()
            if status:
                self._library.nvjpegJpegStateDestroy(desk.state)  # who knows what it still holds
                return None
        self._idle.append(desk)
        return slab, starts

    def _open_desk(self) -> _Desk:
        desk = _Desk(torch.cuda.Stream(self._device, priority=HIGHEST_PRIORITY))
        _check(self._library.nvjpegJpegStateCreate(self._handle, ctypes.byref(desk.state)))
        return desk

    def _decode(self, desk: _Desk, encoded: list[bytes], images: NDArray[np.int64]) -> int:
        """The status of decoding into the places of `images`; not zero when an image is refused."""
        count = len(encoded)
        if count != desk.num_images:
            status: int = self._library.nvjpegDecodeBatchedInitialize(
                self._handle, desk.state, c_int(count), c_int(1), c_int(INTERLEAVED_RGB)
            )
            if status:
                return status
            desk.num_images = count
        lengths = np.array([len(item) for item in encoded], np.uint64)
        status = self._library.nvjpegDecodeBatched(
            self._handle,
            desk.state,
            (c_char_p * count)(*encoded),
            lengths.ctypes.data_as(c_void_p),
            images.ctypes.data_as(c_void_p),
            c_void_p(desk.stream.cuda_stream),
        )
        return status


def find_library() -> str:
    """The nvJPEG that torchvision or NVIDIA's package brings along, or the system's; OSError where there is none."""
    for path in _candidates():
        try:
            ctypes.CDLL(str(path))
        except OSError:
            continue
        return str(path)
    raise OSError("nvJPEG is not installed")


def _candidates() -> Iterator[Path]:
    for package, pattern in (("torchvision", "../torchvision.libs/libnvjpeg*.so*"), ("nvidia", "*/lib/libnvjpeg.so*")):
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted(Path(root).glob(pattern))
    yield from (Path("libnvjpeg.so.13"), Path("libnvjpeg.so.12"))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"nvJPEG answers with status {status}")


def _close(library: ctypes.CDLL, handle: c_void_p, desks: list[_Desk]) -> None:
    for desk in desks:
        library.nvjpegJpegStateDestroy(desk.state)
    library.nvjpegDestroy(handle)
