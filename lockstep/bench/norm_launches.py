"""What `norm_passes.py` times: the passes over one norm, each alone, and the whole norm as the models call it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.bench.norm_shapes import ADD, ADD_NORM, POOL, RELU, Kind, Use
from lockstep.models.norm import BatchNorm

Launch = Callable[[], object]


@dataclass(frozen=True)
class Copy:
    """The arrays of one norm, filled with noise."""

    x: Tensor
    shortcut: Tensor | None
    dy: Tensor
    more_dy: Tensor | None

    @property
    def inputs(self) -> list[Tensor]:
        return [self.x] if self.shortcut is None else [self.x, self.shortcut]


def build_copy(use: Use, device: torch.device, dtype: torch.dtype = torch.float16) -> Copy:
    """A batch before the norm, the shortcut where there is one, and as many gradients as come back."""

    def noise(side: int) -> Tensor:
        values = torch.randn(use.batch, side, side, use.channels, device=device, dtype=dtype)
        return values.permute(0, 3, 1, 2)  # channels-last

    out_side = use.pooled_side if use.kind == POOL else use.side
    shortcut = noise(use.side) if use.kind in (ADD, ADD_NORM) else None
    return Copy(noise(use.side), shortcut, noise(out_side), noise(out_side) if use.num_gradients == 2 else None)


def build_norms(use: Use, device: torch.device, *, fused: bool) -> tuple[BatchNorm, BatchNorm | None]:
    """The norm, and the shortcut's where it has one."""
    norms = [BatchNorm(use.channels).to(device) for _ in range(use.num_norms)]
    for norm in norms:
        norm.fused = fused
    return norms[0], norms[1] if len(norms) == 2 else None


def call_norm(
    kind: Kind, norm: BatchNorm, x: Tensor, shortcut: Tensor | None, shortcut_norm: BatchNorm | None, padding: int
) -> Tensor:
    """The norm and what follows it, as a model calls it."""
    if kind == RELU:
        return norm.relu(x)
    if kind == POOL:
        return norm.relu_pool(x, padding)[0]
    assert shortcut is not None
    return norm.add_relu(x, shortcut, shortcut_norm)[0]


def build_launches(use: Use, copy: Copy) -> list[Launch]:
    """The passes of `list_passes`, in its order, each ready to be launched alone and any number of times."""
    norm, shortcut_norm = build_norms(use, copy.x.device, fused=True)
    if use.kind == RELU:
        return _relu_launches(norm, copy)
    if use.kind == POOL:
        return _pool_launches(norm, copy, use.padding)
    return _add_launches(norm, shortcut_norm, copy)


def _relu_launches(norm: BatchNorm, copy: Copy) -> list[Launch]:
    from lockstep.kernels.batch_norm import gradient_sums, input_gradient, normalize_add

    x, dy = copy.x, copy.dy
    moments = norm.moments(x)
    line = gradient_sums(dy, None, x, moments, mask_from=x).line
    return [
        lambda: norm.moments(x),
        lambda: normalize_add(x, moments),
        lambda: gradient_sums(dy, None, x, moments, mask_from=x),
        lambda: input_gradient(dy, x, moments, line, masked=False),
    ]


def _pool_launches(norm: BatchNorm, copy: Copy, padding: int) -> list[Launch]:
    from lockstep.kernels.pool import normalize_pool, pool_gradient

    x, dy, more_dy = copy.x, copy.dy, copy.more_dy
    moments = norm.moments(x)
    _, winner = normalize_pool(x, moments, padding)
    return [
        lambda: norm.moments(x),
        lambda: normalize_pool(x, moments, padding),
        lambda: pool_gradient(dy, more_dy, winner, x, moments, padding),
    ]


def _add_launches(norm: BatchNorm, shortcut_norm: BatchNorm | None, copy: Copy) -> list[Launch]:
    from lockstep.kernels.batch_norm import Normed, join_gradients, join_sums, normalize_add

    x, shortcut, dy, more_dy = copy.x, copy.shortcut, copy.dy, copy.more_dy
    assert shortcut is not None
    norms, statistics = [Normed(x, norm.moments(x))], [lambda: norm.moments(x)]
    if shortcut_norm is not None:
        norms.append(Normed(shortcut, shortcut_norm.moments(shortcut)))
        statistics.append(lambda: shortcut_norm.moments(shortcut))
    shortcut_moments = norms[1].moments if shortcut_norm else None
    y, g = normalize_add(*norms[0], shortcut, shortcut_moments), torch.empty_like(x)
    sums = join_sums(dy, more_dy, norms, y, g)
    return [
        *statistics,
        lambda: normalize_add(*norms[0], shortcut, shortcut_moments),
        lambda: join_sums(dy, more_dy, norms, y, g),
        lambda: join_gradients(g, norms, sums),
    ]
