"""Crop, resize, flip, normalise (step 4 on the walk): decoded image → a square of the batch → network input.

Where the crops lie is decided here for both paths; the rest is how the CPU does it, a GPU has `kernels/crop.py`.

Every draw is a hash of (seed, epoch, sample), so a sample looks the same whichever rank or thread prepares it. Crops
are those of Szegedy et al. 2015 (arXiv 1409.4842, section 6).
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lockstep.data.decode import FACTORS, Pixels
from lockstep.data.order import Samples, mix

# Height and width of N images; top, left, height and width of N rectangles in an image's pixels, which are whole for
# training crops and may be fractions for evaluation.
Sides = NDArray[np.int64]
Boxes = NDArray[np.float64]
Shares = NDArray[np.float64]  # numbers in [0, 1), or what was made of them

# A crop that does not fit the image is drawn again this often before the central one is taken.
TRIES = 10
# Keep the draws of one kind apart from those of another, and all of them from the sample order.
CROP_STREAM, SHIFT_STREAM, ERASE_STREAM, POLICY_STREAM, MIX_STREAM = range(1, 6)


class Draws(NamedTuple):
    """The chance of N samples for one epoch, independent of the images' sizes."""

    crops: Shares  # N × TRIES × (share of the area, width / height, top and left as shares of what is free)
    flips: NDArray[np.bool_]


def draw_uniform(seed: int, epoch: int, stream: int, samples: Samples, count: int, first: int = 0) -> Shares:
    """Numbers in [0, 1) for each of N samples, N × count: those from the `first` on in a stream of their own."""
    bits = mix(seed, epoch, stream, samples[:, None], np.arange(first, first + count))
    uniform: Shares = (bits >> np.uint64(11)) * 2.0**-53
    return uniform


def draw_crops(
    seed: int,
    epoch: int,
    samples: Samples,
    area: tuple[float, float],
    ratio: tuple[float, float],
    flip: bool,
    flip_in_turn: bool = False,
) -> Draws:
    """The draws of many samples at once: area uniform, ratio log-uniform, flip even.

    In turn, a sample is drawn for epoch 0 and is then its other self in every other epoch (Jordan 2024, arXiv
    2404.00498): two epochs hold both of every sample, where by chance half of the samples come twice alike.
    """
    uniform = draw_uniform(seed, epoch, CROP_STREAM, samples, 4 * TRIES + 1)
    flips = uniform[:, -1] < 0.5
    if flip_in_turn:
        flips = (draw_uniform(seed, 0, CROP_STREAM, samples, 1, first=4 * TRIES)[:, 0] < 0.5) ^ bool(epoch % 2)
    return Draws(spread_crops(uniform[:, :-1], area, ratio), flips & flip)


def spread_crops(uniform: Shares, area: tuple[float, float], ratio: tuple[float, float]) -> Shares:
    """Numbers in [0, 1), N × 4 TRIES, as crops of these areas and ratios; the numbers are overwritten."""
    crops = uniform.reshape(-1, TRIES, 4)
    crops[..., 0] = area[0] + crops[..., 0] * (area[1] - area[0])
    crops[..., 1] = ratio[0] * (ratio[1] / ratio[0]) ** crops[..., 1]
    return crops


