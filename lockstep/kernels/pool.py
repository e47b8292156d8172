"""Batch norm, ReLU and a 3 × 3 pool at stride 2 in one pass, and the way back (step 6 of the walk).

The tensor before a pool is among the largest of a network: nothing of its size is written but the gradient in the end.

    forward    read x, write y and the winners
    backward   sums: read dy, winners, x           gradient: read dy, winners, x again, write dx

The way back goes by groups of 2 × 2 pixels. Counted from the border, pixel h stands in window h // 2, and in the one
before if h is even; so the pixels of a group stand in no windows but the same four, which are read once for all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.batch_norm import Sums, Tile, Walk, finish_sums, relu

# Elements are those of the pool's output; a program takes POOL_ROWS rows of it, one below the other.
POOL_ELEMENTS, POOL_ROWS, POOL_WARPS = 512, 2, 4
# Rows are groups: a tile has four pixels for each of its elements.
POOL_SUMS = Tile(elements=2048, channels=128, warps=8, programs=132 * 2)
POOL_GRADIENT = Tile(elements=512, channels=128, warps=4)


@triton.jit
def _largest_of_three(at, h, w, inside, sign, never, height, width, channels, WORK: tl.constexpr):
    """The largest of sign·x over the pixels w, w + 1 and w + 2 of row h, and which of them it was."""
    for tap in tl.static_range(3):
        mask = ((h >= 0) & (h < height) & (w + tap >= 0) & (w + tap < width))[:, None] & inside[None, :]
        value = tl.load(at + tap * channels, mask=mask, other=never[None, :]).to(WORK) * sign[None, :]
        if tap == 0:
            best = value
            which = tl.zeros(value.shape, tl.int32)
        else:
            which = tl.where(value > best, tap, which)
            best = tl.maximum(best, value)
    return best, which


@triton.jit
def _pool_kernel(
    x, moments, y, winner, height, width, channels, out_height, out_width,
    PAD: tl.constexpr, WORK: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = the largest of relu(scale·x + shift) over 3 × 3 pixels, stride 2; `winner` says which, 9 if all are 0."""
    strips = tl.cdiv(out_height, ROWS)
    image = tl.program_id(0) // strips
    out_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    # The same for all columns, but a vector: under the interpreter, masks made of scalars go wrong.
    out_h = tl.program_id(0) % strips * ROWS + 0 * out_w
    c = tl.arange(0, BLOCK_C)
    inside = c < channels
    scale = tl.load(moments + 2 * channels + c, mask=inside, other=1.0)
    shift = tl.load(moments + 3 * channels + c, mask=inside, other=0.0)
    # Norm and ReLU keep the order of a channel's values or turn it round, so the values are compared as they are; in
    # that order, what would be read beyond the image is behind all others.
    sign = tl.where(scale < 0.0, -1.0, 1.0).to(WORK)
    never = tl.where(scale < 0.0, float("inf"), float("-inf"))
    h, w = 2 * out_h - PAD, 2 * out_w - PAD
    at = x + ((image * height + h).to(tl.int64) * width + w)[:, None] * channels + c[None, :]
    out = ((image * out_height + out_h).to(tl.int64) * out_width + out_w)[:, None] * channels + c[None, :]
    last, last_which = _largest_of_three(at, h, w, inside, sign, never, height, width, channels, WORK)
    for _ in tl.static_range(ROWS):
        # The last row of a window is the first of the one below it.
        best, which = last, last_which
        for row in tl.static_range(1, 3):
            h += 1
            at += width * channels
            last, last_which = _largest_of_three(at, h, w, inside, sign, never, height, width, channels, WORK)
            which = tl.where(last > best, 3 * row + last_which, which)
            best = tl.maximum(best, last)
        value = tl.abs(scale)[None, :] * best.to(tl.float32) + shift[None, :]
        mask = ((out_h < out_height) & (out_w < out_width))[:, None] & inside[None, :]
        tl.store(y + out, relu(value), mask=mask)
        tl.store(winner + out, tl.where(value > 0.0, which, 9), mask=mask)
        out_h += 1
        out += out_width * channels


