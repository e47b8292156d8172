"""The way back through 1×1 convolutions, with the work of the norms around them: step 6 of the walk.

A product's two gradients read the same values; done together they are read once, and what `batch_norm.py` would do to
the results is done in registers:

    `product_sums`        between a block's sum, y, and the convolution behind it: the gradient of y with the shortcut's
                          added and ReLU behind it, the sums of the norms before it, the gradient of the matrix
    `product_gradients`   through a convolution alone: the gradients of its input and of the matrix

A program leaves its share of the sums and of the matrix's gradient, which are added up in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.batch_norm import Normed, Sums, finish_sums, gradient_sums, relu
from lockstep.kernels.pointwise import BLOCK_M, Tiling, can_multiply, count_stages

# Measured as those of `pointwise.py`. Backward there is more to spare.
MAX_SUMS_MATRIX = 1 << 18
MAX_INNER_OF_TWO_NORMS = 128  # with a larger matrix the second norm's input finds no room
# `product_gradients`: a program's share of the matrix's gradient must fit into registers.
GRADIENT_INNER, GRADIENT_CHANNELS = 64, (64, 128, 256)
ADDED_CHUNKS, ADDED_VALUES = 32, 64  # of a tile when matrices are added up


@triton.jit
def normalize_relu(value, mask, scale, shift):
    """relu(scale·x + shift) as it would be stored, and where it is positive; nothing where there is no row."""
    before = value.to(tl.float32) * scale[None, :] + shift[None, :]
    return tl.where(mask, relu(before), 0.0).to(value.dtype), mask & (before > 0.0)


@triton.jit(do_not_specialize=["num_tiles"])
def _product_sums_kernel(
    dz, weight, more_dy, y, x, moments, also_x, also_moments, before_weight, before_moments,
    g_out, partial, weight_partial, num_rows, channels, num_tiles,
    ALSO: tl.constexpr, BEFORE: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """g = dz·weight + more_dy where y > 0, partial sums of g and g·(x − mean) as in `batch_norm.py`, and of dzᵀ·y.

    With BEFORE channels, x is what made the norm's input, through a norm, ReLU and a convolution, which are done again.
    ALSO: the latter sum of a second norm.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunk = tl.program_id(1)
    k = tl.arange(0, K)
    matrix = tl.load(weight + k[:, None] * channels + c[None, :])
    mean = tl.load(moments + c)
    d_matrix = tl.zeros([K, BLOCK_C], tl.float32)
    first = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    if BEFORE:
        n = tl.arange(0, BEFORE)
        before_matrix = tl.load(before_weight + c[None, :] * BEFORE + n[:, None])
        scale, shift = tl.load(before_moments + 2 * BEFORE + n), tl.load(before_moments + 3 * BEFORE + n)
    if ALSO:
        also_mean = tl.load(also_moments + c)
        third = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in tl.range(chunk, num_tiles, tl.num_programs(1), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None]
        rows = rows.to(tl.int64)[:, None]
        gradient = tl.load(dz + rows * K + k[None, :], mask=mask, other=0.0)
        at = rows * channels + c[None, :]
        other = tl.load(more_dy + at, mask=mask, other=0.0)
        after = tl.load(y + at, mask=mask, other=0.0)
        if BEFORE:
            made, _ = normalize_relu(
                tl.load(x + rows * BEFORE + n[None, :], mask=mask, other=0.0), mask, scale, shift
            )  # fmt: skip
            value = tl.dot(made, before_matrix)
        else:
            value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if ALSO:
            also_value = tl.load(also_x + at, mask=mask, other=0.0)
        g = tl.dot(gradient, matrix) + other.to(tl.float32)
        d_matrix = tl.dot(tl.trans(gradient), after, d_matrix)
        g = tl.where(after.to(tl.float32) > 0.0, g, 0.0)
        tl.store(g_out + at, g.to(g_out.dtype.element_ty), mask=mask)
        first += g
        second += g * (value - mean[None, :])
        if ALSO:
            third += g * (also_value.to(tl.float32) - also_mean[None, :])
    out = partial + chunk * (3 if ALSO else 2) * channels + c
    tl.store(out, tl.sum(first, 0))
    tl.store(out + channels, tl.sum(second, 0))
    if ALSO:
        tl.store(out + 2 * channels, tl.sum(third, 0))
    tl.store(weight_partial + (chunk * K + k[:, None]) * channels + c[None, :], d_matrix)


