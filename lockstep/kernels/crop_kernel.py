"""The Triton half of `crop.py`: one program takes a run of an image's pixels, each thread all channels of its own.

Where a pixel lies and what it weighs is worked out once for the three of them.

Imported only to launch it, so that everything else works where Triton is not installed.
"""

import triton
import triton.language as tl

# Output pixels of one program, four for each of its threads: the quickest of five tried on an H200.
BLOCK = 512


@triton.jit
def _axis(start, length, size, position):
    """For output positions along one axis: the first pixel in reach, its distance, how far the filter reaches."""
    # FP64 here and nowhere else: it is a handful of operations, and a long side leaves FP32 no digits for the weights.
    scale = length / size
    reach = tl.maximum(scale, 1.0)
    center = start + (position.to(tl.float64) + 0.5) * scale
    first = tl.floor(center - reach - 0.5) + 1
    return first.to(tl.int32), (first + 0.5 - center).to(tl.float32), reach.to(tl.float32)


@triton.jit
def crop_kernel(
    table,
    out,
    out_height,
    out_width,
    blocks,
    scale_red,
    scale_green,
    scale_blue,
    shift_red,
    shift_green,
    shift_blue,
    BLOCK: tl.constexpr,
):
    """Fill one block of one image of `out`; `crop_resize_plain` says what with."""
    image = (tl.program_id(0) // blocks).to(tl.int64)
    row = table + image * 10
    address = tl.load(row).to(tl.pointer_type(tl.uint8))
    # Within an image 32 bits are enough, and half the work of 64.
    row_stride = tl.load(row + 1).to(tl.int32)
    pixel_stride = tl.load(row + 2).to(tl.int32)
    channel_stride = tl.load(row + 3).to(tl.int32)
    height = tl.load(row + 4).to(tl.int32)
    width = tl.load(row + 5).to(tl.int32)
    top = tl.load(row + 6).to(tl.float64, bitcast=True)
    left = tl.load(row + 7).to(tl.float64, bitcast=True)
    box_height = tl.load(row + 8).to(tl.float64, bitcast=True)
    box_width = tl.load(row + 9).to(tl.float64, bitcast=True)

    # Threads past the end do the last pixel once more, so that nothing below needs a mask.
    pixel = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    pixel = tl.minimum(pixel, out_height * out_width - 1)
    first_y, from_y, reach_y = _axis(top, box_height, out_height, pixel // out_width)
    first_x, from_x, reach_x = _axis(left, box_width, out_width, pixel % out_width)
    slope_y = 1.0 / reach_y
    slope_x = 1.0 / reach_x
    taps_y = tl.ceil(2 * reach_y).to(tl.int32)
    taps_x = tl.ceil(2 * reach_x).to(tl.int32)

    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    # `while`, as the interpreter of Triton 3.6 cannot count to a number that is not known beforehand under NumPy 2.4.
    tap_y = 0
    while tap_y < taps_y:
        y = first_y + tap_y
        nearest_y = tl.minimum(tl.maximum(y, 0), height - 1)
        weight_y = tl.maximum(1.0 - tl.abs(from_y + tap_y) * slope_y, 0.0)
        weight_y = tl.where(y == nearest_y, weight_y, 0.0)
        line = nearest_y * row_stride
        tap_x = 0
        while tap_x < taps_x:
            x = first_x + tap_x
            # Outside the window the nearest pixel is loaded and not counted: quicker than not loading.
            nearest_x = tl.minimum(tl.maximum(x, 0), width - 1)
            weight = tl.maximum(1.0 - tl.abs(from_x + tap_x) * slope_x, 0.0) * weight_y
            weight = tl.where(x == nearest_x, weight, 0.0)
            place = address + (line + nearest_x * pixel_stride)
            red += weight * tl.load(place).to(tl.float32)
            green += weight * tl.load(place + channel_stride).to(tl.float32)
            blue += weight * tl.load(place + 2 * channel_stride).to(tl.float32)
            weights += weight
            tap_x += 1
        tap_y += 1
    share = 1.0 / weights
    place_out = out + image * (out_height * out_width * 3) + pixel * 3
    tl.store(place_out, (red * share * scale_red + shift_red).to(out.dtype.element_ty))
    tl.store(place_out + 1, (green * share * scale_green + shift_green).to(out.dtype.element_ty))
    tl.store(place_out + 2, (blue * share * scale_blue + shift_blue).to(out.dtype.element_ty))
