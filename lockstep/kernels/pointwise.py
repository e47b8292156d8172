"""1×1 convolutions that do a norm's sums on the way, while the values are still in registers: step 6 of the walk.

Over channels-last pixels a 1×1 convolution is a matrix product, M × K by K × C with M = N·H·W. With a small matrix the
product takes no longer than its memory does, and the pass of `batch_norm.py` that would read the result for the norm's
statistics can be had for nothing. The way back is in `pointwise_back.py`; `tail.py` goes further.

A program keeps its columns of the matrix and walks over tiles of rows; sums are FP32 and in a fixed order.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.batch_norm import load_pivot

# Measured on an H200 over the shapes of a ResNet-50 at batch 256, the quickest of 20 to 40. Larger matrices keep the
# tensor cores busy, and cuBLAS with a pass behind it does them sooner.
BLOCK_M = 64
INNERS = (64, 128, 256)
MAX_STATS_MATRIX = 1 << 16
INNER_WITH_SPARE_MEMORY = 128  # up to this, two programs of a multiprocessor can both load ahead
PROCESSORS = 132
MAX_STAGES = 3
INTERPRETED_SHARED_BYTES = 227 << 10


class Tiling(NamedTuple):
    """How a product is divided: columns of a program, warps, programs on a multiprocessor at once."""

    block_c: int
    warps: int
    per_processor: int

    def count_chunks(self, num_rows: int, channels: int) -> int:
        """Programs along the rows, beside those along the columns; none without a tile."""
        return min(-(-num_rows // BLOCK_M), max(1, PROCESSORS * self.per_processor * self.block_c // channels))


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


def suits_stats(dtype: torch.dtype, inner: int, channels: int) -> bool:
    """Whether a product of this inner dimension and so many columns is for `product_stats`."""
    return can_multiply(dtype, inner, channels) and inner * channels <= MAX_STATS_MATRIX


def can_multiply(dtype: torch.dtype, inner: int, channels: int) -> bool:
    """Whether the kernels can do such a product at all."""
    return dtype in (torch.float16, torch.bfloat16) and inner in INNERS and channels % BLOCK_M == 0


def product_stats(x: Tensor, weight: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor]:
    """The 1×1 convolution of x, and the partial sums of its statistics around `pivot`, for `batch_moments`."""
    channels, inner = weight.shape[:2]
    num_rows = x.numel() // inner
    wide = inner == 64 and channels % 128 == 0
    tiling = Tiling(128 if wide else 64, 4, 2 if inner <= INNER_WITH_SPARE_MEMORY else 1)
    num_chunks = tiling.count_chunks(num_rows, channels)
    shape = (x.shape[0], channels, *x.shape[2:])
    z = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    partial = torch.empty(num_chunks, 2, channels, dtype=torch.float32, device=x.device)
    _product_stats_kernel[channels // tiling.block_c, num_chunks](
        x, weight, pivot, z, partial, num_rows, channels, triton.cdiv(num_rows, BLOCK_M),
        K=inner, BLOCK_M=BLOCK_M, BLOCK_C=tiling.block_c,
        STAGES=count_stages(x.device, inner, inner * tiling.block_c), num_warps=tiling.warps,
    )  # fmt: skip
    return z, partial


def count_stages(device: torch.device, row_values: int, matrix_values: int) -> int:
    """How many tiles a program can load ahead beside its matrix, by the values of their rows: a GPU for games has less
    shared memory than one for training."""
    values = _shared_bytes(device) // 2
    return max(1, min(MAX_STAGES, (values - matrix_values) // (BLOCK_M * row_values)))


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have."""
    if device.type != "cuda":
        return INTERPRETED_SHARED_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))
