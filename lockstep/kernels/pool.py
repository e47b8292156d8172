"""The stem of a ResNet: batch norm, ReLU and the 3 × 3 pool in one pass, and the way back without writing either.

The tensor before the pool is the largest of the network; it is read once forward, twice backward (step 6 of the walk).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.batch_norm import WARPS, Sums, finish_sums, plan_walk


@triton.jit
def _pool_kernel(
    x, moments, y, winner, height, width, channels, out_height, out_width,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
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
        h = 2 * row - 1 + tap // 3 + 0 * columns
        w = 2 * columns - 1 + tap % 3
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
def _unpool(dy, more_dy, winner, rows, c, mask, height, width, channels, out_height, out_width, MORE: tl.constexpr):
    """The gradient of each pixel before the pool: from the at most four windows it stands in, where it won."""
    image = rows // (height * width)
    h = (rows // width) % height
    w = rows % width
    g = tl.zeros(mask.shape, tl.float32)
    for corner in tl.static_range(4):
        # Pixel h stands in windows h/2 (even h), or (h − 1)/2 and (h + 1)/2 (odd h).
        out_h = (h + corner // 2) // 2
        out_w = (w + corner % 2) // 2
        tap = (h - 2 * out_h + 1) * 3 + (w - 2 * out_w + 1)
        valid = (out_h < out_height) & (out_w < out_width)
        if corner // 2 == 1:
            valid = valid & (h % 2 == 1)
        if corner % 2 == 1:
            valid = valid & (w % 2 == 1)
        valid = valid[:, None] & mask
        at = (image * out_height + out_h).to(tl.int64) * out_width + out_w
        at = at[:, None] * channels + c[None, :]
        won = tl.load(winner + at, mask=valid, other=9).to(tl.int32) == tap[:, None]
        # Masks that are the same along the channels keep the loads wide.
        gradient = tl.load(dy + at, mask=valid, other=0.0).to(tl.float32)
        if MORE:
            gradient += tl.load(more_dy + at, mask=valid, other=0.0).to(tl.float32)
        g += tl.where(won, gradient, 0.0)
    return g


@triton.jit
def _pool_sums_kernel(
    dy, more_dy, winner, x, moments, partial, num_rows, channels, rows_per_program,
    height, width, out_height, out_width,
    MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`_sums_kernel` with the pool's backward in front of it."""
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
        g = _unpool(dy, more_dy, winner, rows, c, mask, height, width, channels, out_height, out_width, MORE)
        value = tl.load(x + rows.to(tl.int64)[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32)
        first += g
        second += g * (value - mean[None, :])
    out = partial + chunk * 2 * channels + c
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + channels, tl.sum(second, 0), mask=inside)


@triton.jit
def _pool_gradient_kernel(
    dy, more_dy, winner, x, moments, line, dx, num_rows, channels, height, width, out_height, out_width,
    MORE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`_gradient_kernel` with the pool's backward in front of it."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mask = (rows < num_rows)[:, None] & inside[None, :]
    offsets = rows.to(tl.int64)[:, None] * channels + c[None, :]
    mean = tl.load(moments + c, mask=inside, other=0.0)
    a = tl.load(line + c, mask=inside, other=0.0)
    b = tl.load(line + channels + c, mask=inside, other=0.0)
    constant = tl.load(line + 2 * channels + c, mask=inside, other=0.0)
    g = _unpool(dy, more_dy, winner, rows, c, mask, height, width, channels, out_height, out_width, MORE)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + offsets, a[None, :] * g + b[None, :] * (value - mean[None, :]) + constant[None, :], mask=mask)


def normalize_pool(x: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of relu(scale·x + shift) over 3 × 3 pixels at stride 2 with a border of one, and which one it was."""
    count, channels, height, width = x.shape
    shape = (count, channels, (height - 1) // 2 + 1, (width - 1) // 2 + 1)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    winner = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    block_c = triton.next_power_of_2(channels)
    block_w = max(1, min(triton.next_power_of_2(shape[3]), 2048 // block_c))
    _pool_kernel[count * shape[2], triton.cdiv(shape[3], block_w)](
        x, moments, y, winner, height, width, channels, shape[2], shape[3],
        BLOCK_W=block_w, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return y, winner


def pool_gradient(
    dy: Tensor, more_dy: Tensor | None, winner: Tensor, x: Tensor, moments: Tensor
) -> tuple[Tensor, Sums]:
    """The gradient of the input of `normalize_pool`, with those of γ and β."""
    walk = plan_walk(x)
    more = dy if more_dy is None else more_dy
    sizes = (x.shape[2], x.shape[3], dy.shape[2], dy.shape[3])
    partial = torch.empty(walk.num_chunks, 2, walk.channels, dtype=torch.float32, device=x.device)
    block_m = max(1, walk.block_m // 2)  # the windows take registers of their own
    options = {"MORE": more_dy is not None, "BLOCK_M": block_m, "BLOCK_C": walk.block_c, "num_warps": WARPS}
    _pool_sums_kernel[walk.num_chunks, walk.tiles[1]](
        dy, more, winner, x, moments, partial, walk.rows, walk.channels, walk.rows_per_chunk, *sizes, **options
    )
    sums = finish_sums(partial, moments, walk)
    dx = torch.empty_like(x)
    _pool_gradient_kernel[triton.cdiv(walk.rows, block_m), walk.tiles[1]](
        dy, more, winner, x, moments, sums.line, dx, walk.rows, walk.channels, *sizes, **options
    )
    return dx, sums
