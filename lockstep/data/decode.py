"""Encoded bytes → uint8 image on the host (step 3 on the walk).

JPEG goes through libjpeg-turbo without the GIL, at half, a quarter or an eighth of its size where that is enough; what
it refuses (CMYK, PNG, harmless irregularities) goes through Pillow. Data sets hold damaged files, so every failure is a
`DecodeError` that the pipeline handles sample by sample.
"""

import io
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

Pixels = NDArray[np.uint8]
Encoded = bytes | memoryview

# 200 MB of pixels: far beyond any photograph, small enough that a forged header cannot exhaust the memory.
MAX_PIXELS = 1 << 26
# The reduced scales that a JPEG decoder reaches by leaving work out; those in between take longer than the whole image.
FACTORS = (1, 2, 4, 8)


class DecodeError(Exception):
    """These bytes are not a usable image; the message is the reason."""


class Header(NamedTuple):
    """What can be known of an image without decoding it."""

    height: int
    width: int
    colors: str  # as libjpeg-turbo calls them; "" for what goes through Pillow
    min_factor: int  # the image may be decoded at 1 / min_factor to 1 / max_factor of its size
    max_factor: int


def read_header(data: Encoded) -> Header:
    """Size and kind of an encoded image; DecodeError when no scale of it stays within MAX_PIXELS."""
    if not len(data):
        raise DecodeError("the file is empty")
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        colors = "CMYK"
    if colors in ("CMYK", "YCCK"):
        height, width = _read_size_with_pillow(data)
        return Header(height, width, "", _min_factor(height, width, FACTORS[:1]), 1)
    factors: tuple[int, ...] = FACTORS
    if height * width > MAX_PIXELS and is_progressive(data):
        factors = FACTORS[:1]  # all its coefficients are kept until the last scan, whatever the scale
    return Header(height, width, colors, _min_factor(height, width, factors), FACTORS[-1])


def decode(data: Encoded, header: Header | None = None, factor: int = 1, buffer: Pixels | None = None) -> Pixels:
    """The image as height × width × RGB, sides divided by `factor` and rounded up; greyscale and CMYK are converted.

    It is reduced further where only that stays within MAX_PIXELS. With a `buffer`, a flat array with room for it, the
    image lies in there.
    """
    height, width, colors, min_factor, _ = header or read_header(data)
    factor = max(factor, min_factor)
    height, width = -(-height // factor), -(-width // factor)
    if colors:
        sides = {"min_height": height, "min_width": width} if factor > 1 else {}
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(data, buffer=buffer, **sides)
            return pixels
        except ValueError:
            pass
    pixels = _decode_with_pillow(data, factor)
    if pixels.shape != (height, width, 3):
        raise DecodeError("its header contradicts its contents")
    if buffer is None:
        return pixels
    inside = buffer[: pixels.size].reshape(pixels.shape)
    inside[:] = pixels
    return inside


def is_progressive(data: Encoded) -> bool:
    """Whether a JPEG comes in several scans: read off its frame header, found by walking from segment to segment.

    What cannot be walked is taken for progressive, which is the more careful guess.
    """
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # these three are tables, not frames
            return marker & 3 == 2
        else:
            at += 2 + 256 * data[at + 2] + data[at + 3]
    return True


def _min_factor(height: int, width: int, factors: tuple[int, ...]) -> int:
    """The least factor at which an image stays within MAX_PIXELS."""
    for factor in factors:
        if -(-height // factor) * -(-width // factor) <= MAX_PIXELS:
            return factor
    raise DecodeError(f"{width} × {height} is more than {MAX_PIXELS} pixels")


def _read_size_with_pillow(data: Encoded) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.height, image.width
    except Exception as error:  # Pillow's readers raise nearly anything on damaged files
        raise DecodeError(_reason(error)) from error


def _decode_with_pillow(data: Encoded, factor: int) -> Pixels:
    """Any format Pillow reads; it knows that Adobe stores CMYK inverted."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.height * image.width > MAX_PIXELS:  # one that only a reduced scale would have made bearable
                raise DecodeError(f"{image.width} × {image.height} is more than {MAX_PIXELS} pixels")
            if image.mode.startswith("I;16"):
                # Pillow would clip 16-bit grey at 255, which is nearly white everywhere; keep the upper byte instead.
                return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
            return np.array(image.convert("RGB").reduce(factor))
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "no format that Pillow knows"  # its own words name an object in memory
    return str(error) or type(error).__name__
