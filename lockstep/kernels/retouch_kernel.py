"""What `data/retouch.py` does to the squares of a batch, in three launches; its plain version is there (step 5).

    tables    square, channel → what becomes of each of 256 levels, where the operation goes by levels alone
    change    cropped square → shifted → its operation → normalised → part of it erased, straight into the batch
    mix       both of a pair at once, in place

A square does its own operation and no other: its row of the plan says which. Nothing is read that the same launch has
written, but the two pixels that a thread of `mix` has in its hands.

Levels are the plain version's, and Pillow's, to the last bit: whole numbers, or Pillow's own order of rounding.

Imported only to launch it, so that everything else works where Triton is not installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pixels of one program: of the result, and of those it counts at once.
BLOCK, COUNT_BLOCK = 512, 1024
# The plan has a row for each square, `data/retouch.py: ROW`; numbers that are not whole are the bits of an FP64.
COLUMNS = tl.constexpr(19)
# As `data/policy.py` numbers them; those before are moves, and so is what leaves a square as it is.
BRIGHTNESS, COLOR = tl.constexpr(6), tl.constexpr(7)
CONTRAST, SHARPNESS = tl.constexpr(8), tl.constexpr(9)
POSTERIZE, SOLARIZE = tl.constexpr(10), tl.constexpr(11)
AUTOCONTRAST = tl.constexpr(12)


@triton.jit
def _find(square, down, across, y, x, size):
    """Where the pixel (y, x) of the shifted square lies in the cropped one; beyond an end that one runs back."""
    y = size - 1 - tl.abs(size - 1 - tl.abs(y + down))
    x = size - 1 - tl.abs(size - 1 - tl.abs(x + across))
    return square + (y * size + x) * 3


@triton.jit
def _level(place):
    """The nearest whole level of what the crop has made."""
    return (tl.load(place) + 0.5).to(tl.int32)


@triton.jit
def _grey(red, green, blue):
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


@triton.jit
def _blend(low, level, factor):
    """Between `low` and the level, or beyond them, in FP32 and cut off, as Pillow blends."""
    start = low.to(tl.float32)
    blended = (level.to(tl.float32) - start) * factor + start
    return tl.minimum(tl.maximum(blended, 0.0), 255.0).to(tl.int32)


@triton.jit
def _smooth(square, down, across, y, x, red, green, blue, size):
    """Pillow's smoothing: the mean of 3 × 3 pixels, of which the middle counts fivefold; the outermost stay."""
    sum_red, sum_green, sum_blue = 4 * red, 4 * green, 4 * blue
    for tap in tl.static_range(9):
        near_y = tl.minimum(tl.maximum(y + (tap // 3 - 1), 0), size - 1)
        near_x = tl.minimum(tl.maximum(x + (tap % 3 - 1), 0), size - 1)
        place = _find(square, down, across, near_y, near_x, size)
        sum_red += _level(place)
        sum_green += _level(place + 1)
        sum_blue += _level(place + 2)
    # The nearest to a thirteenth, of which none is halfway.
    is_within = (y > 0) & (y < size - 1) & (x > 0) & (x < size - 1)
    red = tl.where(is_within, (2 * sum_red + 13) // 26, red)
    green = tl.where(is_within, (2 * sum_green + 13) // 26, green)
    blue = tl.where(is_within, (2 * sum_blue + 13) // 26, blue)
    return red, green, blue


@triton.jit
def _count(square, down, across, red_share, green_share, blue_share, size, BLOCK: tl.constexpr):
    """How many pixels of the shifted square have each level of a grey: shares are in 65536ths of a channel."""
    counts = tl.zeros([256], tl.int32)
    start = 0
    # `while`, as the interpreter of Triton 3.6 cannot count to a number that is not known beforehand under NumPy 2.4.
    while start < size * size:
        pixel = start + tl.arange(0, BLOCK)
        nearest = tl.minimum(pixel, size * size - 1)
        place = _find(square, down, across, nearest // size, nearest % size, size)
        red, green, blue = _level(place), _level(place + 1), _level(place + 2)
        level = (red * red_share + green * green_share + blue * blue_share + 32768) >> 16
        counts += tl.histogram(level, 256, mask=pixel < size * size)
        start += BLOCK
    return counts


@triton.jit
def _tables(squares, plan, tables, size, BLOCK: tl.constexpr):
    """What becomes of the levels of one channel of a square; unwritten where an operation asks for more than those."""
    number, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = plan + number * COLUMNS
    kind = tl.load(row).to(tl.int32)
    if (kind >= BRIGHTNESS) & (kind != COLOR) & (kind != SHARPNESS):
        square = squares + number * (size * size * 3)
        amount = tl.load(row + 1).to(tl.float64, bitcast=True)
        down, across = tl.load(row + 8).to(tl.int32), tl.load(row + 9).to(tl.int32)
        level = tl.arange(0, 256)
        table = level
        if kind == BRIGHTNESS:
            table = _blend(0 * level, level, amount.to(tl.float32))
        elif kind == POSTERIZE:
            bits = 8 - amount.to(tl.int32)
            table = (level >> bits) << bits
        elif kind == SOLARIZE:
            table = tl.where(level.to(tl.float64) < amount, level, 255 - level)
        elif kind == CONTRAST:
            counts = _count(square, down, across, 19595, 38470, 7471, size, BLOCK)  # as in `_grey`
            total = tl.sum(counts.to(tl.int64) * level)
            mean = (2 * total + size * size) // (2 * size * size)
            table = _blend(mean, level, amount.to(tl.float32))
        else:
            # One channel alone, as a grey that is all of it.
            red, green = tl.where(channel == 0, 65536, 0), tl.where(channel == 1, 65536, 0)
            counts = _count(square, down, across, red, green, 65536 - red - green, size, BLOCK)
            high = tl.max(tl.where(counts > 0, level, 0))
            if kind == AUTOCONTRAST:
                low = tl.min(tl.where(counts > 0, level, 255))
                scale = 255.0 / tl.maximum(high - low, 1).to(tl.float64)
                stretched = level.to(tl.float64) * scale + (-low).to(tl.float64) * scale
                stretched = tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32)
                table = tl.where(high > low, stretched, level)
            else:  # equalize
                step = (size * size - tl.sum(tl.where(level == high, counts, 0))) // 255
                spread = (step // 2 + tl.cumsum(counts, 0) - counts) // tl.maximum(step, 1)
                table = tl.where(step > 0, tl.minimum(spread, 255), level)
        tl.store(tables + (number * 3 + channel) * 256 + level, table.to(tl.uint8))


@triton.jit
def _is_inside(box, y, x):
    """Whether pixels lie in a box of the plan: top, left, height and width."""
    top, left = tl.load(box), tl.load(box + 1)
    return (y >= top) & (y < top + tl.load(box + 2)) & (x >= left) & (x < left + tl.load(box + 3))


@triton.jit
def _change(
    squares,
    plan,
    tables,
    out,
    size,
    scale_red,
    scale_green,
    scale_blue,
    minus_red,
    minus_green,
    minus_blue,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill one block of one square of `out`; without LEVELS the crop is normalised already, and there is no policy."""
    blocks = tl.cdiv(size * size, BLOCK)
    number = (tl.program_id(0) // blocks).to(tl.int64)
    row = plan + number * COLUMNS
    square = squares + number * (size * size * 3)
    # Threads past the end do the last pixel once more, so that nothing below needs a mask.
    pixel = tl.minimum((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK), size * size - 1)
    y, x = pixel // size, pixel % size
    down, across = tl.load(row + 8).to(tl.int32), tl.load(row + 9).to(tl.int32)
    is_erased = _is_inside(row + 10, y, x)
    if LEVELS:
        kind = tl.load(row).to(tl.int32)
        factor = tl.load(row + 1).to(tl.float64, bitcast=True).to(tl.float32)
        # Where the pixel comes from, by Pillow's fixed-point numbers: from its own place unless the operation moves.
        from_x = (tl.load(row + 2) * x + tl.load(row + 3) * y + tl.load(row + 4)) >> 16
        from_y = (tl.load(row + 5) * x + tl.load(row + 6) * y + tl.load(row + 7)) >> 16
        is_there = (from_x >= 0) & (from_x < size) & (from_y >= 0) & (from_y < size)
        near_x = tl.minimum(tl.maximum(from_x, 0), size - 1).to(tl.int32)
        near_y = tl.minimum(tl.maximum(from_y, 0), size - 1).to(tl.int32)
        place = _find(square, down, across, near_y, near_x, size)
        red = tl.where(is_there, _level(place), 0)
        green = tl.where(is_there, _level(place + 1), 0)
        blue = tl.where(is_there, _level(place + 2), 0)
        if kind == COLOR:
            grey = _grey(red, green, blue)
            red, green, blue = _blend(grey, red, factor), _blend(grey, green, factor), _blend(grey, blue, factor)
        elif kind == SHARPNESS:
            low_red, low_green, low_blue = _smooth(square, down, across, y, x, red, green, blue, size)
            red = _blend(low_red, red, factor)
            green = _blend(low_green, green, factor)
            blue = _blend(low_blue, blue, factor)
        elif kind >= BRIGHTNESS:
            table = tables + number * 768
            red = tl.load(table + red).to(tl.int32)
            green = tl.load(table + 256 + green).to(tl.int32)
            blue = tl.load(table + 512 + blue).to(tl.int32)
        first = red.to(tl.float32) * scale_red - minus_red
        second = green.to(tl.float32) * scale_green - minus_green
        third = blue.to(tl.float32) * scale_blue - minus_blue
    else:
        place = _find(square, down, across, y, x, size)
        first, second, third = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    place = out + number * (size * size * 3) + pixel * 3
    tl.store(place, tl.where(is_erased, 0.0, first).to(out.dtype.element_ty))
    tl.store(place + 1, tl.where(is_erased, 0.0, second).to(out.dtype.element_ty))
    tl.store(place + 2, tl.where(is_erased, 0.0, third).to(out.dtype.element_ty))


@triton.jit
def _mix(images, plan, size, BLOCK: tl.constexpr):
    """One block of both images of a pair, as the row of its first has it."""
    blocks = tl.cdiv(size * size * 3, BLOCK)
    first = 2 * (tl.program_id(0) // blocks).to(tl.int64)
    row = plan + first * COLUMNS
    element = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = element < size * size * 3
    pixel = element // 3
    weight = tl.load(row + 14).to(tl.float64, bitcast=True).to(tl.float32)
    kept = tl.where(_is_inside(row + 15, pixel // size, pixel % size), 0.0, weight)
    place = images + first * (size * size * 3) + element
    one = tl.load(place, mask, other=0.0).to(tl.float32)
    other = tl.load(place + size * size * 3, mask, other=0.0).to(tl.float32)
    rest = 1.0 - kept
    tl.store(place, (kept * one + rest * other).to(images.dtype.element_ty), mask)
    tl.store(place + size * size * 3, (kept * other + rest * one).to(images.dtype.element_ty), mask)


def change_squares(
    squares: Tensor, plan: Tensor, out: Tensor, mean: tuple[float, ...], std: tuple[float, ...], *, has_levels: bool
) -> None:
    """Fill `out` from the cropped squares by their rows of the plan, on the current stream; the host waits for nothing.

    Both are N × 3 × size × size in channels-last memory. With `has_levels` the squares are levels in FP32, and undergo
    their operations; else they are normalised and of the type of `out`, and may be `out` itself where none is shifted.
    """
    count, _, size, width = out.shape
    assert size == width
    assert squares.shape == out.shape
    assert squares.is_contiguous(memory_format=torch.channels_last)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert plan.shape == (count, COLUMNS.value)
    assert plan.is_contiguous()
    if not count:
        return
    tables = plan
    if has_levels:
        tables = torch.empty(count, 3, 256, dtype=torch.uint8, device=out.device)
        _tables[(count, 3)](squares, plan, tables, size, BLOCK=COUNT_BLOCK, enable_fp_fusion=False)
    _change[(count * triton.cdiv(size * size, BLOCK),)](
        squares,
        plan,
        tables,
        out,
        size,
        *[1 / (255 * deviation) for deviation in std],
        *[average / deviation for average, deviation in zip(mean, std, strict=True)],
        LEVELS=has_levels,
        BLOCK=BLOCK,
        enable_fp_fusion=False,  # or a product and a sum would be rounded once, and the plain version's twice
    )


def mix_squares(images: Tensor, plan: Tensor) -> None:
    """Mix the pairs of N × 3 × size × size in channels-last memory, in place; the last of an odd number stays."""
    size = images.shape[2]
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert plan.shape == (len(images), COLUMNS.value)
    pairs = len(images) // 2
    if pairs:
        blocks = triton.cdiv(size * size * 3, COUNT_BLOCK)
        _mix[(pairs * blocks,)](images, plan, size, BLOCK=COUNT_BLOCK, enable_fp_fusion=False)
