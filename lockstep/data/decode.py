"""Encoded bytes → uint8 image on the host (step 3 on the walk).

JPEG goes through libjpeg-turbo without the GIL, at half, a quarter or an eighth of its size where that is enough; what
it refuses (CMYK, PNG, harmless irregularities) goes through Pillow, and so do WebP, BMP, TIFF and a GIF's first
picture. Data sets hold damaged files, so every failure is a `DecodeError` that the pipeline handles sample by sample.
What would take much memory or time is refused by its header (`jpeg_frame.py` walks that of a JPEG, `other_formats.py`
those of the odd ones): one sample must not hold up a step of all ranks.
"""

import io
import struct
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from lockstep.data.jpeg_frame import START_OF_SCAN, Encoded, Frame, find_end, read_frame
from lockstep.data.other_formats import is_whole, read_sides, tidy_tiff

Pixels = NDArray[np.uint8]

# 200 MB of pixels: far beyond any photograph, small enough that a forged header cannot exhaust the memory.
MAX_PIXELS = 1 << 26
# Pillow holds four bytes of a pixel beside the three of the result, so that it gets half as many.
PILLOW_SHARE = 2
# Of these it holds one canvas or more beside the image, and converts without rows.
OTHER_SHARE = 4
PILLOW_ROWS = 64  # converted at a time: the image as a whole would take as much memory again
# Photographs have up to a dozen; each takes as long as a whole image, so that the largest images may have sixteen.
MAX_SCANS, MAX_SCAN_PIXELS = 100, 1 << 30
# All that a data set may hold; Pillow would start other programs for some of the formats it knows.
FORMATS = ("JPEG", "PNG")
# Pixels of other kinds, such as floating-point numbers, have no colours that anybody could know.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
PNG_SIGNATURE, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
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


def count_bytes(header: Header) -> int:
    """What an image takes when it is decoded at its full size."""
    return 3 * header.height * header.width


def read_header(data: Encoded) -> Header:
    """Size and kind of an encoded image; DecodeError when no scale of it stays within MAX_PIXELS and MAX_SCANS."""
    if not len(data):
        raise DecodeError("the file is empty")
    if bytes(data[:8]) == PNG_SIGNATURE:
        return _build_pillow_header(*_read_png_size(data))
    if data[0] != 0xFF:  # which a JPEG starts with
        try:
            other = read_sides(data)
        except ValueError as error:
            raise DecodeError(str(error)) from error
        if other:
            return _build_pillow_header(other.height, other.width, OTHER_SHARE)
    frame = read_frame(data)
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        (height, width), colors = _read_size_with_pillow(data), "CMYK"
    header = _build_jpeg_header(frame, height, width, colors, len(data))
    _check_scans(data, frame, height * width)
    return header


def _build_jpeg_header(frame: Frame, height: int, width: int, colors: str, num_bytes: int) -> Header:
    """Who decodes a JPEG, and at which scales."""
    if colors in ("CMYK", "YCCK"):
        return _build_pillow_header(height, width)
    if frame.is_too_short(height * width, num_bytes):
        raise DecodeError(f"{num_bytes:,} bytes cannot hold its {width} × {height} pixels")
    factors: tuple[int, ...] = FACTORS
    if frame.has_many_scans:
        factors = FACTORS[:1]  # all its coefficients are kept until the last scan, whatever the scale
    return Header(height, width, colors, _min_factor(height, width, factors), FACTORS[-1])


def _check_scans(data: Encoded, frame: Frame, num_pixels: int) -> None:
    """Refuse a JPEG that would be decoded over and over."""
    if frame.has_many_scans:
        allowed = min(MAX_SCANS, MAX_SCAN_PIXELS // max(1, num_pixels))
        if bytes(data).count(START_OF_SCAN) > allowed:
            raise DecodeError(f"more than {allowed} scans")


def is_ended(data: Encoded) -> bool:
    """Whether an image ends as its kind does; where it does not, only decoding tells whether something is missing."""
    if bytes(data[:8]) == PNG_SIGNATURE:
        return PNG_END in bytes(data[-64:])
    other = read_sides(data)
    return is_whole(data, other.kind) if other else find_end(data)


def _build_pillow_header(height: int, width: int, share: int = PILLOW_SHARE) -> Header:
    """The header of what Pillow decodes, at its full size."""
    _check_for_pillow(height, width, share)
    return Header(height, width, "", 1, 1)


def _check_for_pillow(height: int, width: int, share: int = PILLOW_SHARE) -> None:
    if height * width > MAX_PIXELS // share:
        raise DecodeError(f"{width} × {height} is more than {MAX_PIXELS // share} pixels")


def _read_png_size(data: Encoded) -> tuple[int, int]:
    """Height and width as a PNG's first chunk has them."""
    if len(data) < 24 or bytes(data[12:16]) != b"IHDR":
        raise DecodeError("its header is damaged")
    width, height = struct.unpack(">II", data[16:24])
    if not height or not width:
        raise DecodeError("it has no pixels")
    return height, width


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


def _min_factor(height: int, width: int, factors: tuple[int, ...]) -> int:
    """The least factor at which an image stays within MAX_PIXELS."""
    for factor in factors:
        if -(-height // factor) * -(-width // factor) <= MAX_PIXELS:
            return factor
    raise DecodeError(f"{width} × {height} is more than {MAX_PIXELS} pixels")


def _read_size_with_pillow(data: Encoded) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except Exception as error:  # Pillow's readers raise nearly anything on damaged files
        raise DecodeError(_reason(error)) from error


def _decode_with_pillow(data: Encoded, factor: int) -> Pixels:
    """An image of any kind; Pillow knows that Adobe stores CMYK inverted."""
    try:
        other = read_sides(data)
        if other:
            data = tidy_tiff(data) if other.kind == "TIFF" else data
        with Image.open(io.BytesIO(data), formats=(other.kind,) if other else FORMATS) as image:
            # One that only a reduced scale would have made bearable.
            _check_for_pillow(image.height, image.width, OTHER_SHARE if other else PILLOW_SHARE)
            if other and not image.mode.startswith("I;16") and image.mode not in MODES:
                raise DecodeError(f"pixels of mode {image.mode} are not read; save it as 8-bit RGB or grey")
            if image.mode.startswith("I;16"):
                # Pillow would clip 16-bit grey at 255, which is nearly white everywhere; keep the upper byte instead.
                return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
            if factor > 1:
                return np.array(image.convert("RGB").reduce(factor))
            return _convert_by_rows(image)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(_reason(error)) from error


def _convert_by_rows(image: Image.Image) -> Pixels:
    """The image as RGB, a few rows at a time."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, PILLOW_ROWS):
        rows = image.crop((0, top, image.width, min(top + PILLOW_ROWS, image.height)))
        pixels[top : top + PILLOW_ROWS] = np.asarray(rows.convert("RGB"))
    return pixels


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "no image of a kind that is read"  # its own words name an object in memory
    return str(error) or type(error).__name__