@triton.jit(do_not_specialize=["num_tiles"])
def _product_gradients_kernel(
    dz, weight, x, dx, weight_partial, num_rows, num_tiles,
    K: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = dz·weight and partial sums of dzᵀ·x."""
    chunk = tl.program_id(0)
    k = tl.arange(0, K)
    c = tl.arange(0, CHANNELS)
    matrix = tl.load(weight + c[:, None] * K + k[None, :])
    d_matrix = tl.zeros([CHANNELS, K], tl.float32)
    for tile in tl.range(chunk, num_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None]
        rows = rows.to(tl.int64)[:, None]
        gradient = tl.load(dz + rows * CHANNELS + c[None, :], mask=mask, other=0.0)
        at = rows * K + k[None, :]
        value = tl.load(x + at, mask=mask, other=0.0)
        tl.store(dx + at, tl.dot(gradient, matrix).to(dx.dtype.element_ty), mask=mask)
        d_matrix = tl.dot(tl.trans(gradient), value, d_matrix)
    tl.store(weight_partial + (chunk * CHANNELS + c[:, None]) * K + k[None, :], d_matrix)


@triton.jit
def _add_chunks_kernel(partial, out, num_chunks, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of what all chunks left."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for chunk in range(0, num_chunks, ROWS):
        chunks = chunk + tl.arange(0, ROWS)
        total += tl.load(partial + chunks[:, None] * size + at[None, :], mask=(chunks < num_chunks)[:, None], other=0.0)
    tl.store(out + at, tl.sum(total, 0))


def suits_sums(dtype: torch.dtype, inner: int, channels: int) -> bool:
    """Whether a product of this inner dimension and so many columns is for `product_sums`."""
    return can_multiply(dtype, inner, channels) and inner * channels <= MAX_SUMS_MATRIX


def suits_gradients(dtype: torch.dtype, inner: int, channels: int) -> bool:
    """Whether a convolution of so many channels to so many others is for `product_gradients`."""
    return can_multiply(dtype, inner, channels) and inner == GRADIENT_INNER and channels in GRADIENT_CHANNELS


class Made(NamedTuple):
    """A norm's input that is not there, but can be made: the 1×1 convolution of relu(norm(x))."""

    x: Tensor
    moments: Tensor
    weight: Tensor


def product_sums(
    dz: Tensor, weight: Tensor, more_dy: Tensor, y: Tensor, norms: list[Normed], g: Tensor, made: Made | None = None
) -> tuple[list[Sums], Tensor]:
    """`join_sums` for a y that went into a 1×1 convolution, from that one's dz, g written; the matrix's gradient.

    With `made`, that is the first norm's input.
    """
    inner, channels = weight.shape[:2]
    num_rows = dz.numel() // inner
    inside = norms if inner <= MAX_INNER_OF_TWO_NORMS else norms[:1]
    before = made.weight.shape[1] if made else 0
    tiling = Tiling(128 if inner == 64 and len(inside) == 1 and channels % 128 == 0 else 64, 8, 1)
    num_chunks = tiling.count_chunks(num_rows, channels)
    partial = torch.empty(num_chunks, 1 + len(inside), channels, dtype=torch.float32, device=g.device)
    weight_partial = torch.empty(num_chunks, inner, channels, dtype=torch.float32, device=g.device)
    row_values = inner + (1 + len(inside)) * tiling.block_c + (before or tiling.block_c)
    x, moments = inside[0]
    _product_sums_kernel[channels // tiling.block_c, num_chunks](
        dz, weight, more_dy, y, made.x if made else x, moments, *inside[-1],
        made.weight if made else weight, made.moments if made else moments, g, partial, weight_partial,
        num_rows, channels, triton.cdiv(num_rows, BLOCK_M),
        ALSO=len(inside) > 1, BEFORE=before, K=inner, BLOCK_M=BLOCK_M, BLOCK_C=tiling.block_c,
        STAGES=count_stages(g.device, row_values, (inner + before) * tiling.block_c + BLOCK_M * before),
        num_warps=tiling.warps,
    )  # fmt: skip
    sums = [finish_sums(partial, norm.moments, num_rows, second) for second, norm in enumerate(inside, 1)]
    sums += [gradient_sums(g, None, *norm, mask_from=None) for norm in norms[len(inside) :]]
    return sums, add_chunks(weight_partial, torch.empty_like(weight))


def product_gradients(dz: Tensor, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the matrix of its 1×1 convolution."""
    channels, inner = weight.shape[:2]
    num_rows = x.numel() // inner
    num_chunks = Tiling(channels, 8, 1).count_chunks(num_rows, channels)
    dx = torch.empty_like(x)
    weight_partial = torch.empty(num_chunks, channels, inner, dtype=torch.float32, device=x.device)
    _product_gradients_kernel[(num_chunks,)](
        dz, weight, x, dx, weight_partial, num_rows, triton.cdiv(num_rows, BLOCK_M),
        K=inner, CHANNELS=channels, BLOCK_M=BLOCK_M,
        STAGES=count_stages(x.device, channels + inner, channels * inner), num_warps=8,
    )  # fmt: skip
    return dx, add_chunks(weight_partial, torch.empty_like(weight))


def add_chunks(partial: Tensor, total: Tensor) -> Tensor:
    """Add up what the programs left, into `total`."""
    _add_chunks_kernel[(total.numel() // ADDED_VALUES,)](
        partial, total, len(partial), total.numel(), ROWS=ADDED_CHUNKS, BLOCK=ADDED_VALUES, num_warps=4
    )
    return total
