"""Crop, resize, flip, normalise (step 4 on the walk): decoded image → a square of the batch → network input.

Every draw is a hash of (seed, epoch, sample), so a sample looks the same whichever rank or thread prepares it. Crops
are those of Szegedy et al. 2015 (arXiv 1409.4842, section 6).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lockstep.data.decode import Pixels
from lockstep.data.order import Samples, mix

# A crop that does not fit the image is drawn again this often before the central one is taken.
TRIES = 10
# Keeps the words of this module's draws apart from those of the sample order.
CROP_STREAM = 1


class Box(NamedTuple):
    """A rectangle in an image's pixels; whole numbers for training crops, fractions for evaluation."""

    top: float
    left: float
    height: float
    width: float


class Draw(NamedTuple):
    """One sample's chance for one epoch: candidate crops, independent of the image's size, and the flip."""

    crops: list[list[float]]  # TRIES × (share of the area, width / height, top and left as shares of the free range)
    flip: bool


def draw_crops(
    seed: int, epoch: int, samples: Samples, area: tuple[float, float], ratio: tuple[float, float], flip: bool
) -> list[Draw]:
    """The draws of many samples at once: area uniform, ratio log-uniform, flip even."""
    bits = mix(seed, epoch, CROP_STREAM, samples[:, None], np.arange(4 * TRIES + 1))
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    crops = uniform[:, :-1].reshape(-1, TRIES, 4)
    crops[..., 0] = area[0] + crops[..., 0] * (area[1] - area[0])
    crops[..., 1] = ratio[0] * (ratio[1] / ratio[0]) ** crops[..., 1]
    flips = (uniform[:, -1] < 0.5) & flip
    return [Draw(*drawn) for drawn in zip(crops.tolist(), flips.tolist(), strict=True)]


def random_crop(height: int, width: int, draw: Draw, ratio: tuple[float, float]) -> Box:
    """The first drawn crop that fits the image, else the largest central one within the ratio's bounds."""
    for area, aspect, top, left in draw.crops:
        target = area * height * width
        crop_width, crop_height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            free_height, free_width = height - crop_height + 1, width - crop_width + 1
            return Box(int(top * free_height), int(left * free_width), crop_height, crop_width)
    crop_width = max(1, min(width, round(height * ratio[1])))
    crop_height = max(1, min(height, round(width / ratio[0])))
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def central_crop(height: int, width: int, resize: int, size: int) -> Box:
    """What remains, in the image's own pixels, after "short side to `resize`, then the central `size` square"."""
    side = min(height, width) * size / resize
    return Box((height - side) / 2, (width - side) / 2, side, side)


def resize_crop(image: Pixels, box: Box, out: Pixels, flip: bool) -> None:
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
    if flip:
        pixels = out.view("V3")[..., 0]  # whole pixels move nearly twice as fast as bytes
        pixels[:] = pixels[:, ::-1]


def resize_central(image: Pixels, box: Box, out: Pixels) -> None:
    """Resize a fractional box of the image, bilinear and anti-aliased, into the square `out`."""
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    out[:] = np.asarray(Image.fromarray(image).resize(out.shape[1::-1], Image.Resampling.BILINEAR, box=edges))


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 N × H × W × 3 → float32 (x / 255 - mean) / std as N × 3 × H × W in channels-last memory, on any device."""
    scale, shift = _affine(mean, std)
    pixels = images.permute(0, 3, 1, 2).float()
    weight = torch.from_numpy(scale).to(images.device).view(1, 3, 1, 1)
    bias = torch.from_numpy(shift).to(images.device).view(1, 3, 1, 1)
    return pixels.mul_(weight).add_(bias)


def normalize_into(images: Pixels, mean: tuple[float, ...], std: tuple[float, ...], out: NDArray[np.float32]) -> None:
    """`normalize` in NumPy, N × H × W × 3 throughout, for decode threads, where PyTorch would start its own threads."""
    count, height, width, channels = images.shape
    # Rows rather than pixels in the inner loop: broadcasting over three channels is several times slower.
    scale, shift = (np.tile(values, width) for values in _affine(mean, std))
    rows = out.reshape(count * height, width * channels)
    np.multiply(images.reshape(rows.shape), scale, out=rows)
    np.add(rows, shift, out=rows)


def _affine(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scale and shift that take a level in 0…255 to (level / 255 - mean) / std."""
    scale, shift = 1 / (255 * np.asarray(std)), -np.asarray(mean) / np.asarray(std)
    return scale.astype(np.float32), shift.astype(np.float32)
