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


class Tile(NamedTuple):
    """How a kernel walks over M × C: elements and most channels of a tile, warps, programs that share a reduction."""

    elements: int
    channels: int
    warps: int
    programs: int = 0

    def fit(self, channels: int) -> "Shape":
        block_c = min(triton.next_power_of_2(channels), self.channels)
        return Shape(self.elements // block_c, block_c, self.warps)


class Shape(NamedTuple):
    """A tile's rows, channels and warps."""

    block_m: int
    block_c: int
    warps: int


# Measured on an H200 over the shapes of a ResNet-50 at batch 32 and 256, each the quickest of six.
POINTWISE = Tile(elements=4096, channels=128, warps=8)
SMALL_REDUCTION = Tile(elements=4096, channels=64, warps=4, programs=132 * 8)
STATISTICS = Tile(elements=4096, channels=128, warps=8, programs=132 * 4)
GRADIENT_SUMS = Tile(elements=4096, channels=128, warps=8, programs=132 * 2)
SMALL_ELEMENTS = 32 << 20
# The partial sums are few: a program adds up all of a few channels at once, waiting for memory only once.
FINAL_ROWS, FINAL_CHANNELS = 1024, 8


@triton.jit
def load_pivot(pivot, c, inside):
    """What a channel's values are summed around; nothing where that is not finite, or no step would be again."""
    value = tl.load(pivot + c, mask=inside, other=0.0).to(tl.float32)
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)


@triton.jit
def _stats_kernel(x, partial, num_rows, channels, rows_per_program, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Partial sums of x − x₀ and of its square, x₀ being each channel's first value: no cancellation far from zero."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    pivot = load_pivot(x, c, inside)
    start = chunk * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    first = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for row in range(start, stop, 2 * BLOCK_M):
        # Two tiles at a time: the loads of both are on their way before either is needed.
        rows = row + tl.arange(0, BLOCK_M)
        mask = (rows < stop)[:, None] & inside[None, :]
        offsets = rows.to(tl.int64)[:, None] * channels + c[None, :]
        next_mask = (rows + BLOCK_M < stop)[:, None] & inside[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0)
        next_value = tl.load(x + offsets + BLOCK_M * channels, mask=next_mask, other=0.0)
        value = tl.where(mask, value.to(tl.float32) - pivot[None, :], 0.0)
        next_value = tl.where(next_mask, next_value.to(tl.float32) - pivot[None, :], 0.0)
        first += value + next_value
        second += value * value + next_value * next_value
    out = partial + chunk * 2 * channels + c
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + channels, tl.sum(second, 0), mask=inside)