def random_crops(sides: Sides, crops: Shares, ratio: tuple[float, float]) -> Boxes:
    """Each image's first drawn crop that fits it, else its largest central one within the ratio's bounds."""
    boxes, fits = fit_crops(sides, crops)
    if not fits.all():
        none = ~fits
        height, width = sides[none].T
        largest = np.stack([np.rint(width / ratio[0]), np.rint(height * ratio[1])], axis=1)
        extent = np.clip(largest, 1, sides[none])
        boxes[none] = np.concatenate([(sides[none] - extent) // 2, extent], axis=1)
    return boxes


def fit_crops(sides: Sides, crops: Shares) -> tuple[Boxes, NDArray[np.bool_]]:
    """Each image's first drawn crop that fits it, and whether any does."""
    area, aspect, *place = np.moveaxis(crops, 2, 0)
    target = area * sides.prod(axis=1)[:, None]
    extents = np.rint(np.sqrt(np.stack([target / aspect, target * aspect], axis=2)))
    fits = ((extents > 0) & (extents <= sides[:, None])).all(axis=2)
    first = fits.argmax(axis=1)
    rows = np.arange(len(sides))
    extent = extents[rows, first]
    corner = np.floor(np.stack(place, axis=2)[rows, first] * (sides - extent + 1))
    return np.concatenate([corner, extent], axis=1), fits[rows, first]


def central_crops(sides: Sides, resize: int, size: int) -> Boxes:
    """What remains, in the image's own pixels, after "short side to `resize`, then the central `size` square"."""
    extent = np.repeat(sides.min(axis=1, keepdims=True) * size / resize, 2, axis=1)
    return np.concatenate([(sides - extent) / 2, extent], axis=1)


def choose_factors(boxes: Boxes, least: int, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """By how much each image is reduced while decoded: its crop keeps `least` pixels a side, if `bounds` allow."""
    room = boxes[:, 2:].min(axis=1) / least
    factors: NDArray[np.int64] = np.array(FACTORS)[np.searchsorted(FACTORS[1:], room, side="right")]
    return factors.clip(bounds[:, 0], bounds[:, 1])


def reduce_boxes(boxes: Boxes, factors: NDArray[np.int64], sides: Sides, whole: bool) -> Boxes:
    """The boxes in the pixels of images reduced to these `sides`; whole ones, if crops are cut out first."""
    reduced = boxes / factors[:, None]
    if not whole or (factors == 1).all():
        return reduced
    extent = np.clip(np.rint(reduced[:, 2:]), 1, sides)
    return np.concatenate([np.minimum(np.rint(reduced[:, :2]), sides - extent), extent], axis=1)


def resize_crop(image: Pixels, box: NDArray[np.float64], out: Pixels) -> None:
    """Crop whole pixels and resize them, bilinear and anti-aliased, into the square `out`."""
    top, left, height, width = map(int, box)
    source = torch.from_numpy(image[top : top + height, left : left + width])
    # This operator writes straight into the batch, 1.5 to 6 times as fast as Pillow and within a level of it, and runs
    # one image on one thread whatever the size of PyTorch's own pool.
    torch.ops.aten._upsample_bilinear2d_aa.out(
        source.permute(2, 0, 1)[None],
        out.shape[:2],
        False,
        None,
        None,
        out=torch.from_numpy(out).permute(2, 0, 1)[None],
    )


def mirror_into(image: Pixels, out: Pixels) -> None:
    """The image with left and right exchanged."""
    out.view("V3")[..., 0] = image.view("V3")[:, ::-1, 0]  # whole pixels move nearly twice as fast as bytes


def resize_central(image: Pixels, box: NDArray[np.float64], out: Pixels) -> None:
    """Resize a fractional box of the image, bilinear and anti-aliased, into the square `out`."""
    top, left, height, width = box
    edges = (left, top, left + width, top + height)
    out[:] = np.asarray(Image.fromarray(image).resize(out.shape[1::-1], Image.Resampling.BILINEAR, box=edges))


class Normalizer:
    """Levels in 0…255 → (level / 255 - mean) / std in NumPy: PyTorch would start threads of its own."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], width: int) -> None:
        # Rows rather than pixels in the inner loop: broadcasting over three channels is several times slower.
        self._scale = np.tile(1 / (255 * np.asarray(std)), width).astype(np.float32)
        self._shift = np.tile(-np.asarray(mean) / np.asarray(std), width).astype(np.float32)

    def normalize_into(self, image: Pixels, out: NDArray[np.float32]) -> None:
        """One image, height × width × RGB, into the same places of `out`."""
        rows = out.reshape(len(image), -1)
        np.multiply(image.reshape(rows.shape), self._scale, out=rows)
        np.add(rows, self._shift, out=rows)
