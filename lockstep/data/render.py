"""Pictures of ten shapes, drawn in NumPy: what the generated data set holds.

The class is the shape alone. Colours, textures, pose, distractors and noise come from the same distributions in every
class, so that a weighted sum of pixels tells little of it. Edges are anti-aliased through signed distances.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lockstep.data.decode import Pixels
from lockstep.data.order import mix

Floats = NDArray[np.float32]

SIDE = 48  # pixels
DISTRACTORS = 3

# How far chance hides the shape: a linear classifier stays near 38 %. Full turns, evenly darker and lighter colours and
# more texture and noise bring it down to guessing, but then a small ResNet learns too slowly for a first run.
TILT = 0.6  # radians, either way
DARKER = 0.6  # reach of a shape's colour towards darker, where 1 is its reach towards lighter
TEXTURE_LEVELS = 20.0
NOISE_LEVELS = 8.0


def _length(x: Floats, y: Floats) -> Floats:
    """Distance from the origin, twice as fast as np.hypot, which guards against overflow."""
    length: Floats = np.sqrt(x * x + y * y)
    return length


def _capsule(x: Floats, y: Floats, half_length: float, radius: float) -> Floats:
    return _length(np.maximum(np.abs(x) - half_length, 0), y) - np.float32(radius)


def _rectangle(x: Floats, y: Floats, half_width: float, half_height: float) -> Floats:
    return np.maximum(np.abs(x) - np.float32(half_width), np.abs(y) - np.float32(half_height))


def _polygon(x: Floats, y: Floats, corners: int, inner: float) -> Floats:
    """A star with corners at radius 1 and notches at radius `inner`; within the wedge of a corner it is a line."""
    wedge = np.float32(math.pi / corners)
    angle = np.abs((np.arctan2(y, x) + wedge) % (2 * wedge) - wedge)
    radius = _length(x, y)
    inner_x, inner_y = inner * math.cos(wedge), inner * math.sin(wedge)
    edge = math.hypot(1 - inner_x, inner_y)
    along_x, along_y = radius * np.cos(angle) - np.float32(1), radius * np.sin(angle)
    distance: Floats = (along_x * np.float32(inner_y) + along_y * np.float32(1 - inner_x)) / np.float32(edge)
    return distance


# The classes, sorted by name: signed distance to the shape's edge, negative inside, in units of the shape's radius.
SHAPES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "bar": lambda x, y: _capsule(x, y, 0.8, 0.25),
    "corner": lambda x, y: np.minimum(
        _rectangle(x + np.float32(0.5), y, 0.25, 0.75), _rectangle(x, y - np.float32(0.5), 0.75, 0.25)
    ),
    "crescent": lambda x, y: np.maximum(
        _length(x, y) - np.float32(0.95), np.float32(0.75) - _length(x - np.float32(0.5), y)
    ),
    "cross": lambda x, y: np.minimum(_rectangle(x, y, 0.95, 0.25), _rectangle(x, y, 0.25, 0.95)),
    "disc": lambda x, y: _length(x, y) - np.float32(0.8),
    "pair": lambda x, y: _length(np.abs(x) - np.float32(0.6), y) - np.float32(0.4),
    "ring": lambda x, y: np.abs(_length(x, y) - np.float32(0.7)) - np.float32(0.2),
    "square": lambda x, y: _rectangle(x, y, 0.72, 0.72),
    "star": lambda x, y: _polygon(x, y, 5, 0.4),
    "triangle": lambda x, y: _polygon(x, y, 3, 0.5),
}
CLASSES = tuple(SHAPES)


class _Chance:
    """Numbered uniform draws, one for each image: a pure function of (split, image, draw number)."""

    def __init__(self, split: int, images: NDArray[np.int64]) -> None:
        self._key = mix(split, images)
        self._draw = 0

    def uniform(self, low: float, high: float) -> Floats:
        """One number for each image, shaped to broadcast over its pixels."""
        self._draw += 1
        share = (mix(self._key, self._draw) >> np.uint64(40)) * 2.0**-24
        values: Floats = (low + share * (high - low)).astype(np.float32)
        return values[:, None, None]


# Uniform noise in [-1, 1): an image takes a run of it from a random start, far cheaper than noise of its own.
NOISE: Floats = ((mix(np.arange(4 * SIDE * SIDE * 3)) >> np.uint64(40)) * 2.0**-23 - 1).astype(np.float32)
# The image spans [-1, 1] on both axes; coordinates are those of pixel centres.
PIXEL = 2 / SIDE
AXIS = (np.arange(SIDE, dtype=np.float32) + np.float32(0.5)) * np.float32(PIXEL) - np.float32(1)
X, Y = AXIS[None, None, :], AXIS[None, :, None]


def _texture(chance: _Chance) -> Floats:
    """Stripes, checks or a soft gradient in [-1, 1]: the product of two waves, the second often flat."""
    angle, pitch = chance.uniform(0, 2 * math.pi), chance.uniform(1, 14)
    wave = np.sin(pitch * (np.cos(angle) * X + np.sin(angle) * Y) + chance.uniform(0, 2 * math.pi))
    across = np.where(chance.uniform(0, 1) < 0.5, pitch, 0)
    texture: Floats = wave * np.cos(across * (np.cos(angle) * Y - np.sin(angle) * X))
    return texture


def _colors(chance: _Chance) -> tuple[list[Floats], list[Floats]]:
    """Two colours a fair distance apart in a random direction, as three channels each, levels 0…255."""
    middle = [chance.uniform(85, 170) for _ in range(3)]
    offset = [chance.uniform(-DARKER, 1) for _ in range(3)]
    length = np.sqrt(sum(channel * channel for channel in offset)) + np.float32(1e-3)
    reach = chance.uniform(55, 100)
    return (
        [m + reach * o / length for m, o in zip(middle, offset, strict=True)],
        [m - reach * o / length for m, o in zip(middle, offset, strict=True)],
    )


def _coverage(distance: Floats) -> Floats:
    """How much of each pixel lies inside an edge, from the distance to it: an anti-aliased mask."""
    coverage: Floats = np.clip(np.float32(0.5) - distance * np.float32(1 / PIXEL), 0, 1)
    return coverage


def _dot(chance: _Chance) -> tuple[Floats, list[Floats]]:
    """A distractor: the mask of a small disc anywhere, and its colour."""
    distance = _length(X - chance.uniform(-1, 1), Y - chance.uniform(-1, 1)) - chance.uniform(0.04, 0.12)
    return _coverage(distance), [chance.uniform(0, 255) for _ in range(3)]


def render(split: int, shape: str, images: NDArray[np.int64]) -> Pixels:
    """The images with these numbers of one split, all of one class, N × SIDE × SIDE × 3."""
    chance = _Chance(split, images)
    angle, radius = chance.uniform(-TILT, TILT), chance.uniform(0.55, 0.78)
    left, top = X - chance.uniform(-0.22, 0.22), Y - chance.uniform(-0.22, 0.22)
    cos, sin = np.cos(angle) / radius, np.sin(angle) / radius
    mask = _coverage(SHAPES[shape](cos * left + sin * top, cos * top - sin * left) * radius)
    inside, outside = _colors(chance)
    inner = _texture(chance) * chance.uniform(0, TEXTURE_LEVELS)
    outer = _texture(chance) * chance.uniform(0, TEXTURE_LEVELS)
    dots = [_dot(chance) for _ in range(DISTRACTORS)]
    pixels = np.empty((len(images), SIDE, SIDE, 3), np.float32)
    for channel in range(3):
        ground = outside[channel] + outer
        value = ground + mask * (inside[channel] + inner - ground)
        for dot, color in dots:
            value += dot * (color[channel] - value)
        pixels[..., channel] = value
    starts = (chance.uniform(0, 1).ravel() * (NOISE.size - SIDE * SIDE * 3)).astype(np.int64)
    noise = np.stack([NOISE[start : start + SIDE * SIDE * 3] for start in starts]).reshape(pixels.shape)
    return np.clip(pixels + np.float32(NOISE_LEVELS) * noise, 0, 255).astype(np.uint8)