@triton.jit
def _add_partials(
    partial, c, inside, num_chunks, channels, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    WIDTH: tl.constexpr = 2, SECOND: tl.constexpr = 1,
):  # fmt: skip
    """Two sums of every channel over all chunks: of the WIDTH that a chunk has, the first and that at SECOND."""
    first = tl.zeros([ROWS, BLOCK_C], tl.float32)
    second = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for chunk in range(0, num_chunks, ROWS):
        chunks = chunk + tl.arange(0, ROWS)
        mask = (chunks < num_chunks)[:, None] & inside[None, :]
        at = partial + chunks[:, None] * WIDTH * channels + c[None, :]
        first += tl.load(at, mask=mask, other=0.0)
        second += tl.load(at + SECOND * channels, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def store_moments(
    mean, variance, gamma, beta, running_mean, running_var, count, moments,
    c, inside, num_rows, channels, epsilon, momentum,
):  # fmt: skip
    """Moments of the batch from its mean and variance; the running statistics follow."""
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
def _finish_stats_kernel(
    pivot, partial, gamma, beta, running_mean, running_var, count, moments,
    num_chunks, num_rows, channels, epsilon, momentum,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The batch's mean and variance from the partial sums around `pivot`, for `store_moments`."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    first, second = _add_partials(partial, c, inside, num_chunks, channels, ROWS, BLOCK_C)
    offset = first / num_rows
    mean = load_pivot(pivot, c, inside) + offset
    variance = tl.maximum(second / num_rows - offset * offset, 0.0)
    store_moments(
        mean, variance, gamma, beta, running_mean, running_var, count, moments,
        c, inside, num_rows, channels, epsilon, momentum,
    )  # fmt: skip


@triton.jit
def relu(value):
    """The value where it is positive, else 0; what is not a number stays so, or a lost network would look well."""
    return tl.where(value <= 0.0, 0.0, value)


@triton.jit
def _apply_kernel(
    x, moments, residual, residual_moments, y, num_rows, channels,
    RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
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
    tl.store(y + offsets, relu(value), mask=mask)


@triton.jit
def _load_gradient(dy, more_dy, x, y, at, mask, scale, shift, MASK: tl.constexpr, MORE: tl.constexpr):
    """The gradient behind ReLU's mask and the norm's input; all loads stand before what needs them."""
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if MASK == 2:
        after = tl.load(y + at, mask=mask, other=0.0)
    if MORE:
        g += tl.load(more_dy + at, mask=mask, other=0.0).to(tl.float32)
    if MASK == 1:
        g = tl.where(value * scale[None, :] + shift[None, :] > 0.0, g, 0.0)
    if MASK == 2:
        g = tl.where(after.to(tl.float32) > 0.0, g, 0.0)
    return g, value


@triton.jit
def _sums_kernel(
    dy, more_dy, x, y, moments, also_x, also_moments, g_out, partial, num_rows, channels, rows_per_program,
    MASK: tl.constexpr, MORE: tl.constexpr, ALSO: tl.constexpr, WRITE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partial sums of g and g·(x − mean), g being dy behind ReLU; MASK 0: no ReLU, 1: from x, 2: from y.

    ALSO: the latter sum of a second norm that g goes to, too.
    """
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
    if ALSO:
        third = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        also_mean = tl.load(also_moments + c, mask=inside, other=0.0)
    for row in range(start, stop, 2 * BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        mask = (rows < stop)[:, None] & inside[None, :]
        next_mask = (rows + BLOCK_M < stop)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None] * channels + c[None, :]
        next_at = at + BLOCK_M * channels
        g, value = _load_gradient(dy, more_dy, x, y, at, mask, scale, shift, MASK, MORE)
        next_g, next_value = _load_gradient(dy, more_dy, x, y, next_at, next_mask, scale, shift, MASK, MORE)
        if WRITE:
            tl.store(g_out + at, g, mask=mask)
            tl.store(g_out + next_at, next_g, mask=next_mask)
        first += g + next_g
        second += g * (value - mean[None, :]) + next_g * (next_value - mean[None, :])
        if ALSO:
            value = tl.load(also_x + at, mask=mask, other=0.0).to(tl.float32)
            next_value = tl.load(also_x + next_at, mask=next_mask, other=0.0).to(tl.float32)
            third += g * (value - also_mean[None, :]) + next_g * (next_value - also_mean[None, :])
    out = partial + chunk * (3 if ALSO else 2) * channels + c
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + channels, tl.sum(second, 0), mask=inside)
    if ALSO:
        tl.store(out + 2 * channels, tl.sum(third, 0), mask=inside)


@triton.jit
def _finish_sums_kernel(
    partial, moments, d_gamma, d_beta, line, num_chunks, num_rows, channels,
    WIDTH: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of γ and β, and the line dx = a·g + b·(x − mean) + c of every channel as rows a, b, c."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    first, second = _add_partials(partial, c, inside, num_chunks, channels, ROWS, BLOCK_C, WIDTH, SECOND)
    inverse = tl.load(moments + channels + c, mask=inside, other=0.0)
    scale = tl.load(moments + 2 * channels + c, mask=inside, other=0.0)
    tl.store(d_gamma + c, second * inverse, mask=inside)
    tl.store(d_beta + c, first, mask=inside)
    tl.store(line + c, scale, mask=inside)
    tl.store(line + channels + c, -scale * inverse * inverse * second / num_rows, mask=inside)
    tl.store(line + 2 * channels + c, -scale * first / num_rows, mask=inside)


@triton.jit
def _gradient(g, value, moments, line, c, inside, channels):
    """dx = a·g + b·(x − mean) + c."""
    mean = tl.load(moments + c, mask=inside, other=0.0)
    a = tl.load(line + c, mask=inside, other=0.0)
    b = tl.load(line + channels + c, mask=inside, other=0.0)
    constant = tl.load(line + 2 * channels + c, mask=inside, other=0.0)
    return a[None, :] * g + b[None, :] * (value - mean[None, :]) + constant[None, :]


@triton.jit
def _gradient_kernel(
    g, x, moments, line, dx, also_x, also_moments, also_line, also_dx, num_rows, channels,
    MASK: tl.constexpr, ALSO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input from g, with MASK still before ReLU; ALSO that of a second norm's."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mask = (rows < num_rows)[:, None] & inside[None, :]
    offsets = rows.to(tl.int64)[:, None] * channels + c[None, :]
    gradient = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if ALSO:
        also_value = tl.load(also_x + offsets, mask=mask, other=0.0).to(tl.float32)
    if MASK:
        scale = tl.load(moments + 2 * channels + c, mask=inside, other=0.0)
        shift = tl.load(moments + 3 * channels + c, mask=inside, other=0.0)
        gradient = tl.where(value * scale[None, :] + shift[None, :] > 0.0, gradient, 0.0)
    tl.store(dx + offsets, _gradient(gradient, value, moments, line, c, inside, channels), mask=mask)
    if ALSO:
        also = _gradient(gradient, also_value, also_moments, also_line, c, inside, channels)
        tl.store(also_dx + offsets, also, mask=mask)


class Walk(NamedTuple):
    """How one kernel divides a tensor."""

    rows: int
    channels: int
    tile: Shape
    programs: int

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.rows // self.tile.block_m), -(-self.channels // self.tile.block_c)

    @property
    def num_chunks(self) -> int:
        """Programs along the rows of a reduction; each takes pairs of tiles."""
        return min(-(-self.tiles[0] // 2), max(1, self.programs // self.tiles[1]))

    @property
    def rows_per_chunk(self) -> int:
        return -(-self.tiles[0] // (2 * self.num_chunks)) * 2 * self.tile.block_m

    @property
    def options(self) -> dict[str, int]:
        return {"BLOCK_M": self.tile.block_m, "BLOCK_C": self.tile.block_c, "num_warps": self.tile.warps}


def plan_reduction(x: Tensor, large: Tile) -> Walk:
    """Tiles for a reduction: small tensors want many small programs, or they wait for memory more than they read."""
    return plan_walk(x, large if x.numel() > SMALL_ELEMENTS else SMALL_REDUCTION)


def plan_walk(x: Tensor, tile: Tile) -> Walk:
    """Tiles for a tensor's rows and channels."""
    channels = x.shape[1]
    return Walk(x.numel() // channels, channels, tile.fit(channels), tile.programs)


def batch_moments(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    count: Tensor,
    epsilon: float,
    momentum: float,
    partial: Tensor | None = None,
) -> Tensor:
    """Rows of mean, 1/σ, scale γ/σ and shift β − mean·γ/σ of a batch (4 × C, FP32); running statistics follow.

    `partial` are sums around the running mean that somebody has made already.
    """
    channels = x.shape[1]
    pivot = running_mean
    if partial is None:
        walk, pivot = plan_reduction(x, STATISTICS), x
        partial = torch.empty(walk.num_chunks, 2, channels, dtype=torch.float32, device=x.device)
        _stats_kernel[walk.num_chunks, walk.tiles[1]](
            x, partial, walk.rows, channels, walk.rows_per_chunk,
            **walk.options,
        )  # fmt: skip
    moments = torch.empty(4, channels, dtype=torch.float32, device=x.device)
    _finish_stats_kernel[(triton.cdiv(channels, FINAL_CHANNELS),)](
        pivot, partial, gamma, beta, running_mean, running_var, count, moments,
        len(partial), x.numel() // channels, channels, epsilon, momentum,
        ROWS=min(FINAL_ROWS, triton.next_power_of_2(len(partial))), BLOCK_C=FINAL_CHANNELS, num_warps=8,
    )  # fmt: skip
    return moments


def normalize_add(
    x: Tensor,
    moments: Tensor,
    residual: Tensor | None = None,
    residual_moments: Tensor | None = None,
) -> Tensor:
    """relu(scale·x + shift + residual), the residual through its own scale and shift where it has moments."""
    walk = plan_walk(x, POINTWISE)
    y = torch.empty_like(x)
    _apply_kernel[walk.tiles](
        x, moments, x if residual is None else residual, moments if residual_moments is None else residual_moments, y,
        walk.rows, walk.channels,
        RESIDUAL=0 if residual is None else 1 if residual_moments is None else 2,
        **walk.options,
    )  # fmt: skip
    return y


class Sums(NamedTuple):
    """Gradients of γ and β, and the line that gives dx."""

    d_gamma: Tensor
    d_beta: Tensor
    line: Tensor


class Normed(NamedTuple):
    """A norm's input and its moments."""

    x: Tensor
    moments: Tensor


def gradient_sums(
    dy: Tensor, more_dy: Tensor | None, x: Tensor, moments: Tensor, mask_from: Tensor | None, g: Tensor | None = None
) -> Sums:
    """Sums over g = (dy + more_dy) behind ReLU's mask, which is read off `mask_from`: x itself, y, or no ReLU at all.

    With `g` the masked gradient is also written there.
    """
    return join_sums(dy, more_dy, [Normed(x, moments)], mask_from, g)[0]


def join_sums(
    dy: Tensor, more_dy: Tensor | None, norms: list[Normed], mask_from: Tensor | None, g: Tensor | None = None
) -> list[Sums]:
    """`gradient_sums` of one norm, or of two that were added before ReLU."""
    (x, moments), (also_x, also_moments) = norms[0], norms[-1]
    walk = plan_reduction(x, GRADIENT_SUMS)
    partial = torch.empty(walk.num_chunks, 1 + len(norms), walk.channels, dtype=torch.float32, device=x.device)
    _sums_kernel[walk.num_chunks, walk.tiles[1]](
        dy, dy if more_dy is None else more_dy, x, x if mask_from is None else mask_from, moments,
        also_x, also_moments, dy if g is None else g, partial, walk.rows, walk.channels, walk.rows_per_chunk,
        MASK=0 if mask_from is None else 1 if mask_from is x else 2,
        MORE=more_dy is not None, ALSO=len(norms) > 1, WRITE=g is not None,
        **walk.options,
    )  # fmt: skip
    return [finish_sums(partial, norm.moments, walk.rows, second) for second, norm in enumerate(norms, 1)]


def finish_sums(partial: Tensor, moments: Tensor, num_rows: int, second: int = 1) -> Sums:
    """Add up what the programs of a reduction left, of two sums a chunk or, of more, the first and `second`."""
    num_chunks, width, channels = partial.shape
    d_gamma, d_beta, line = (
        torch.empty(rows, channels, dtype=torch.float32, device=partial.device) for rows in (1, 1, 3)
    )
    _finish_sums_kernel[(triton.cdiv(channels, FINAL_CHANNELS),)](
        partial, moments, d_gamma, d_beta, line, num_chunks, num_rows, channels, WIDTH=width, SECOND=second,
        ROWS=min(FINAL_ROWS, triton.next_power_of_2(num_chunks)), BLOCK_C=FINAL_CHANNELS, num_warps=8,
    )  # fmt: skip
    return Sums(d_gamma[0], d_beta[0], line)


def input_gradient(g: Tensor, x: Tensor, moments: Tensor, line: Tensor, masked: bool) -> Tensor:
    """The gradient of a norm's input; unless `masked`, ReLU's mask is worked out from x."""
    return _input_gradients(g, [Normed(x, moments)], [line], masked)[0]


def join_gradients(g: Tensor, norms: list[Normed], sums: list[Sums]) -> list[Tensor]:
    """The gradients of the inputs of one norm, or of two that were added, from that behind ReLU."""
    return _input_gradients(g, norms, [part.line for part in sums], masked=True)


def _input_gradients(g: Tensor, norms: list[Normed], lines: list[Tensor], masked: bool) -> list[Tensor]:
    walk = plan_walk(norms[0].x, POINTWISE)
    results = [torch.empty_like(norm.x) for norm in norms]
    _gradient_kernel[walk.tiles](
        g, *norms[0], lines[0], results[0], *norms[-1], lines[-1], results[-1], walk.rows, walk.channels,
        MASK=not masked, ALSO=len(norms) > 1,
        **walk.options,
    )  # fmt: skip
    return results
