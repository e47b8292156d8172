"""Batch norm, ReLU and a 3 × 3 pool at stride 2 in one pass, and the way back (step 6 of the walk).

The tensor before a pool is among the largest of a network: between norm and pool nothing of its size is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.batch_norm import Sums, Tile, finish_sums, input_gradient, plan_walk

# The windows of a pool take registers of their own: half the elements of other tiles.
POOL_TILE = Tile(elements=2048, channels=128, warps=4, programs=132 * 8)


@triton.jit
def _pool_kernel(
    x, moments, y, winner, height, width, channels, out_height, out_width,
    PAD: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = the largest of relu(scale·x + shift) over 3 × 3 pixels, stride 2; `winner` says which, 9 if all are 0."""
    image = tl.program_id(0) // out_height
    row = tl.program_id(0) % out_height
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    c = tl.arange(0, BLOCK_C)
    inside = c < channels
    scale = tl.load(moments + 2 * channels + c, mask=inside, other=0.0)
    shift = tl.load(moments + 3 * channels + c, mask=inside, other=0.0)
    best = tl.zeros([BLOCK_W, BLOCK_C], tl.float32)
    which = tl.full([BLOCK_W, BLOCK_C], 9, tl.int32)
    base = x + image.to(tl.int64) * height * width * channels
    for tap in tl.static_range(9):
        h = 2 * row - PAD + tap // 3 + 0 * columns
        w = 2 * columns - PAD + tap % 3
        mask = ((w >= 0) & (w < width) & (h >= 0) & (h < height))[:, None] & inside[None, :]
        value = tl.load(base + (h * width + w)[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value * scale[None, :] + shift[None, :], 0.0)
        which = tl.where(value > best, tap, which)
        best = tl.maximum(best, value)
    mask = (columns < out_width)[:, None] & inside[None, :]
    out = (tl.program_id(0).to(tl.int64) * out_width + columns)[:, None] * channels + c[None, :]
    tl.store(y + out, best, mask=mask)
    tl.store(winner + out, which, mask=mask)


@triton.jit
def _unpool(
    dy, more_dy, winner, rows, c, mask, height, width, channels, out_height, out_width,
    PAD: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """The gradient of each pixel before the pool: from the at most four windows it stands in, where it won."""
    image = rows // (height * width)
    h = (rows // width) % height + PAD
    w = rows % width + PAD
    g = tl.zeros(mask.shape, tl.float32)
    for corner in tl.static_range(4):
        # Counted from the border, pixel h stands in window h/2, and in the one before if h is even.
        out_h = h // 2 - corner // 2
        out_w = w // 2 - corner % 2
        valid = (out_h >= 0) & (out_h < out_height) & (out_w >= 0) & (out_w < out_width)
        if corner // 2 == 1:
            valid = valid & (h % 2 == 0)
        if corner % 2 == 1:
            valid = valid & (w % 2 == 0)
        # Masks that are the same along the channels keep the loads wide.
        valid = valid[:, None] & mask
        tap = (h - 2 * out_h) * 3 + (w - 2 * out_w)
        at = ((image * out_height + out_h).to(tl.int64) * out_width + out_w)[:, None] * channels + c[None, :]
        won = tl.load(winner + at, mask=valid, other=9).to(tl.int32) == tap[:, None]
        gradient = tl.load(dy + at, mask=valid, other=0.0).to(tl.float32)
        if MORE:
            gradient += tl.load(more_dy + at, mask=valid, other=0.0).to(tl.float32)
        g += tl.where(won, gradient, 0.0)
    return g


@triton.jit
def _pool_sums_kernel(
    dy, more_dy, winner, x, moments, g_out, partial, num_rows, channels, rows_per_program,
    height, width, out_height, out_width,
    PAD: tl.constexpr, MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partial sums of g and g·(x − mean) as in `batch_norm.py`, g coming through the pool; g is written too."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mean = tl.load(moments + c, mask=inside, other=0.0)
    start = chunk * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    first = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for row in range(start, stop, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        mask = (rows < stop)[:, None] & inside[None, :]
        g = _unpool(dy, more_dy, winner, rows, c, mask, height, width, channels, out_height, out_width, PAD, MORE)
        offsets = rows.to(tl.int64)[:, None] * channels + c[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(g_out + offsets, g, mask=mask)
        first += g
        second += g * (value - mean[None, :])
    out = partial + chunk * 2 * channels + c
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + channels, tl.sum(second, 0), mask=inside)


def normalize_pool(x: Tensor, moments: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """The largest of relu(scale·x + shift) over 3 × 3 pixels at stride 2, and which one it was."""
    count, channels, height, width = x.shape
    shape = (count, channels, (height + 2 * padding - 3) // 2 + 1, (width + 2 * padding - 3) // 2 + 1)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    winner = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    block_c = triton.next_power_of_2(channels)
    block_w = max(1, min(triton.next_power_of_2(shape[3]), 2048 // block_c))
    _pool_kernel[count * shape[2], triton.cdiv(shape[3], block_w)](
        x, moments, y, winner, height, width, channels, shape[2], shape[3],
        PAD=padding, BLOCK_W=block_w, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return y, winner


def pool_gradient(
    dy: Tensor, more_dy: Tensor | None, winner: Tensor, x: Tensor, moments: Tensor, padding: int
) -> tuple[Tensor, Sums]:
    """The gradient of the input of `normalize_pool`, with those of γ and β."""
    walk = plan_walk(x, POOL_TILE)
    g = torch.empty_like(x)
    partial = torch.empty(walk.num_chunks, 2, walk.channels, dtype=torch.float32, device=x.device)
    _pool_sums_kernel[walk.num_chunks, walk.tiles[1]](
        dy, dy if more_dy is None else more_dy, winner, x, moments, g, partial,
        walk.rows, walk.channels, walk.rows_per_chunk, x.shape[2], x.shape[3], dy.shape[2], dy.shape[3],
        PAD=padding, MORE=more_dy is not None, **walk.options,
    )  # fmt: skip
    sums = finish_sums(partial, moments, walk.rows)
    return input_gradient(g, x, moments, sums.line, masked=True), sums
