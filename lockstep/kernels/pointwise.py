"""1×1 convolutions that do a norm's sums on the way, while the values are still in registers: step 6 of the walk.

Over channels-last pixels a 1×1 convolution is a matrix product, M × K by K × C with M = N·H·W. With a small matrix the
product takes no longer than its memory does, and a pass of `batch_norm.py` over the result can be had for nothing:

    forward    product, partial sums of the statistics          in place of a pass that reads the result
    backward   product, shortcut's gradient, ReLU, gradient     in place of writing the product's result
               sums, masked gradient written                    and of reading it again

A program keeps its columns of the matrix and walks over tiles of rows; sums are FP32 and in a fixed order.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.batch_norm import Sums, finish_sums, load_pivot

# Measured on an H200 over the shapes of a ResNet-50 at batch 256, the quickest of 20 to 40. Larger matrices keep the
# tensor cores busy, and cuBLAS with a pass behind it does them sooner; backward there is more to spare.
BLOCK_M = 64
INNERS = (64, 128, 256)
MAX_STATS_MATRIX, MAX_SUMS_MATRIX = 1 << 16, 1 << 18
INNER_WITH_SPARE_MEMORY = 128  # up to this, two programs of a multiprocessor can both load ahead
PROCESSORS = 132
# Shared memory that three tiles of 256 columns ahead take with their matrix. A GPU for games has less, and loads two.
LARGE_SHARED_BYTES = 144 << 10


@triton.jit(do_not_specialize=["num_tiles"])
def _product_stats_kernel(
    x, weight, pivot, z, partial, num_rows, channels, num_tiles,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """z = x·weightᵀ, and partial sums of z − pivot and of its square."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunk = tl.program_id(1)
    k = tl.arange(0, K)
    matrix = tl.load(weight + c[None, :] * K + k[:, None])
    center = load_pivot(pivot, c, c < channels)
    first = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in tl.range(chunk, num_tiles, tl.num_programs(1), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None]
        rows = rows.to(tl.int64)[:, None]
        values = tl.load(x + rows * K + k[None, :], mask=mask, other=0.0)
        # The sums are of what is stored, rounded, as a pass over it would find it.
        result = tl.dot(values, matrix).to(z.dtype.element_ty)
        tl.store(z + rows * channels + c[None, :], result, mask=mask)
        offset = tl.where(mask, result.to(tl.float32) - center[None, :], 0.0)
        first += offset
        second += offset * offset
    out = partial + chunk * 2 * channels + c
    tl.store(out, tl.sum(first, 0))
    tl.store(out + channels, tl.sum(second, 0))


@triton.jit(do_not_specialize=["num_tiles"])
def _product_sums_kernel(
    dz, weight, more_dy, x, y, moments, g_out, partial, num_rows, channels, num_tiles,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """g = dz·weight + more_dy where y > 0, and partial sums of g and g·(x − mean), as in `batch_norm.py`."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunk = tl.program_id(1)
    k = tl.arange(0, K)
    matrix = tl.load(weight + k[:, None] * channels + c[None, :])
    mean = tl.load(moments + c)
    first = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tile in tl.range(chunk, num_tiles, tl.num_programs(1), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None]
        rows = rows.to(tl.int64)[:, None]
        gradient = tl.load(dz + rows * K + k[None, :], mask=mask, other=0.0)
        at = rows * channels + c[None, :]
        other = tl.load(more_dy + at, mask=mask, other=0.0)
        value = tl.load(x + at, mask=mask, other=0.0)
        after = tl.load(y + at, mask=mask, other=0.0)
        g = tl.dot(gradient, matrix) + other.to(tl.float32)
        g = tl.where(after.to(tl.float32) > 0.0, g, 0.0)
        tl.store(g_out + at, g.to(g_out.dtype.element_ty), mask=mask)
        first += g
        second += g * (value.to(tl.float32) - mean[None, :])
    out = partial + chunk * 2 * channels + c
    tl.store(out, tl.sum(first, 0))
    tl.store(out + channels, tl.sum(second, 0))


def suits_stats(dtype: torch.dtype, inner: int, channels: int) -> bool:
    """Whether a product of this inner dimension and so many columns is for `product_stats`."""
    return _can_do(dtype, inner, channels) and inner * channels <= MAX_STATS_MATRIX


def suits_sums(dtype: torch.dtype, inner: int, channels: int) -> bool:
    """Whether a product of this inner dimension and so many columns is for `product_sums`."""
    return _can_do(dtype, inner, channels) and inner * channels <= MAX_SUMS_MATRIX


def _can_do(dtype: torch.dtype, inner: int, channels: int) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and inner in INNERS and channels % 64 == 0


def product_stats(x: Tensor, weight: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor]:
    """The 1×1 convolution of x, and the partial sums of its statistics around `pivot`, for `batch_moments`."""
    channels, inner = weight.shape[:2]
    num_rows = x.numel() // inner
    block_c = 128 if inner == 64 and channels % 128 == 0 else 64
    num_chunks = _count_chunks(num_rows, channels // block_c, 2 if inner <= INNER_WITH_SPARE_MEMORY else 1)
    shape = (x.shape[0], channels, *x.shape[2:])
    z = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    partial = torch.empty(num_chunks, 2, channels, dtype=torch.float32, device=x.device)
    _product_stats_kernel[channels // block_c, num_chunks](
        x, weight, pivot, z, partial, num_rows, channels, triton.cdiv(num_rows, BLOCK_M),
        K=inner, BLOCK_M=BLOCK_M, BLOCK_C=block_c, STAGES=3 if inner < 256 or _has_room(x.device) else 2, num_warps=4,
    )  # fmt: skip
    return z, partial


def product_sums(dz: Tensor, weight: Tensor, more_dy: Tensor, x: Tensor, y: Tensor, moments: Tensor, g: Tensor) -> Sums:
    """`gradient_sums` for a norm whose y went into a 1×1 convolution, from that one's dz; g is written."""
    inner, channels = weight.shape[:2]
    num_rows = dz.numel() // inner
    block_c = 64
    num_chunks = _count_chunks(num_rows, channels // block_c, 2)
    partial = torch.empty(num_chunks, 2, channels, dtype=torch.float32, device=x.device)
    _product_sums_kernel[channels // block_c, num_chunks](
        dz, weight, more_dy, x, y, moments, g, partial, num_rows, channels, triton.cdiv(num_rows, BLOCK_M),
        K=inner, BLOCK_M=BLOCK_M, BLOCK_C=block_c, STAGES=2 if inner <= INNER_WITH_SPARE_MEMORY else 1, num_warps=4,
    )  # fmt: skip
    return finish_sums(partial, moments, num_rows)


def _count_chunks(num_rows: int, num_columns: int, per_processor: int) -> int:
    """Programs along the rows beside so many along the columns; none without a tile."""
    return min(-(-num_rows // BLOCK_M), max(1, PROCESSORS * per_processor // num_columns))


@cache
def _has_room(device: torch.device) -> bool:
    """Whether a program may have LARGE_SHARED_BYTES; the interpreter's always may."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= LARGE_SHARED_BYTES)
