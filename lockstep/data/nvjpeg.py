"""Encoded JPEGs → images on the GPU, many at once: nvJPEG in hardware, or through torchvision where that is missing."""

import threading
import warnings
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.augment import Sides
from lockstep.data.decode import Encoded, Frame, read_frame
from lockstep.data.nvjpeg_hardware import HardwareDecoder
from lockstep.data.reader import Loaded
from lockstep.kernels.crop import interleaved, planar

# Images of one call: enough to keep nvJPEG's engines busy, few enough that a batch need not wait long for one.
MAX_IMAGES = 64
# One reads and parses images while the other's are decoded.
NUM_THREADS = 2
PROBE_SIDE = 64


class Decoded(NamedTuple):
    """Images on the device: where each begins, the strides of its rows, pixels and channels, and the memory."""

    addresses: NDArray[np.int64]
    strides: NDArray[np.int64]
    memory: list[Tensor]


class Engine(Protocol):
    """Something that decodes many JPEGs on a GPU."""

    def decode(self, encoded: Sequence[Encoded], sides: Sides, reader: torch.cuda.Stream | None) -> Decoded | None:
        """The images, of these sides, for use on stream `reader`; None when one of them is refused.

        Their frame headers say the same sides. An engine may write whenever it likes, so memory once handed out must
        stay until the device has read it.
        """


class Hardware:
    """The hardware decoder, which the larger GPUs have."""

    def __init__(self, device: torch.device) -> None:
        self._decoder = HardwareDecoder(device)

    def decode(self, encoded: Sequence[Encoded], sides: Sides, reader: torch.cuda.Stream | None) -> Decoded | None:
        """As `Engine`; complete when it returns, so no stream has to wait."""
        pixels = self._decoder.decode([bytes(item) for item in encoded], sides)
        if pixels is None:
            return None
        slab, starts = pixels
        return Decoded(slab.data_ptr() + starts, interleaved(sides[:, 1]), [slab])


class Torchvision:
    """torchvision's decoder; threads decode one after the other, which is all that it allows."""

    def __init__(self, device: torch.device) -> None:
        from torchvision.io import ImageReadMode, decode_jpeg

        # Nobody writes to encoded images, and copies of them would cost the training step time.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        self._decode_jpeg, self._mode = decode_jpeg, ImageReadMode.RGB
        self._device = device
        # nvJPEG writes on a stream of its own, which waits for nobody, into memory that is free in the order of the
        # stream given here. So this one is used for nothing else.
        self._stream = torch.cuda.Stream(device)
        self._decoding = threading.Lock()

    def decode(self, encoded: Sequence[Encoded], sides: Sides, reader: torch.cuda.Stream | None) -> Decoded | None:
        """As `Engine`."""
        try:
            data = [torch.frombuffer(item, dtype=torch.uint8) for item in encoded]
            with self._decoding, torch.cuda.stream(self._stream):
                planes: list[Tensor] = self._decode_jpeg(data, mode=self._mode, device=self._device)
                if reader:
                    reader.wait_event(self._stream.record_event())
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):  # a damaged image somewhere among them; the decode threads find out which
            return None
        if [tuple(plane.shape[1:]) for plane in planes] != list(map(tuple, sides.tolist())):
            return None
        addresses = np.array([plane.data_ptr() for plane in planes], np.int64)
        return Decoded(addresses, planar(sides[:, 0], sides[:, 1]), planes)


def open_engine(device: torch.device) -> Engine | None:
    """The quickest engine that decodes a JPEG here; None if none does."""
    probe = simplejpeg.encode_jpeg(np.zeros((PROBE_SIDE, PROBE_SIDE, 3), np.uint8))
    for kind in (Hardware, Torchvision):
        try:
            engine: Engine = kind(device)
            if engine.decode([probe], np.array([[PROBE_SIDE, PROBE_SIDE]]), None):
                return engine
        except (ImportError, AttributeError, OSError, RuntimeError):  # not installed, or for another device or PyTorch
            continue
    return None


@cache
def has_nvjpeg() -> bool:
    """Whether JPEGs can be decoded on a GPU here, found out by decoding one."""
    return torch.cuda.is_available() and open_engine(torch.device("cuda", torch.cuda.current_device())) is not None


class Nvjpeg:
    """nvJPEG on one device, with the images it must not write over."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    @staticmethod
    def can_decode(image: Loaded) -> bool:
        """Whether this is plain work: one scan in colour that ends where it should; libjpeg-turbo judges the others."""
        data, header = image.data, image.header
        is_whole = header.colors == "YCbCr" and bytes(data[-2:]) == b"\xff\xd9"
        return is_whole and read_frame(data) == Frame(False, header.height, header.width)

    def decode(self, images: list[Loaded], sides: Sides, reader: torch.cuda.Stream | None) -> Decoded | None:
        """As `Engine`."""
        return self._engine.decode([image.data for image in images], sides, reader)

    def hold(self, images: list[Tensor], until: torch.cuda.Event | None) -> None:
        """Keep images until the device has passed the event, and let go those whose event it has passed."""
        with self._lock:
            while self._held and self._held[0][1].query():
                self._held.popleft()
            if until:
                self._held.append((images, until))
