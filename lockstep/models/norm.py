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
    from lockstep.kernels.batch_norm import Normed, Sums

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
        if self._is_fused and (shortcut_norm is None or shortcut_norm.training):
            operands = (self, x, shortcut_norm, shortcut, *parameters_of(self), *parameters_of(shortcut_norm))
            pair: Pair = _NormAddRelu.apply(*operands)  # type: ignore[no-untyped-call]
            return pair
        shortcut = shortcut_norm(shortcut) if shortcut_norm else shortcut
        y = functional.relu_(self.plain(x).add_(shortcut))
        return y, y

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

        return batch_moments(x, *self._state, partial)

    def product_moments(self, squares: Tensor, before: Tensor, weight: Tensor, num_rows: int) -> Tensor:
        """`moments` of a 1×1 convolution that is not there, from `square_sums` and moments of what goes into it."""
        from lockstep.kernels.tail import product_moments

        return product_moments(squares, before, weight, *self._state, num_rows)

    @property
    def _state(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, float]:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        statistics = (self.running_mean, self.running_var, self.num_batches_tracked)
        return self.weight, self.bias, *statistics, self.eps, self.momentum


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


def join(
    norm: BatchNorm, x: Summed, shortcut_norm: BatchNorm | None, shortcut: Summed
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y = relu(norm(x) + shortcut), the shortcut through its own norm where it has one, and what the way back needs."""
    from lockstep.kernels.batch_norm import normalize_add

    values, other = dense(x.values), dense(shortcut.values)
    moments = norm.moments(values, x.partial)
    other_moments = shortcut_norm.moments(other, shortcut.partial) if shortcut_norm else None
    y = normalize_add(values, moments, other, other_moments)
    return y, (values, y, moments, *((other, other_moments) if other_moments is not None else ()))


def parameters_of(norm: BatchNorm | None) -> tuple[Tensor | None, Tensor | None]:
    """γ and β of a norm that may not be there."""
    return (norm.weight, norm.bias) if norm else (None, None)


def parameter_gradients(sums: list["Sums"], num_norms: int) -> list[Tensor | None]:
    """Those of `parameters_of` so many norms, of which the last may not be there."""
    found: list[Tensor | None] = [gradient for part in sums for gradient in (part.d_gamma, part.d_beta)]
    return found + [None] * (2 * num_norms - len(found))


def joined_norms(saved: tuple[Tensor, ...]) -> list["Normed"]:
    """The norm, or the two, whose outputs `join` added."""
    from lockstep.kernels.batch_norm import Normed

    x, _, moments, *of_shortcut = saved
    return [Normed(x, moments), *([Normed(*of_shortcut)] if of_shortcut else [])]


class _NormAddRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        norm: BatchNorm,
        x: Tensor,
        shortcut_norm: BatchNorm | None,
        shortcut: Tensor,
        *parameters: Tensor | None,
    ) -> Pair:
        y, saved = join(norm, Summed(x), shortcut_norm, Summed(shortcut))
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.batch_norm import join_gradients, join_sums

        norms, y = joined_norms(ctx.saved_tensors), ctx.saved_tensors[1]
        dy, more_dy = _two_gradients(dy, more_dy)
        g = torch.empty_like(y)
        sums = join_sums(dy, more_dy, norms, y, g)
        dx, *of_shortcut = join_gradients(g, norms, sums)
        # Without a norm of its own, the shortcut's gradient is that of the sum.
        return None, dx, None, *(of_shortcut or [g]), *parameter_gradients(sums, 2)


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
