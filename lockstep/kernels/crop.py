"""Decoded images of any size → the batch, on the device: crop, resize, flip, normalise and cast in one pass.

`crop_resize` is one Triton kernel, `crop_resize_plain` the same in words PyTorch knows. The resize is the anti-aliased
bilinear one of Pillow and PyTorch (a triangle filter as wide as the scale), without their rounding in between: before
the cast it is within 0.01 levels of 255 of the exact result, and so within 1.5 of Pillow's, which is rounded twice.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.kernels import has_triton

# A row of the table, 8 bytes each. The window is the part of the image the filter may touch; the box, which is what
# is resized, lies within it and is given in the window's pixels. A flip is a window read from right to left.
ROW = np.dtype(
    [
        ("address", np.int64),  # of the window's first pixel
        ("row_stride", np.int64),  # bytes from a pixel to the one below, beside it, and of the next channel
        ("pixel_stride", np.int64),
        ("channel_stride", np.int64),
        ("height", np.int64),  # of the window
        ("width", np.int64),
        ("top", np.float64),  # of the box
        ("left", np.float64),
        ("box_height", np.float64),
        ("box_width", np.float64),
    ]
)
COLUMNS = ROW.itemsize // 8
# Boxes of images decoded at a reduced scale are computed, and a sliver of a pixel is a rounding error.
SLIVER = 1e-6


def interleaved(widths: ArrayLike) -> NDArray[np.int64]:
    """The strides of packed height × width × RGB images, as `crop_table` takes them."""
    widths = np.asarray(widths, np.int64)
    return np.stack([3 * widths, np.full_like(widths, 3), np.ones_like(widths)], axis=-1)


def planar(heights: ArrayLike, widths: ArrayLike, channels: int = 3) -> NDArray[np.int64]:
    """The strides of packed channels × height × width images; a single channel serves as all three."""
    heights, widths = np.asarray(heights, np.int64), np.asarray(widths, np.int64)
    plane = heights * widths if channels == 3 else np.zeros_like(widths)
    return np.stack([widths, np.ones_like(widths), plane], axis=-1)


def crop_table(
    addresses: ArrayLike, strides: ArrayLike, sides: ArrayLike, boxes: ArrayLike, flips: ArrayLike, *, confined: bool
) -> Tensor:
    """The table of N images, N × 10 on the host; send it to the device as it is.

    `addresses` (N) are those of the images' first pixels, `strides` (N × 3) bytes between rows, pixels and channels,
    `sides` (N × 2) heights and widths, `boxes` (N × 4) top, left, height and width in the image's pixels, whole or not.
    Confined, a crop is cut out before it is resized, as in training: no pixel beside it leaks in. Otherwise the filter
    sees the whole image, as if the image were resized and then cropped (Pillow's `resize(box=…)`), as in evaluation.
    """
    addresses, strides, sides = (np.asarray(values, np.int64) for values in (addresses, strides, sides))
    corner, extent = np.split(np.asarray(boxes, np.float64), 2, axis=1)
    first, last = np.zeros_like(sides), sides
    if confined:
        first = np.clip(np.floor(corner + SLIVER).astype(np.int64), 0, sides - 1)
        last = np.clip(np.ceil(corner + extent - SLIVER).astype(np.int64), first + 1, sides)
    window, corner = last - first, corner - first
    table = np.empty(len(addresses), ROW)
    table["address"] = addresses + (first * strides[:, :2]).sum(axis=1)
    table["row_stride"], table["pixel_stride"], table["channel_stride"] = strides.T
    table["height"], table["width"] = window.T
    table["top"], table["left"] = corner.T
    table["box_height"], table["box_width"] = extent.T
    flipped = np.asarray(flips, np.bool_)
    table["address"][flipped] += ((window[:, 1] - 1) * strides[:, 1])[flipped]
    table["pixel_stride"][flipped] *= -1
    table["left"][flipped] = (window[:, 1] - corner[:, 1] - extent[:, 1])[flipped]
    return torch.from_numpy(table.view(np.int64).reshape(-1, COLUMNS))


def crop_resize(table: Tensor, out: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Fill `out`, N × 3 × H × W in channels-last memory, from the images of the table, on the current stream.

    Table, images and `out` lie on one device; `out` is fp32, fp16 or bf16. The images must stay until it is done.
    """
    if not has_triton():
        raise LockstepError("Cropping images on the GPU needs Triton; install it with: pip install triton.")
    from lockstep.kernels.crop_kernel import BLOCK, crop_kernel

    count, channels, height, width = out.shape
    assert channels == 3
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert table.shape == (count, COLUMNS)
    assert table.is_contiguous()
    blocks = -(-height * width // BLOCK)
    scale, shift = _affine(mean, std)
    if count:
        crop_kernel[(blocks * count,)](table, out, height, width, blocks, *scale, *shift, BLOCK=BLOCK)


def crop_resize_plain(table: Tensor, out: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """`crop_resize` an image at a time in FP64, on any device."""
    scale, shift = (torch.tensor(values, dtype=torch.float64, device=out.device) for values in _affine(mean, std))
    for row, image in zip(table.cpu().numpy().view(ROW).ravel(), out, strict=True):
        window = _read_window(row, out.device).double()
        down = _weights(row["top"], row["box_height"], out.shape[2], row["height"]).to(out.device)
        across = _weights(row["left"], row["box_width"], out.shape[3], row["width"]).to(out.device)
        levels = torch.einsum("yh,hwc,xw->cyx", down, window, across)
        image.copy_(levels * scale[:, None, None] + shift[:, None, None])


def _weights(start: float, length: float, size: int, pixels: int) -> Tensor:
    """How much each pixel of a window counts for each output along one axis: size × pixels, rows adding up to 1."""
    scale = length / size
    centers = start + (torch.arange(size, dtype=torch.float64) + 0.5) * scale
    distances = torch.arange(pixels, dtype=torch.float64) + 0.5 - centers[:, None]
    weights = (1 - distances.abs() / max(scale, 1.0)).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)


def _affine(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """Scale and shift that take a level in 0…255 to (level / 255 - mean) / std."""
    return [1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]


class _Memory:
    """Bytes at an address, in the words NumPy and PyTorch understand."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        described: dict[str, Any] = {"data": (address, False), "shape": shape, "strides": strides, "typestr": "|u1"}
        self.__array_interface__ = described | {"version": 3}
        self.__cuda_array_interface__ = described | {"version": 2}


def _read_window(row: Any, device: torch.device) -> Tensor:
    """The window a row describes, height × width × 3."""
    address, pixel_stride, width = int(row["address"]), int(row["pixel_stride"]), int(row["width"])
    shape = (int(row["height"]), width, 3)
    strides = (int(row["row_stride"]), abs(pixel_stride), int(row["channel_stride"]))
    memory = _Memory(address + min(0, (width - 1) * pixel_stride), shape, strides)
    window = torch.as_tensor(memory, device=device) if device.type == "cuda" else torch.from_numpy(np.asarray(memory))
    return window.flip(1) if pixel_stride < 0 else window
