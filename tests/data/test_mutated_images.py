"""Images damaged at random: pixels or a DecodeError, in bounded time and memory, whatever the bytes say."""

import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.data.decode import FACTORS, MAX_PIXELS, DecodeError, decode, read_header
from tests.data.large_index import peak_mb
from tests.data.pictures import bomb_png, encode, huge_jpeg, huge_png, picture, planes_jpeg, repeat_scan

NUM_CASES = 1200
MAX_S = 4.0  # for one image; the largest allowed takes about one on a quiet machine
MAX_MB = 500  # of the whole process


def build_originals() -> list[bytes]:
    image = Image.fromarray(picture(64, 80))
    grey = np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)
    return [
        encode(image),
        encode(image, subsampling=2),
        encode(image, progressive=True),
        encode(image.convert("L"), subsampling=-1),
        encode(image.convert("CMYK"), subsampling=-1),
        encode(image, exif=b"Exif\0\0" + encode(image)),
        planes_jpeg([np.ascontiguousarray(plane) for plane in np.moveaxis(picture(64, 80), 2, 0)]),
        repeat_scan(encode(image, progressive=True), 50),
        *(encode(image.convert(mode), "PNG") for mode in ("RGB", "RGBA", "P", "L", "LA", "1")),
        encode(Image.fromarray(grey), "PNG"),
        bomb_png(64),
        huge_png(3000),
        huge_jpeg(1000),
        *other_images(image),
    ]


def other_images(image: Image.Image) -> list[bytes]:
    """Of every other format, in the modes that it has."""
    frames = {"save_all": True, "append_images": [image.convert("P")] * 3}
    return [
        encode(image, "WEBP", quality=80),
        encode(image, "WEBP", lossless=True),
        encode(image.convert("RGBA"), "WEBP", save_all=True, append_images=[image.convert("RGBA")] * 3),
        *(encode(image.convert(mode), "BMP") for mode in ("RGB", "P", "L", "1")),
        encode(image.convert("P"), "GIF"),
        encode(image.convert("P"), "GIF", comment=b"made " * 200, **frames),
        *(encode(image.convert(mode), "TIFF") for mode in ("RGB", "RGBA", "P", "L", "CMYK", "1")),
        *(encode(image, "TIFF", compression=kind) for kind in ("tiff_lzw", "tiff_adobe_deflate", "packbits")),
        encode(Image.fromarray(np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)), "TIFF"),
    ]


def flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 1, 2, 8])):
        data[chance.randrange(len(data))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])


def flip_head(data: bytearray, chance: random.Random) -> None:
    """Near the start, where sizes and kinds are."""
    for _ in range(chance.choice([1, 2, 4])):
        data[chance.randrange(min(len(data), 700))] = chance.choice([0, 1, 0xFF, chance.randrange(256)])


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(1, len(data)) :]


def drop(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.choice([1, 2, 50])]


def double(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    data[start:start] = data[start : start + chance.choice([1, 20, 400])]


def claim_size(data: bytearray, chance: random.Random) -> None:
    """Sides out of nowhere, with a right checksum."""
    sides = [chance.choice([0, 1, 7, 8, 255, 5792, 8192, 20_000, 65_500, 65_535, 2**31]) for _ in range(2)]
    if data[:4] == b"\x89PNG":
        data[16:24] = b"".join(side.to_bytes(4, "big") for side in sides)
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
        return
    frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    if frame > 0:
        data[frame + 5 : frame + 9] = b"".join((side % 65_536).to_bytes(2, "big") for side in sides)


CHANGES: list[Callable[[bytearray, random.Random], None]] = [flip, flip_head, cut, drop, double, claim_size, claim_size]


def run_cases() -> None:
    """All of them, in this process; what is bad in time or memory is an AssertionError."""
    originals = build_originals()
    num_good = 0
    for seed in range(NUM_CASES):
        chance = random.Random(seed)
        data = bytearray(originals[seed % len(originals)])
        for _ in range(chance.choice([1, 1, 1, 3])):
            if len(data) > 1:
                chance.choice(CHANGES)(data, chance)
        factor = chance.choice(FACTORS)
        start = time.process_time()
        try:
            header = read_header(bytes(data))
            factor = min(max(factor, header.min_factor), header.max_factor)
            pixels = decode(bytes(data), header, factor)
        except DecodeError:
            pass
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        else:
            num_good += 1
            assert pixels.shape == (-(-header.height // factor), -(-header.width // factor), 3), seed
            assert pixels.dtype == np.uint8
            assert 0 < pixels.size <= 3 * MAX_PIXELS, seed
        assert time.process_time() - start < MAX_S, seed
    used_mb = peak_mb()
    assert used_mb < MAX_MB, f"{used_mb:.0f} MB"
    assert 0.1 * NUM_CASES < num_good < 0.9 * NUM_CASES, num_good
    print(f"{num_good} of {NUM_CASES} still images, {used_mb:.0f} MB at most")


def test_a_damaged_image_is_pixels_or_one_error() -> None:
    """In a process of its own, so that its memory is its own and a crash is a failure of this test."""
    script = "from tests.data.test_mutated_images import run_cases; run_cases()"
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=root, capture_output=True, text=True, timeout=300
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    # libtiff alone says by itself what it finds in a damaged file.
    said = [line for line in ended.stderr.splitlines() if "tempfile.tif" not in line and "Decod" not in line]
    assert not said


@pytest.mark.parametrize("side", [0, 1, 2**31, 2**32 - 1])
def test_a_png_of_impossible_sides_is_refused(side: int) -> None:
    data = bytearray(huge_png(8))
    data[16:20] = side.to_bytes(4, "big")
    with pytest.raises(DecodeError):
        decode(bytes(data))
