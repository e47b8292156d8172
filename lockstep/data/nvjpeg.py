"""Encoded JPEGs → planar images on the GPU, many at once, by nvJPEG through torchvision, where that is installed."""

import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from lockstep.data.jpeg_frame import Encoded, read_frame
from lockstep.data.reader import Loaded

# Images of one call: enough to keep nvJPEG's engines busy, few enough that a batch need not wait long for one.
MAX_IMAGES = 64
# One reads and parses images while the other's are decoded.
NUM_THREADS = 2
RGB = 3  # torchvision's ImageReadMode
Decode = Callable[[list[Tensor], int, torch.device], list[Tensor]]


@cache
def has_nvjpeg() -> bool:
    """Whether JPEGs can be decoded on a GPU here, found out by decoding one."""
    if not torch.cuda.is_available() or find_spec("torchvision") is None:
        return False
    probe = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    try:
        nvjpeg = Nvjpeg(torch.device("cuda", torch.cuda.current_device()))
        return nvjpeg.decode([probe], None) is not None
    except (ImportError, OSError, AttributeError, RuntimeError):  # one for another PyTorch, or built without nvJPEG
        return False


def load_decode() -> Decode:
    """torchvision's decoder, from its library alone: the whole package takes seconds to import, for every rank."""
    found = find_spec("torchvision")  # does not import it
    folders = found.submodule_search_locations if found else None
    library = next((file for folder in folders or () for file in Path(folder).glob("image*.so")), None)
    if library is not None:
        torch.ops.load_library(str(library))
    else:  # laid out differently: its own code knows where
        import torchvision.io  # noqa: F401
    decode: Decode = torch.ops.image.decode_jpegs_cuda
    return decode


class Nvjpeg:
    """nvJPEG on one device; threads decode one after the other, which is all that torchvision allows."""

    def __init__(self, device: torch.device) -> None:
        # Nobody writes to encoded images, and copies of them would cost the training step time.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        self._decode = load_decode()
        self._device = device
        # nvJPEG writes on a stream of its own, which waits for nobody, into memory that is free in the order of the
        # stream given here. So this one is used for nothing else, and images are let go only when they were cropped.
        self._stream = torch.cuda.Stream(device)
        self._held: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()
        self._lock = threading.Lock()
        self._decoding = threading.Lock()

    @staticmethod
    def can_decode(image: Loaded) -> bool:
        """Whether this is plain work: one scan in colour that ends where it should; libjpeg-turbo judges the others."""
        data = image.data
        return (
            image.header.colors == "YCbCr" and bytes(data[-2:]) == b"\xff\xd9" and not read_frame(data).has_many_scans
        )

    def decode(self, encoded: list[Encoded], reader: torch.cuda.Stream | None) -> list[Tensor] | None:
        """The images, 3 × height × width, for use on stream `reader`; None when nvJPEG refuses one of them."""
        if not encoded:
            return []
        data = [torch.frombuffer(item, dtype=torch.uint8) for item in encoded]
        try:
            with self._decoding, torch.cuda.stream(self._stream):
                planes = self._decode(data, RGB, self._device)
                if reader:
                    reader.wait_event(self._stream.record_event())
                return planes
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a damaged image somewhere among them; the decode threads find out which
            return None

    def hold(self, images: list[Tensor], until: torch.cuda.Event | None) -> None:
        """Keep images until the device has passed the event, and let go those whose event it has passed."""
        with self._lock:
            while self._held and self._held[0][1].query():
                self._held.popleft()
            if until:
                self._held.append((images, until))
