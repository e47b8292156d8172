"""TrivialAugment-Wide (Müller & Hutter 2021, arXiv 2103.10158): one operation of random strength a square (step 5).

Squares are whole levels, 0…255, height × width × RGB. `apply_operation` does one square by Pillow, which defines what
the operations are, and is the CPU's way; `apply_operations` does a batch on its device, grouped by operation, and gives
the same levels: sums and products are Pillow's, in whole numbers or in its own order of rounding. It is the plain
version of `kernels/retouch_kernel.py`, which is a GPU's way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from lockstep.data.augment import POLICY_STREAM, draw_uniform
from lockstep.data.decode import Pixels
from lockstep.data.order import Samples

SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = range(1, 6)
BRIGHTNESS, COLOR, CONTRAST, SHARPNESS, POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE = range(6, 14)
MOVES = (SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE)
NUM_OPERATIONS = 14  # with 0, which leaves the square as it is
STRENGTHS = 31  # from none to the greatest, evenly
# The greatest strengths of the wide space: pixels per pixel, pixels, degrees, what an enhancement's factor adds to 1.
SHEAR, TRANSLATION, ROTATION, ENHANCEMENT = 0.99, 32, 135, 0.99

ENHANCERS: dict[int, Callable[[Image.Image], Any]] = {
    BRIGHTNESS: ImageEnhance.Brightness,
    COLOR: ImageEnhance.Color,
    CONTRAST: ImageEnhance.Contrast,
    SHARPNESS: ImageEnhance.Sharpness,
}


Change = Callable[[Tensor, Tensor], Tensor]  # squares, N × 6 amounts -> squares


class Operations(NamedTuple):
    """What is done to N squares."""

    kinds: NDArray[np.int64]
    # Shear, pixels, degrees; an enhancement's factor; bits that stay; the level from which on levels are inverted.
    amounts: NDArray[np.float64]

    def select(self, rows: slice) -> "Operations":
        """Those of some rows."""
        return Operations(self.kinds[rows], self.amounts[rows])


def draw_operations(seed: int, epoch: int, samples: Samples) -> Operations:
    """One of the operations for each sample, all equally likely, as is every strength and, where there is one, sign."""
    kind, strength, sign = draw_uniform(seed, epoch, POLICY_STREAM, samples, 3).T
    kinds = (kind * NUM_OPERATIONS).astype(np.int64)
    return Operations(kinds, plan_amounts(kinds, (strength * STRENGTHS).astype(np.int64), sign < 0.5))


def plan_amounts(
    kinds: NDArray[np.int64], strengths: NDArray[np.int64], negative: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """What strengths 0…30 mean for each operation."""
    part = strengths / (STRENGTHS - 1)
    sign = np.where(negative, -1.0, 1.0)
    choices = [
        (np.isin(kinds, (SHEAR_X, SHEAR_Y)), sign * SHEAR * part),
        (np.isin(kinds, (TRANSLATE_X, TRANSLATE_Y)), sign * np.floor(TRANSLATION * part)),
        (kinds == ROTATE, sign * ROTATION * part),
        (np.isin(kinds, tuple(ENHANCERS)), 1 + sign * ENHANCEMENT * part),
        (kinds == POSTERIZE, 8 - np.rint(6 * part)),
        (kinds == SOLARIZE, 255 * (STRENGTHS - 1 - strengths) / (STRENGTHS - 1)),
    ]
    return np.select([where for where, _ in choices], [amounts for _, amounts in choices])


def plan_moves(kinds: NDArray[np.int64], amounts: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """N × 6: where each pixel (x, y) of the result lies in the square, (a x + b y + c, d x + e y + f)."""
    moves = np.tile(np.array([1.0, 0, 0, 0, 1, 0]), (len(kinds), 1))
    for kind, place in ((SHEAR_X, 1), (SHEAR_Y, 3), (TRANSLATE_X, 2), (TRANSLATE_Y, 5)):
        moves[kinds == kind, place] = amounts[kinds == kind]
    turned = kinds == ROTATE
    angles = -np.radians(amounts[turned])
    # Rounded as Pillow does: a right angle is one.
    cos, sin = np.round(np.cos(angles), 15), np.round(np.sin(angles), 15)
    middle = size / 2
    shift_x, shift_y = (cos * -middle + sin * -middle) + middle, (-sin * -middle + cos * -middle) + middle
    moves[turned] = np.stack([cos, sin, shift_x, -sin, cos, shift_y], axis=1)
    return moves


def fix_moves(moves: NDArray[np.float64]) -> NDArray[np.int64]:
    """The same from the middles of pixels, in Pillow's fixed-point numbers of 16 bits behind the point."""
    fixed = moves.copy()
    for first, last in ((0, 2), (3, 5)):
        fixed[:, last] = moves[:, last] + moves[:, first] * 0.5 + moves[:, first + 1] * 0.5
    return np.floor(fixed * 65536 + 0.5).astype(np.int64)


def apply_operation(square: Pixels, kind: int, amount: float) -> Pixels:
    """One operation on one square, by Pillow."""
    if not kind:
        return square
    image = Image.fromarray(square)
    if kind in MOVES:
        matrix = plan_moves(np.array([kind]), np.array([amount]), len(square))[0]
        image = image.transform(image.size, Image.Transform.AFFINE, tuple(matrix.tolist()))
    elif kind in ENHANCERS:
        image = ENHANCERS[kind](image).enhance(amount)
    elif kind == POSTERIZE:
        image = ImageOps.posterize(image, int(amount))
    elif kind == SOLARIZE:
        image = ImageOps.solarize(image, amount)  # type: ignore[arg-type]  # compared with levels, and may be a fraction
    else:
        image = (ImageOps.autocontrast if kind == AUTOCONTRAST else ImageOps.equalize)(image)
    return np.asarray(image)


