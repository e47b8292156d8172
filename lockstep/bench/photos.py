"""Photo-like JPEGs for measuring input without a data set: about 500 × 375 and 120 kB, as photographs on the web are.

What a decoder's time depends on is how many pixels and how many bits there are, so soft shading, hard edges and grain
are mixed until the files are as long as those of photographs.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from lockstep.data.decode import Pixels
from lockstep.data.generated import build_cached
from lockstep.data.sources import Source

LONG_SIDE, SHORT_SIDE = 500, 375  # pixels
QUALITY = 93
GRAIN_LEVELS = 10.0
EDGES = 12
CLASSES = 1000  # that repeated photos pretend to show


def build_photos(cache: Path, count: int, progress: Callable[[int, int], None] | None = None) -> Path:
    """A folder of `count` photos, built on first use; photo k is the same whatever the count."""

    def write(folder: Path) -> None:
        for number in range(count):
            chroma = "420" if number % 5 == 0 else "444"  # as in ImageNet, where most keep all of their colour
            jpeg = simplejpeg.encode_jpeg(render_photo(number), quality=QUALITY, colorsubsampling=chroma)
            (folder / f"{number:04d}.jpeg").write_bytes(jpeg)
            if progress:
                progress(number + 1, count)

    return build_cached(cache, f"photos-v1-{count}", write)


def render_photo(number: int) -> Pixels:
    """One photo: three in four lie, the others stand."""
    random = np.random.default_rng(number)
    height, width = (LONG_SIDE, SHORT_SIDE) if number % 4 == 0 else (SHORT_SIDE, LONG_SIDE)
    levels = np.full((height, width, 3), random.uniform(90, 160), np.float32)
    for cells, contrast in ((3, 60.0), (12, 30.0), (60, 15.0)):
        levels += contrast * _shade(random, cells, height, width)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    for _ in range(EDGES):
        middle_y, middle_x, angle = random.uniform(0, height), random.uniform(0, width), random.uniform(0, np.pi)
        distance = (y - middle_y) * np.float32(np.cos(angle)) + (x - middle_x) * np.float32(np.sin(angle))
        inside = (distance > 0) & (distance < random.uniform(5, 60))
        levels[inside] += random.uniform(-60, 60, 3).astype(np.float32)
    levels += GRAIN_LEVELS * random.standard_normal((height, width, 1), np.float32)
    return np.clip(levels, 0, 255).astype(np.uint8)


def _shade(random: np.random.Generator, cells: int, height: int, width: int) -> NDArray[np.float32]:
    """Soft noise in about [-1, 1], `cells` bumps across."""
    coarse = random.uniform(0, 255, (cells, cells, 3)).astype(np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(smooth, np.float32) / np.float32(127.5) - np.float32(1)


class Repeated:
    """A source of any length out of a few images, over and over."""

    classes = tuple(map(str, range(CLASSES)))

    def __init__(self, source: Source, num_samples: int) -> None:
        self._source = source
        self.num_samples = num_samples
        self.labels: NDArray[np.int64] = np.arange(num_samples) % CLASSES

    def read(self, index: int) -> bytes:
        return self._source.read(index % self._source.num_samples)

    def name(self, index: int) -> str:
        return self._source.name(index % self._source.num_samples)
