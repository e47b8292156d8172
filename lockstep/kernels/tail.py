"""The end of a block, y = relu(norm(convolution(relu(norm(x)))) + shortcut), of which only y is written: step 6.

The convolution is 1×1, z = u·weightᵀ with u = relu(norm(x)). In a ResNet z is four times as large as x, and all that
needs it can be had from x and small matrices:

    forward    mean and variance of z from those of u                    `square_sums`, `product_moments`
               y from x and the shortcut in one pass                     `product_join`
    backward   g behind the last ReLU and its sums, z made again         `product_sums` of `pointwise_back.py`
               from g and x the gradient of u behind its ReLU, with its  `tail_gradients`
               sums, and that of the weights

The gradient of z is a·g + b·(z − mean) + c with a, b and c of each channel. Neither it nor z need be there, because

    dz·weight = g·(a ∘ weight) + u·(weightᵀ·(b ∘ weight)) + a constant that makes the sum over the rows 0
    dzᵀ·u = a ∘ (gᵀ·u) + M·(b ∘ (weight·covariance of u) + c·(mean of u)),  M being the number of rows
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.batch_norm import Sums, finish_sums, relu, store_moments
from lockstep.kernels.pointwise import BLOCK_M, MAX_STAGES, PROCESSORS, Tiling, count_stages
from lockstep.kernels.pointwise_back import add_chunks, normalize_relu, suits_gradients, suits_sums

# Measured as those of `pointwise.py`.
SMALL_ROWS, SMALL_COLUMNS = 32, 16  # of a tile of the small matrices
SQUARE_ROWS = 128


@triton.jit
def _load_pivot(moments, k, K: tl.constexpr):
    """About what u is on average: relu(β), β being what the norm adds."""
    return tl.maximum(tl.load(moments + 3 * K + k) + tl.load(moments + k) * tl.load(moments + 2 * K + k), 0.0)


@triton.jit(do_not_specialize=["num_tiles"])
def _square_kernel(
    x, moments, partial, num_rows, num_tiles,
    K: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums of vᵀ·v and of v, which is u = relu(norm(x)) less its pivot: no cancellation far from zero."""
    chunk = tl.program_id(0)
    k = tl.arange(0, K)
    scale, shift = tl.load(moments + 2 * K + k), tl.load(moments + 3 * K + k)
    pivot = _load_pivot(moments, k, K)
    square = tl.zeros([K, K], tl.float32)
    total = tl.zeros([BLOCK_M, K], tl.float32)
    for tile in tl.range(chunk, num_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None]
        value = tl.load(x + rows.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
        u, _ = normalize_relu(value, mask, scale, shift)
        v = tl.where(mask, u.to(tl.float32) - pivot[None, :], 0.0).to(value.dtype)
        square = tl.dot(tl.trans(v), v, square)
        total += v.to(tl.float32)
    out = partial + chunk * SHARE
    tl.store(out + k[:, None] * K + k[None, :], square)
    tl.store(out + K * K + k, tl.sum(total, 0))


@triton.jit
def _load_covariance(squares, columns, num_rows, K: tl.constexpr):
    """Columns of the covariance of u, from `square_sums`."""
    k = tl.arange(0, K)
    average = tl.load(squares + K * K + k) / num_rows
    own_average = tl.load(squares + K * K + columns) / num_rows
    return tl.load(squares + k[:, None] * K + columns[None, :]) / num_rows - average[:, None] * own_average[None, :]


@triton.jit
def _moments_kernel(
    squares, before, weight, gamma, beta, running_mean, running_var, count, moments,
    num_rows, channels, epsilon, momentum, K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Mean and variance of z = u·weightᵀ, for `store_moments`: weight·(mean of u), and weight·covariance·weightᵀ."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, K)
    rows = tl.load(weight + c[:, None] * K + k[None, :]).to(tl.float32)
    average = _load_pivot(before, k, K) + tl.load(squares + K * K + k) / num_rows
    mean = tl.sum(rows * average[None, :], 1)
    variance = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        part = tl.dot(rows, _load_covariance(squares, columns, num_rows, K), input_precision="ieee")
        variance += tl.sum(part * tl.load(weight + c[:, None] * K + columns[None, :]).to(tl.float32), 1)
    store_moments(
        mean, tl.maximum(variance, 0.0), gamma, beta, running_mean, running_var, count, moments,
        c, c < channels, num_rows, channels, epsilon, momentum,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def _join_kernel(
    x, moments, weight, behind, shortcut, shortcut_moments, y, num_rows, channels, num_tiles,
    PROJECTED: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = relu(scale·(u·weightᵀ) + shift + shortcut), PROJECTED: the shortcut through its own scale and shift."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunk = tl.program_id(1)
    k = tl.arange(0, K)
    matrix = tl.load(weight + c[None, :] * K + k[:, None])
    scale, shift = tl.load(moments + 2 * K + k), tl.load(moments + 3 * K + k)
    own_scale, own_shift = tl.load(behind + 2 * channels + c), tl.load(behind + 3 * channels + c)
    if PROJECTED:
        way_scale = tl.load(shortcut_moments + 2 * channels + c)
        own_shift += tl.load(shortcut_moments + 3 * channels + c)
    for tile in tl.range(chunk, num_tiles, tl.num_programs(1), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None]
        rows = rows.to(tl.int64)[:, None]
        value = tl.load(x + rows * K + k[None, :], mask=mask, other=0.0)
        at = rows * channels + c[None, :]
        way = tl.load(shortcut + at, mask=mask, other=0.0).to(tl.float32)
        u, _ = normalize_relu(value, mask, scale, shift)
        result = tl.dot(u, matrix) * own_scale[None, :] + own_shift[None, :]
        if PROJECTED:
            way = way * way_scale[None, :]
        tl.store(y + at, relu(result + way).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _fold_kernel(
    weight, line, d_beta, squares, before, straight, around, constant, sizes, num_rows,
    K: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The matrices and the constant of `fold`, some columns of each.

    A matrix is divided by what no value of it is beyond, so that half numbers hold it whatever its size. Its rounding
    is the same in every row, so the constant is made from what was rounded: dz·weight still adds up to 0, as dz does.
    """
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    k = tl.arange(0, K)
    straight_size = 0.0
    around_size = 0.0
    square = tl.zeros([K, BLOCK_K], tl.float32)
    for start in range(0, CHANNELS, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        own = tl.load(weight + c[:, None] * K + columns[None, :]).to(tl.float32)
        every = tl.load(weight + c[None, :] * K + k[:, None]).to(tl.float32)
        b = tl.load(line + CHANNELS + c)
        largest = tl.max(tl.abs(every), 0)
        straight_size = tl.maximum(straight_size, tl.max(tl.abs(tl.load(line + c)) * largest, 0))
        around_size += tl.sum(tl.abs(b) * largest * largest, 0)
        square = tl.dot(every, b[:, None] * own, square, input_precision="ieee")
    straight_size = tl.where(straight_size > 0.0, straight_size, 1.0)
    around_size = tl.where(around_size > 0.0, around_size, 1.0)
    tl.store(sizes, straight_size)
    tl.store(sizes + 1, around_size)

    part = (square / around_size).to(around.dtype.element_ty)
    tl.store(around + k[:, None] * K + columns[None, :], part)
    average = _load_pivot(before, k, K) + tl.load(squares + K * K + k) / num_rows
    total = tl.sum(part.to(tl.float32) * average[:, None], 0) * around_size
    for start in range(0, CHANNELS, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        at = c[:, None] * K + columns[None, :]
        own = tl.load(weight + at).to(tl.float32) * (tl.load(line + c)[:, None] / straight_size)
        rounded = own.to(straight.dtype.element_ty)
        tl.store(straight + at, rounded)
        g_average = tl.load(d_beta + c) / num_rows
        total += tl.sum(rounded.to(tl.float32) * g_average[:, None], 0) * straight_size
    tl.store(constant + columns, -total)


@triton.jit(do_not_specialize=["num_tiles"])
def _gradients_kernel(
    g, straight, around, constant, sizes, x, moments, du, partial, product_partial, num_rows, num_tiles,
    K: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of u behind its ReLU; partial sums of it, of it times x − mean, and of gᵀ·u."""
    chunk = tl.program_id(0)
    k = tl.arange(0, K)
    c = tl.arange(0, CHANNELS)
    matrix = tl.load(straight + c[:, None] * K + k[None, :])
    around_matrix = tl.load(around + k[:, None] * K + k[None, :])
    straight_size, around_size, rest = tl.load(sizes), tl.load(sizes + 1), tl.load(constant + k)
    mean, scale, shift = tl.load(moments + k), tl.load(moments + 2 * K + k), tl.load(moments + 3 * K + k)
    product = tl.zeros([CHANNELS, K], tl.float32)
    first = tl.zeros([BLOCK_M, K], tl.float32)
    second = tl.zeros([BLOCK_M, K], tl.float32)
    for tile in tl.range(chunk, num_tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None]
        rows = rows.to(tl.int64)[:, None]
        gradient = tl.load(g + rows * CHANNELS + c[None, :], mask=mask, other=0.0)
        at = rows * K + k[None, :]
        value = tl.load(x + at, mask=mask, other=0.0)
        u, is_on = normalize_relu(value, mask, scale, shift)
        result = tl.dot(gradient, matrix) * straight_size + tl.dot(u, around_matrix) * around_size + rest[None, :]
        product = tl.dot(tl.trans(gradient), u, product)
        result = tl.where(is_on, result, 0.0)
        tl.store(du + at, result.to(du.dtype.element_ty), mask=mask)
        first += result
        second += result * (value.to(tl.float32) - mean[None, :])
    out = partial + chunk * 2 * K + k
    tl.store(out, tl.sum(first, 0))
    tl.store(out + K, tl.sum(second, 0))
    tl.store(product_partial + (chunk * CHANNELS + c[:, None]) * K + k[None, :], product)


@triton.jit
def _weight_kernel(
    product, squares, before, weight, line, d_weight, num_rows,
    K: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of the weights from gᵀ·u, the covariance and the mean of u."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    k = tl.arange(0, K)
    at = c[:, None] * K + columns[None, :]
    a, b, constant = tl.load(line + c), tl.load(line + CHANNELS + c), tl.load(line + 2 * CHANNELS + c)
    rows = tl.load(weight + c[:, None] * K + k[None, :]).to(tl.float32)
    average = _load_pivot(before, columns, K) + tl.load(squares + K * K + columns) / num_rows
    spread = tl.dot(rows, _load_covariance(squares, columns, num_rows, K), input_precision="ieee")
    rest = b[:, None] * spread + constant[:, None] * average[None, :]
    tl.store(d_weight + at, a[:, None] * tl.load(product + at) + rest * num_rows)


def suits_tail(dtype: torch.dtype, inner: int, channels: int, next_inner: int) -> bool:
    """Whether the end of a block with such a convolution, and one to `next_inner` channels behind it, is done so.

    gᵀ·u must fit into registers as any matrix's gradient; with more channels the matrices take longer than they spare.
    """
    return suits_gradients(dtype, inner, channels) and suits_sums(dtype, next_inner, channels)


def square_sums(x: Tensor, moments: Tensor) -> Tensor:
    """vᵀ·v and behind it the sum of v, in one row; v is u = relu(norm(x)) less a pivot that `moments` tell."""
    inner = x.shape[1]
    num_rows = x.numel() // inner
    num_tiles = triton.cdiv(num_rows, SQUARE_ROWS)
    num_chunks = min(num_tiles, PROCESSORS)
    share = (inner + 1) * inner
    partial = torch.empty(num_chunks, share, dtype=torch.float32, device=x.device)
    _square_kernel[(num_chunks,)](
        x, moments, partial, num_rows, num_tiles,
        K=inner, SHARE=share, BLOCK_M=SQUARE_ROWS, STAGES=MAX_STAGES, num_warps=8,
    )  # fmt: skip
    return add_chunks(partial, torch.empty(share, dtype=torch.float32, device=x.device))


def product_moments(
    squares: Tensor,
    before: Tensor,
    weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    count: Tensor,
    epsilon: float,
    momentum: float,
    num_rows: int,
) -> Tensor:
    """`batch_moments` of u·weightᵀ from `square_sums` and the moments that u has from its norm, `before`."""
    channels, inner = weight.shape[:2]
    moments = torch.empty(4, channels, dtype=torch.float32, device=weight.device)
    _moments_kernel[(channels // SMALL_ROWS,)](
        squares, before, weight, gamma, beta, running_mean, running_var, count, moments,
        num_rows, channels, epsilon, momentum, K=inner, BLOCK_C=SMALL_ROWS, BLOCK_K=SMALL_COLUMNS, num_warps=4,
    )  # fmt: skip
    return moments


def product_join(
    x: Tensor, moments: Tensor, weight: Tensor, behind: Tensor, shortcut: Tensor, shortcut_moments: Tensor | None
) -> Tensor:
    """y; `behind` are the moments of the convolution's result."""
    channels, inner = weight.shape[:2]
    num_rows = x.numel() // inner
    tiling = Tiling(64, 4, 2)
    y = torch.empty_like(shortcut)
    _join_kernel[channels // tiling.block_c, tiling.count_chunks(num_rows, channels)](
        x, moments, weight, behind, shortcut, behind if shortcut_moments is None else shortcut_moments, y,
        num_rows, channels, triton.cdiv(num_rows, BLOCK_M),
        PROJECTED=shortcut_moments is not None, K=inner, BLOCK_M=BLOCK_M, BLOCK_C=tiling.block_c,
        STAGES=1 + count_stages(x.device, inner + tiling.block_c, inner * (tiling.block_c + BLOCK_M)),
        num_warps=tiling.warps,
    )  # fmt: skip
    return y


class Folded(NamedTuple):
    """dz·weight = size₀·(g·straight) + size₁·(u·around) + constant."""

    straight: Tensor
    around: Tensor
    constant: Tensor
    sizes: Tensor


def fold(weight: Tensor, sums: Sums, squares: Tensor, before: Tensor, num_rows: int) -> Folded:
    """The norm behind the convolution and the convolution as one, for the way back."""
    channels, inner = weight.shape[:2]
    around = torch.empty(inner, inner, dtype=weight.dtype, device=weight.device)
    constant, sizes = (torch.empty(size, dtype=torch.float32, device=weight.device) for size in (inner, 2))
    folded = Folded(torch.empty_like(weight), around, constant, sizes)
    _fold_kernel[(inner // SMALL_COLUMNS,)](
        weight, sums.line, sums.d_beta, squares, before, *folded, num_rows,
        K=inner, CHANNELS=channels, BLOCK_K=SMALL_COLUMNS, BLOCK_C=SMALL_ROWS, num_warps=4,
    )  # fmt: skip
    return folded


def tail_gradients(
    g: Tensor, sums: Sums, weight: Tensor, x: Tensor, moments: Tensor, squares: Tensor
) -> tuple[Tensor, Sums, Tensor]:
    """The gradient of u behind its ReLU with its sums, and that of the weights, from g behind the norm of z.

    `sums` are those of that norm.
    """
    channels, inner = weight.shape[:2]
    num_rows = x.numel() // inner
    num_tiles = triton.cdiv(num_rows, BLOCK_M)
    num_chunks = min(num_tiles, PROCESSORS)
    du = torch.empty_like(x)
    partial = torch.empty(num_chunks, 2, inner, dtype=torch.float32, device=g.device)
    product = torch.empty(num_chunks, channels, inner, dtype=torch.float32, device=g.device)
    _gradients_kernel[(num_chunks,)](
        g, *fold(weight, sums, squares, moments, num_rows), x, moments, du, partial, product, num_rows, num_tiles,
        K=inner, CHANNELS=channels, BLOCK_M=BLOCK_M,
        STAGES=count_stages(x.device, channels + inner, (channels + inner + BLOCK_M) * inner), num_warps=8,
    )  # fmt: skip
    d_weight = torch.empty_like(weight)
    _weight_kernel[channels // SMALL_ROWS, inner // SMALL_COLUMNS](
        add_chunks(product, torch.empty(channels, inner, dtype=torch.float32, device=g.device)),
        squares, moments, weight, sums.line, d_weight, num_rows,
        K=inner, CHANNELS=channels, BLOCK_C=SMALL_ROWS, BLOCK_K=SMALL_COLUMNS, num_warps=4,
    )  # fmt: skip
    return du, finish_sums(partial, moments, num_rows), d_weight
