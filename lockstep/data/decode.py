"""Encoded bytes → uint8 image (step 3 on the walk).

JPEG goes through libjpeg-turbo without the GIL; what that refuses (CMYK, PNG, harmless irregularities) goes through
Pillow. Data sets hold damaged files, so every failure is a `DecodeError` that the pipeline handles sample by sample.
"""

import io
from collections.abc import Callable

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
Decoder = Callable[[bytes], Pixels]

# 200 MB of pixels: far beyond any photograph, small enough that a forged header cannot exhaust the memory.
MAX_PIXELS = 1 << 26


class DecodeError(Exception):
    """These bytes are not a usable image; the message is the reason."""


def decode(data: bytes) -> Pixels:
    """The image as height × width × RGB; greyscale and CMYK are converted."""
    if not data:
        raise DecodeError("the file is empty")
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        _refuse_huge(height, width)
        pixels: Pixels = simplejpeg.decode_jpeg(data)
        return pixels
    except ValueError:
        return _decode_with_pillow(data)


def _refuse_huge(height: int, width: int) -> None:
    """Raise before memory is taken for an image beyond MAX_PIXELS."""
    if height * width > MAX_PIXELS:
        raise DecodeError(f"{width} × {height} is more than {MAX_PIXELS} pixels")


def _decode_with_pillow(data: bytes) -> Pixels:
    """Any format Pillow reads; it knows that Adobe stores CMYK inverted."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            _refuse_huge(image.height, image.width)
            if image.mode.startswith("I;16"):
                # Pillow would clip 16-bit grey at 255, which is nearly white everywhere; keep the upper byte instead.
                return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
            return np.array(image.convert("RGB"))
    except DecodeError:
        raise
    except Exception as error:  # Pillow's readers raise nearly anything on damaged files
        raise DecodeError(str(error) or type(error).__name__) from error