def apply_operations(squares: Tensor, operations: Operations, send: Callable[[Tensor], Tensor]) -> None:
    """Each square's operation on N × size × size × RGB levels, in place; `send` brings an array to their device.

    The host knows which rows an operation has, and never waits for the device.
    """
    changes: list[tuple[tuple[int, ...], Change]] = [(MOVES, _move), *(((kind,), CHANGES[kind]) for kind in CHANGES)]
    groups = [(np.flatnonzero(np.isin(operations.kinds, kinds)), change) for kinds, change in changes]
    order = np.concatenate([rows for rows, _ in groups])
    amounts = np.zeros((len(order), 6))
    amounts[:, 0] = operations.amounts[order]
    moved = groups[0][0]
    moves = plan_moves(operations.kinds[moved], operations.amounts[moved], squares.shape[1])
    amounts[: len(moved)] = fix_moves(moves)
    there, values = send(torch.from_numpy(order)), send(torch.from_numpy(amounts))
    start = 0
    for rows, change in groups:
        part = slice(start, start := start + len(rows))
        if len(rows):
            squares[there[part]] = change(squares[there[part]], values[part])


def _move(squares: Tensor, moves: Tensor) -> Tensor:
    """Nearest pixels by Pillow's fixed-point numbers, black where there is none."""
    count, size = squares.shape[:2]
    a, b, c, d, e, f = moves.long()[:, :, None, None].unbind(1)
    steps = torch.arange(size, device=squares.device)
    across, down = steps[None, None, :], steps[None, :, None]
    x, y = (a * across + b * down + c) >> 16, (d * across + e * down + f) >> 16
    is_inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
    places = (y.clamp(0, size - 1) * size + x.clamp(0, size - 1)).view(count, -1, 1).expand(-1, -1, 3)
    found = squares.reshape(count, -1, 3).gather(1, places).view(squares.shape)
    return found * is_inside[..., None]


def _blend(low: Tensor, squares: Tensor, factors: Tensor) -> Tensor:
    """Between `low` and the squares, or beyond them, in FP32 and cut off, as Pillow blends."""
    low, high = low.float(), squares.float()
    blended = (high - low) * factors[:, 0].float()[:, None, None, None] + low
    return blended.clamp(0, 255).to(torch.uint8)


def _brighten(squares: Tensor, factors: Tensor) -> Tensor:
    return _blend(torch.zeros_like(squares), squares, factors)


def _grey(squares: Tensor) -> Tensor:
    red, green, blue = squares.int().unbind(-1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16)[..., None]


def _color(squares: Tensor, factors: Tensor) -> Tensor:
    return _blend(_grey(squares), squares, factors)


def _contrast(squares: Tensor, factors: Tensor) -> Tensor:
    grey = _grey(squares).flatten(1)
    count = grey.shape[1]
    mean = (2 * grey.sum(dim=1) + count) // (2 * count)
    return _blend(mean[:, None, None, None], squares, factors)


def _sharpen(squares: Tensor, factors: Tensor) -> Tensor:
    smooth = squares.int()
    if squares.shape[1] > 2:  # the outermost pixels stay
        rows = smooth[:, :-2] + smooth[:, 1:-1] + smooth[:, 2:]
        sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * smooth[:, 1:-1, 1:-1]
        smooth[:, 1:-1, 1:-1] = (2 * sums + 13) // 26  # the nearest to a thirteenth, of which none is halfway
    return _blend(smooth, squares, factors)


def _posterize(squares: Tensor, bits: Tensor) -> Tensor:
    masks = 256 - 2 ** (8 - bits[:, 0].long())
    return squares & masks.to(torch.uint8)[:, None, None, None]


def _solarize(squares: Tensor, thresholds: Tensor) -> Tensor:
    return torch.where(squares < thresholds[:, 0, None, None, None], squares, 255 - squares)


def _look_up(squares: Tensor, tables: Tensor) -> Tensor:
    """Levels by a table for each square and channel, N × 256 × 3."""
    flat = squares.reshape(len(squares), -1, 3)
    return tables.clamp(0, 255).to(torch.uint8).gather(1, flat.long()).view(squares.shape)


def _stretch(squares: Tensor, _: Tensor) -> Tensor:
    low, high = (found.double()[:, None] for found in squares.flatten(1, 2).aminmax(dim=1))
    scale = torch.full_like(low, 255) / (high - low).clamp(min=1)  # of a number PyTorch would take the reciprocal
    levels = torch.arange(256, dtype=torch.float64, device=squares.device)[None, :, None]
    return _look_up(squares, torch.where(high > low, levels * scale + -low * scale, levels).trunc())


def _equalize(squares: Tensor, _: Tensor) -> Tensor:
    flat = squares.reshape(len(squares), -1, 3).long()
    counts = flat.new_zeros(len(squares), 256, 3)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    last = counts.gather(1, flat.amax(dim=1, keepdim=True))
    step = (flat.shape[1] - last) // 255
    below = counts.cumsum(dim=1) - counts
    levels = torch.arange(256, device=squares.device)[None, :, None]
    return _look_up(squares, torch.where(step > 0, (step // 2 + below) // step.clamp(min=1), levels))


CHANGES: dict[int, Change] = {
    BRIGHTNESS: _brighten,
    COLOR: _color,
    CONTRAST: _contrast,
    SHARPNESS: _sharpen,
    POSTERIZE: _posterize,
    SOLARIZE: _solarize,
    AUTOCONTRAST: _stretch,
    EQUALIZE: _equalize,
}
