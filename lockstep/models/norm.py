"""Batch norm as a ResNet uses it: with ReLU, with the shortcut added, with the stem's pool; step 6 of the walk.

The plain versions are PyTorch's own operations. The `fused` ones of `kernels/batch_norm.py` and `kernels/pool.py` give
the same numbers in fewer passes over memory; they are for training on a GPU.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

if TYPE_CHECKING:  # Triton, which it needs, may not be there
    from lockstep.kernels.batch_norm import Sums

# The same values twice, for the next convolution and for the shortcut: their gradients come back apart, and the norm
# behind adds them where it reads them anyway.
Pair = tuple[Tensor, Tensor]


class Summed(NamedTuple):
    """A norm's input and, where whoever made it has them already, the partial sums of its statistics."""

    values: Tensor
    partial: Tensor | None = None


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d that knows what follows it."""

    fused = False  # set for training on a GPU

    def plain(self, x: Tensor) -> Tensor:
        """norm(x) alone."""
        return nn.BatchNorm2d.forward(self, x)

    def relu(self, x: Tensor, partial: Tensor | None = None) -> Tensor:
        """relu(norm(x)); `partial` as in `Summed`, for the fused kernels alone."""
        if not self._is_fused:
            return functional.relu_(self.plain(x))
        y: Tensor = _NormRelu.apply(x, partial, self, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y

    def add_relu(self, x: Tensor, shortcut: Tensor, shortcut_norm: "BatchNorm | None" = None) -> Pair:
        """relu(norm(x) + shortcut), the shortcut through its own norm where it has one."""
        if self._is_fused:
            return self.join_relu(Summed(x), shortcut_norm, Summed(shortcut))
        shortcut = shortcut_norm(shortcut) if shortcut_norm else shortcut
        y = functional.relu_(self.plain(x).add_(shortcut))
        return y, y

    def join_relu(self, x: Summed, shortcut_norm: "BatchNorm | None", shortcut: Summed) -> Pair:
        """`add_relu` by the fused kernels."""
        pair: Pair = _NormAddRelu.apply(*join_operands(self, x, shortcut_norm, shortcut))  # type: ignore[no-untyped-call]
        return pair

    def relu_pool(self, x: Tensor, padding: int = 1) -> Pair:
        """The largest of relu(norm(x)) over 3 × 3 pixels, at stride 2."""
        if self._is_fused:
            pair: Pair = _NormReluPool.apply(x, self, padding, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return pair
        y = functional.max_pool2d(functional.relu_(self.plain(x)), 3, stride=2, padding=padding)
        return y, y

    @property
    def _is_fused(self) -> bool:
        return self.fused and self.training

    def moments(self, x: Tensor, partial: Tensor | None = None) -> Tensor:
        """Mean, 1/σ, scale and shift of this batch; the running statistics follow."""
        from lockstep.kernels.batch_norm import batch_moments

        statistics = (self.running_mean, self.running_var, self.num_batches_tracked)
        return batch_moments(x, self.weight, self.bias, *statistics, self.eps, self.momentum, partial)  # type: ignore[arg-type]


class BatchNormRelu(BatchNorm):
    """Batch norm and ReLU as one module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x)


class BatchNormReluPool(BatchNorm):
    """Batch norm, ReLU and a 3 × 3 pool without border as one module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu_pool(x, padding=0)[0]


def dense(x: Tensor) -> Tensor:
    """In channels-last memory."""
    return x.contiguous(memory_format=torch.channels_last)


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, partial: Tensor | None, norm: BatchNorm, gamma: Tensor, beta: Tensor) -> Tensor:
        from lockstep.kernels.batch_norm import normalize_add

        x = dense(x)
        moments = norm.moments(x, partial)
        ctx.save_for_backward(x, moments)
        return normalize_add(x, moments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.batch_norm import gradient_sums, input_gradient

        x, moments = ctx.saved_tensors
        dy = dense(dy)
        sums = gradient_sums(dy, None, x, moments, mask_from=x)
        dx = input_gradient(dy, x, moments, sums.line, masked=False)
        return dx, None, None, sums.d_gamma, sums.d_beta


def join_operands(norm: BatchNorm, x: Summed, shortcut_norm: BatchNorm | None, shortcut: Summed) -> tuple[Any, ...]:
    """What an autograd function around `join` takes; `part_gradients` gives as many gradients."""
    extra = (shortcut_norm.weight, shortcut_norm.bias) if shortcut_norm else (None, None)
    return norm, shortcut_norm, *x, *shortcut, norm.weight, norm.bias, *extra


def join(
    norm: BatchNorm,
    shortcut_norm: BatchNorm | None,
    x: Tensor,
    partial: Tensor | None,
    shortcut: Tensor,
    shortcut_partial: Tensor | None,
    *parameters: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y = relu(norm(x) + shortcut), and what `part_gradients` needs."""
    from lockstep.kernels.batch_norm import normalize_add

    x, shortcut = dense(x), dense(shortcut)
    moments = norm.moments(x, partial)
    shortcut_moments = shortcut_norm.moments(shortcut, shortcut_partial) if shortcut_norm else None
    y = normalize_add(x, moments, shortcut, shortcut_moments)
    return y, (x, y, moments, *((shortcut, shortcut_moments) if shortcut_moments is not None else ()))


def part_gradients(saved: tuple[Tensor, ...], g: Tensor, sums: "Sums") -> tuple[Tensor | None, ...]:
    """The gradients of `join_operands` from that of the sum, g, which is the shortcut's own where it has no norm."""
    from lockstep.kernels.batch_norm import gradient_sums, input_gradient

    x, _, moments, *of_shortcut = saved
    dx = input_gradient(g, x, moments, sums.line, masked=True)
    if not of_shortcut:
        return None, None, dx, None, g, None, sums.d_gamma, sums.d_beta, None, None
    shortcut, shortcut_moments = of_shortcut
    more = gradient_sums(g, None, shortcut, shortcut_moments, mask_from=None)
    d_shortcut = input_gradient(g, shortcut, shortcut_moments, more.line, masked=True)
    return None, None, dx, None, d_shortcut, None, sums.d_gamma, sums.d_beta, more.d_gamma, more.d_beta


class _NormAddRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Pair:
        y, saved = join(*operands)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.batch_norm import gradient_sums

        x, y, moments, *_ = ctx.saved_tensors
        dy, more_dy = _two_gradients(dy, more_dy)
        g = torch.empty_like(x)
        sums = gradient_sums(dy, more_dy, x, moments, mask_from=y, g=g)
        return part_gradients(ctx.saved_tensors, g, sums)


class _NormReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: BatchNorm, padding: int, gamma: Tensor, beta: Tensor) -> Pair:
        from lockstep.kernels.pool import normalize_pool

        x = dense(x)
        moments = norm.moments(x)
        y, winner = normalize_pool(x, moments, padding)
        ctx.padding = padding
        ctx.save_for_backward(x, winner, moments)
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.pool import pool_gradient

        x, winner, moments = ctx.saved_tensors
        dx, sums = pool_gradient(*_two_gradients(dy, more_dy), winner, x, moments, ctx.padding)
        return dx, None, None, sums.d_gamma, sums.d_beta


def _two_gradients(dy: Tensor | None, more_dy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both ways back, dense; either may be unused."""
    first, *others = [dense(part) for part in (dy, more_dy) if part is not None]
    return first, others[0] if others else None