@triton.jit
def _load_window(dy, more_dy, winner, at, mask, MORE: tl.constexpr):
    """Which pixel of a window won, and the gradient that it gets."""
    won = tl.load(winner + at, mask=mask, other=9).to(tl.int32)
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if MORE:
        g += tl.load(more_dy + at, mask=mask, other=0.0).to(tl.float32)
    return won, g


@triton.jit
def _load_groups(
    dy, more_dy, winner, x, groups, c, mask, height, width, channels, out_height, out_width,
    PAD: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """For the four pixels of each group: where they are, whether that is in the image, their gradient g, their x."""
    group_rows = (height + PAD + 1) // 2
    group_columns = (width + PAD + 1) // 2
    image = groups // (group_rows * group_columns)
    i = groups // group_columns % group_rows
    j = groups % group_columns

    # Windows (i, j), (i, j − 1), (i − 1, j), (i − 1, j − 1): i and j may be past the last, and 0 has none before it.
    at = ((image * out_height + i).to(tl.int64) * out_width + j)[:, None] * channels + c[None, :]
    above = at - out_width * channels
    is_row, is_column = i < out_height, j < out_width
    won_0, g_0 = _load_window(dy, more_dy, winner, at, (is_row & is_column)[:, None] & mask, MORE)
    won_1, g_1 = _load_window(dy, more_dy, winner, at - channels, (is_row & (j > 0))[:, None] & mask, MORE)
    won_2, g_2 = _load_window(dy, more_dy, winner, above, ((i > 0) & is_column)[:, None] & mask, MORE)
    won_3, g_3 = _load_window(dy, more_dy, winner, above - channels, ((i > 0) & (j > 0))[:, None] & mask, MORE)

    # Pixels (h, w), (h, w + 1), (h + 1, w), (h + 1, w + 1): the first row and column may be the border's, the others
    # past the image. No window names such a pixel, so that its g is 0.
    h, w = 2 * i - PAD, 2 * j - PAD
    at = ((image * height + h).to(tl.int64) * width + w)[:, None] * channels + c[None, :]
    below = at + width * channels
    places = (at, at + channels, below, below + channels)
    is_top, is_bottom, is_left, is_right = h >= 0, h + 1 < height, w >= 0, w + 1 < width
    masks = (
        (is_top & is_left)[:, None] & mask,
        (is_top & is_right)[:, None] & mask,
        (is_bottom & is_left)[:, None] & mask,
        (is_bottom & is_right)[:, None] & mask,
    )
    values = (
        tl.load(x + places[0], mask=masks[0], other=0.0).to(tl.float32),
        tl.load(x + places[1], mask=masks[1], other=0.0).to(tl.float32),
        tl.load(x + places[2], mask=masks[2], other=0.0).to(tl.float32),
        tl.load(x + places[3], mask=masks[3], other=0.0).to(tl.float32),
    )
    gradients = (
        (tl.where(won_0 == 0, g_0, 0.0) + tl.where(won_1 == 2, g_1, 0.0))
        + (tl.where(won_2 == 6, g_2, 0.0) + tl.where(won_3 == 8, g_3, 0.0)),
        tl.where(won_0 == 1, g_0, 0.0) + tl.where(won_2 == 7, g_2, 0.0),
        tl.where(won_0 == 3, g_0, 0.0) + tl.where(won_1 == 5, g_1, 0.0),
        tl.where(won_0 == 4, g_0, 0.0),
    )
    return places, masks, gradients, values


@triton.jit
def _pool_sums_kernel(
    dy, more_dy, winner, x, moments, partial, num_groups, channels, groups_per_program,
    height, width, out_height, out_width,
    PAD: tl.constexpr, MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partial sums of g and g·(x − mean) as in `batch_norm.py`, g coming through the pool."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mean = tl.load(moments + c, mask=inside, other=0.0)
    start = chunk * groups_per_program
    stop = tl.minimum(start + groups_per_program, num_groups)
    first = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for group in range(start, stop, BLOCK_M):
        groups = group + tl.arange(0, BLOCK_M)
        mask = (groups < stop)[:, None] & inside[None, :]
        _, _, g, value = _load_groups(
            dy, more_dy, winner, x, groups, c, mask, height, width, channels, out_height, out_width, PAD, MORE
        )
        for pixel in tl.static_range(4):
            first += g[pixel]
            second += g[pixel] * (value[pixel] - mean[None, :])
    out = partial + chunk * 2 * channels + c
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + channels, tl.sum(second, 0), mask=inside)


@triton.jit
def _pool_gradient_kernel(
    dy, more_dy, winner, x, moments, line, dx, num_groups, channels, height, width, out_height, out_width,
    PAD: tl.constexpr, MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx = a·g + b·(x − mean) + c as in `batch_norm.py`, g coming through the pool once more."""
    groups = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mask = (groups < num_groups)[:, None] & inside[None, :]
    mean = tl.load(moments + c, mask=inside, other=0.0)
    a = tl.load(line + c, mask=inside, other=0.0)
    b = tl.load(line + channels + c, mask=inside, other=0.0)
    constant = tl.load(line + 2 * channels + c, mask=inside, other=0.0)
    at, in_image, g, value = _load_groups(
        dy, more_dy, winner, x, groups, c, mask, height, width, channels, out_height, out_width, PAD, MORE
    )
    for pixel in tl.static_range(4):
        result = a[None, :] * g[pixel] + b[None, :] * (value[pixel] - mean[None, :]) + constant[None, :]
        tl.store(dx + at[pixel], result, mask=in_image[pixel])


def normalize_pool(x: Tensor, moments: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """The largest of relu(scale·x + shift) over 3 × 3 pixels at stride 2, and which one it was."""
    count, channels, height, width = x.shape
    shape = (count, channels, (height + 2 * padding - 3) // 2 + 1, (width + 2 * padding - 3) // 2 + 1)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    winner = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    block_c = triton.next_power_of_2(channels)
    block_w = max(1, min(triton.next_power_of_2(shape[3]), POOL_ELEMENTS // block_c))
    # A GPU compares FP16 two at a time. It could so BF16, but Triton's interpreter, which the tests use, could not.
    work = tl.float16 if x.dtype == torch.float16 else tl.float32
    _pool_kernel[count * triton.cdiv(shape[2], POOL_ROWS), triton.cdiv(shape[3], block_w)](
        x, moments, y, winner, height, width, channels, shape[2], shape[3],
        PAD=padding, WORK=work, ROWS=POOL_ROWS, BLOCK_W=block_w, BLOCK_C=block_c, num_warps=POOL_WARPS,
    )  # fmt: skip
    return y, winner


def pool_gradient(
    dy: Tensor, more_dy: Tensor | None, winner: Tensor, x: Tensor, moments: Tensor, padding: int
) -> tuple[Tensor, Sums]:
    """The gradient of the input of `normalize_pool`, with those of γ and β."""
    count, channels, height, width = x.shape
    num_groups = count * ((height + padding + 1) // 2) * ((width + padding + 1) // 2)
    operands = (dy, dy if more_dy is None else more_dy, winner, x, moments)
    sizes = (height, width, dy.shape[2], dy.shape[3])
    walk = Walk(num_groups, channels, POOL_SUMS.fit(channels), POOL_SUMS.programs)
    partial = torch.empty(walk.num_chunks, 2, channels, dtype=torch.float32, device=x.device)
    _pool_sums_kernel[walk.num_chunks, walk.tiles[1]](
        *operands, partial, num_groups, channels, walk.rows_per_chunk, *sizes,
        PAD=padding, MORE=more_dy is not None, **walk.options,
    )  # fmt: skip
    sums = finish_sums(partial, moments, count * height * width)
    walk = Walk(num_groups, channels, POOL_GRADIENT.fit(channels), POOL_GRADIENT.programs)
    dx = torch.empty_like(x)
    _pool_gradient_kernel[walk.tiles](
        *operands, sums.line, dx, num_groups, channels, *sizes,
        PAD=padding, MORE=more_dy is not None, **walk.options,
    )  # fmt: skip
    return dx, sums
