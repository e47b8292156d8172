"""Batch norm with what stands around it in a ResNet, in few passes over memory: step 6 of the walk.

Tensors are channels-last, seen as M × C with M = N·H·W. A pass reads or writes each array once, in the network's own
precision; sums are FP32, over pieces added in a fixed order, so the same input gives the same bits.

    forward    statistics: read x                  apply: read x (and the shortcut), write y
    backward   sums: read dy, x (write g)          gradient: read g, x, write dx

ReLU's mask is worked out again from x, or taken from y where a shortcut was added.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# How each kernel walks: elements of a tile, most channels of a tile, warps; and programs that share a reduction.
TILE, TILE_CHANNELS, WARPS = 4096, 128, 8
REDUCE_PROGRAMS = 132 * 4
FINAL_ROWS, FINAL_CHANNELS = 64, 16


@triton.jit
def _stats_kernel(x, partial, num_rows, channels, rows_per_program, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Partial sums of x − x₀ and of its square, x₀ being each channel's first value: no cancellation far from zero."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    pivot = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    start = chunk * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    first = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for row in range(start, stop, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        mask = (rows < stop)[:, None] & inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * channels + c[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - pivot[None, :], 0.0)
        first += value
        second += value * value
    out = partial + chunk * 2 * channels + c
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + channels, tl.sum(second, 0), mask=inside)


@triton.jit
def _add_partials(partial, c, inside, num_chunks, channels, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The two sums of every channel over all chunks."""
    first = tl.zeros([ROWS, BLOCK_C], tl.float32)
    second = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for chunk in range(0, num_chunks, ROWS):
        chunks = chunk + tl.arange(0, ROWS)
        mask = (chunks < num_chunks)[:, None] & inside[None, :]
        at = partial + chunks[:, None] * 2 * channels + c[None, :]
        first += tl.load(at, mask=mask, other=0.0)
        second += tl.load(at + channels, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _finish_stats_kernel(
    x, partial, gamma, beta, running_mean, running_var, count, moments,
    num_chunks, num_rows, channels, epsilon, momentum,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Moments of the batch from the partial sums; the running statistics follow."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    first, second = _add_partials(partial, c, inside, num_chunks, channels, ROWS, BLOCK_C)
    offset = first / num_rows
    mean = tl.load(x + c, mask=inside, other=0.0).to(tl.float32) + offset
    variance = tl.maximum(second / num_rows - offset * offset, 0.0)
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    scale = tl.load(gamma + c, mask=inside, other=0.0) * inverse
    tl.store(moments + c, mean, mask=inside)
    tl.store(moments + channels + c, inverse, mask=inside)
    tl.store(moments + 2 * channels + c, scale, mask=inside)
    tl.store(moments + 3 * channels + c, tl.load(beta + c, mask=inside, other=0.0) - mean * scale, mask=inside)

    unbiased = variance * (num_rows / tl.maximum(num_rows - 1, 1))
    old_mean = tl.load(running_mean + c, mask=inside, other=0.0)
    old_var = tl.load(running_var + c, mask=inside, other=0.0)
    tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=inside)
    tl.store(running_var + c, old_var + momentum * (unbiased - old_var), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count, tl.load(count) + 1)


@triton.jit
def _apply_kernel(
    x, moments, residual, residual_moments, y, num_rows, channels,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = relu(scale·x + shift + shortcut); RESIDUAL 0: none, 1: as it is, 2: through its own scale and shift."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mask = (rows < num_rows)[:, None] & inside[None, :]
    offsets = rows.to(tl.int64)[:, None] * channels + c[None, :]
    scale = tl.load(moments + 2 * channels + c, mask=inside, other=0.0)
    shift = tl.load(moments + 3 * channels + c, mask=inside, other=0.0)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if RESIDUAL > 0:
        other = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL == 2:
            other_scale = tl.load(residual_moments + 2 * channels + c, mask=inside, other=0.0)
            other_shift = tl.load(residual_moments + 3 * channels + c, mask=inside, other=0.0)
            other = other * other_scale[None, :] + other_shift[None, :]
        value += other
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + offsets, value, mask=mask)


@triton.jit
def _sums_kernel(
    dy, more_dy, x, y, moments, g_out, partial, num_rows, channels, rows_per_program,
    MASK: tl.constexpr, MORE: tl.constexpr, WRITE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partial sums of g and g·(x − mean), g being dy behind ReLU; MASK 0: no ReLU, 1: from x, 2: from y."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mean = tl.load(moments + c, mask=inside, other=0.0)
    scale = tl.load(moments + 2 * channels + c, mask=inside, other=0.0)
    shift = tl.load(moments + 3 * channels + c, mask=inside, other=0.0)
    start = chunk * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    first = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for row in range(start, stop, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        mask = (rows < stop)[:, None] & inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * channels + c[None, :]
        g = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        if MORE:
            g += tl.load(more_dy + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        if MASK == 1:
            g = tl.where(value * scale[None, :] + shift[None, :] > 0.0, g, 0.0)
        if MASK == 2:
            g = tl.where(tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32) > 0.0, g, 0.0)
        if WRITE:
            tl.store(g_out + offsets, g, mask=mask)
        first += g
        second += g * (value - mean[None, :])
    out = partial + chunk * 2 * channels + c
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + channels, tl.sum(second, 0), mask=inside)


@triton.jit
def _finish_sums_kernel(
    partial, moments, d_gamma, d_beta, line, num_chunks, num_rows, channels, ROWS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Gradients of γ and β, and the line dx = a·g + b·(x − mean) + c of every channel as rows a, b, c."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    first, second = _add_partials(partial, c, inside, num_chunks, channels, ROWS, BLOCK_C)
    inverse = tl.load(moments + channels + c, mask=inside, other=0.0)
    scale = tl.load(moments + 2 * channels + c, mask=inside, other=0.0)
    tl.store(d_gamma + c, second * inverse, mask=inside)
    tl.store(d_beta + c, first, mask=inside)
    tl.store(line + c, scale, mask=inside)
    tl.store(line + channels + c, -scale * inverse * inverse * second / num_rows, mask=inside)
    tl.store(line + 2 * channels + c, -scale * first / num_rows, mask=inside)


@triton.jit
def _gradient_kernel(
    g, x, moments, line, dx, num_rows, channels, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):
    """dx = a·g + b·(x − mean) + c; with MASK g is still before ReLU."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mask = (rows < num_rows)[:, None] & inside[None, :]
    offsets = rows.to(tl.int64)[:, None] * channels + c[None, :]
    mean = tl.load(moments + c, mask=inside, other=0.0)
    a = tl.load(line + c, mask=inside, other=0.0)
    b = tl.load(line + channels + c, mask=inside, other=0.0)
    constant = tl.load(line + 2 * channels + c, mask=inside, other=0.0)
    gradient = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if MASK:
        scale = tl.load(moments + 2 * channels + c, mask=inside, other=0.0)
        shift = tl.load(moments + 3 * channels + c, mask=inside, other=0.0)
        gradient = tl.where(value * scale[None, :] + shift[None, :] > 0.0, gradient, 0.0)
    result = a[None, :] * gradient + b[None, :] * (value - mean[None, :]) + constant[None, :]
    tl.store(dx + offsets, result, mask=mask)


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
        won = valid & (tl.load(winner + at, mask=valid, other=9).to(tl.int32) == tap[:, None])
        g += tl.load(dy + at, mask=won, other=0.0).to(tl.float32)
        if MORE:
            g += tl.load(more_dy + at, mask=won, other=0.0).to(tl.float32)
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


class _Walk(NamedTuple):
    """How one kernel divides M × C."""

    rows: int
    channels: int
    block_m: int
    block_c: int

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.rows // self.block_m), -(-self.channels // self.block_c)

    @property
    def num_chunks(self) -> int:
        return min(self.tiles[0], max(1, REDUCE_PROGRAMS // self.tiles[1]))

    @property
    def rows_per_chunk(self) -> int:
        return -(-self.tiles[0] // self.num_chunks) * self.block_m


def _walk(x: Tensor) -> _Walk:
    channels = x.shape[1]
    block_c = min(triton.next_power_of_2(channels), TILE_CHANNELS)
    return _Walk(x.numel() // channels, channels, TILE // block_c, block_c)


def batch_moments(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    count: Tensor,
    epsilon: float,
    momentum: float,
) -> Tensor:
    """Rows of mean, 1/σ, scale γ/σ and shift β − mean·γ/σ of a batch (4 × C, FP32); running statistics follow."""
    walk = _walk(x)
    partial = torch.empty(walk.num_chunks, 2, walk.channels, dtype=torch.float32, device=x.device)
    moments = torch.empty(4, walk.channels, dtype=torch.float32, device=x.device)
    _stats_kernel[walk.num_chunks, walk.tiles[1]](
        x, partial, walk.rows, walk.channels, walk.rows_per_chunk,
        BLOCK_M=walk.block_m, BLOCK_C=walk.block_c, num_warps=WARPS,
    )  # fmt: skip
    _finish_stats_kernel[(triton.cdiv(walk.channels, FINAL_CHANNELS),)](
        x, partial, gamma, beta, running_mean, running_var, count, moments,
        walk.num_chunks, walk.rows, walk.channels, epsilon, momentum,
        ROWS=FINAL_ROWS, BLOCK_C=FINAL_CHANNELS, num_warps=4,
    )  # fmt: skip
    return moments


def normalize_add(
    x: Tensor,
    moments: Tensor,
    residual: Tensor | None = None,
    residual_moments: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    """relu(scale·x + shift + residual), the residual through its own scale and shift where it has moments."""
    walk = _walk(x)
    y = torch.empty_like(x)
    _apply_kernel[walk.tiles](
        x, moments, x if residual is None else residual, moments if residual_moments is None else residual_moments, y,
        walk.rows, walk.channels,
        RELU=relu, RESIDUAL=0 if residual is None else 1 if residual_moments is None else 2,
        BLOCK_M=walk.block_m, BLOCK_C=walk.block_c, num_warps=WARPS,
    )  # fmt: skip
    return y


class Sums(NamedTuple):
    """Gradients of γ and β, and the line that gives dx."""

    d_gamma: Tensor
    d_beta: Tensor
    line: Tensor


def gradient_sums(
    dy: Tensor, more_dy: Tensor | None, x: Tensor, moments: Tensor, mask_from: Tensor | None, g: Tensor | None = None
) -> Sums:
    """Sums over g = (dy + more_dy) behind ReLU's mask, which is read off `mask_from`: x itself, y, or no ReLU at all.

    With `g` the masked gradient is also written there.
    """
    walk = _walk(x)
    partial = torch.empty(walk.num_chunks, 2, walk.channels, dtype=torch.float32, device=x.device)
    _sums_kernel[walk.num_chunks, walk.tiles[1]](
        dy, dy if more_dy is None else more_dy, x, x if mask_from is None else mask_from, moments,
        dy if g is None else g, partial, walk.rows, walk.channels, walk.rows_per_chunk,
        MASK=0 if mask_from is None else 1 if mask_from is x else 2, MORE=more_dy is not None, WRITE=g is not None,
        BLOCK_M=walk.block_m, BLOCK_C=walk.block_c, num_warps=WARPS,
    )  # fmt: skip
    return _finish_sums(partial, moments, walk)


def _finish_sums(partial: Tensor, moments: Tensor, walk: _Walk) -> Sums:
    d_gamma, d_beta, line = (
        torch.empty(rows, walk.channels, dtype=torch.float32, device=partial.device) for rows in (1, 1, 3)
    )
    _finish_sums_kernel[(triton.cdiv(walk.channels, FINAL_CHANNELS),)](
        partial, moments, d_gamma, d_beta, line, walk.num_chunks, walk.rows, walk.channels,
        ROWS=FINAL_ROWS, BLOCK_C=FINAL_CHANNELS, num_warps=4,
    )  # fmt: skip
    return Sums(d_gamma[0], d_beta[0], line)


def input_gradient(g: Tensor, x: Tensor, moments: Tensor, line: Tensor, masked: bool) -> Tensor:
    """The gradient of a norm's input; unless `masked`, ReLU's mask is worked out from x."""
    walk = _walk(x)
    dx = torch.empty_like(x)
    _gradient_kernel[walk.tiles](
        g, x, moments, line, dx, walk.rows, walk.channels, MASK=not masked,
        BLOCK_M=walk.block_m, BLOCK_C=walk.block_c, num_warps=WARPS,
    )  # fmt: skip
    return dx


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
    walk = _walk(x)
    more = dy if more_dy is None else more_dy
    sizes = (x.shape[2], x.shape[3], dy.shape[2], dy.shape[3])
    partial = torch.empty(walk.num_chunks, 2, walk.channels, dtype=torch.float32, device=x.device)
    block_m = max(1, walk.block_m // 2)  # the windows take registers of their own
    options = {"MORE": more_dy is not None, "BLOCK_M": block_m, "BLOCK_C": walk.block_c, "num_warps": WARPS}
    _pool_sums_kernel[walk.num_chunks, walk.tiles[1]](
        dy, more, winner, x, moments, partial, walk.rows, walk.channels, walk.rows_per_chunk, *sizes, **options
    )
    sums = _finish_sums(partial, moments, walk)
    dx = torch.empty_like(x)
    _pool_gradient_kernel[triton.cdiv(walk.rows, block_m), walk.tiles[1]](
        dy, more, winner, x, moments, sums.line, dx, walk.rows, walk.channels, *sizes, **options
    )
    return dx, sums
