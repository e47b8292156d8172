"""Batch norm as a ResNet uses it: with ReLU, with the shortcut added, with the stem's pool; step 6 of the walk.

The plain versions are PyTorch's own operations. The `fused` ones of `kernels/batch_norm.py` and `kernels/pool.py` give
the same numbers in fewer passes over memory; they are for training on a GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# The same values twice, for the next convolution and for the shortcut: their gradients come back apart, and the norm
# behind adds them where it reads them anyway.
Pair = tuple[Tensor, Tensor]


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d that knows what follows it."""

    fused = False  # set for training on a GPU

    def plain(self, x: Tensor) -> Tensor:
        """norm(x) alone."""
        return nn.BatchNorm2d.forward(self, x)

    def relu(self, x: Tensor) -> Tensor:
        """relu(norm(x))."""
        if not self._is_fused:
            return functional.relu_(self.plain(x))
        y: Tensor = _NormRelu.apply(x, self, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y

    def add_relu(self, x: Tensor, shortcut: Tensor, shortcut_norm: "BatchNorm | None" = None) -> Pair:
        """relu(norm(x) + shortcut), the shortcut through its own norm where it has one."""
        if self._is_fused:
            extra = (shortcut_norm.weight, shortcut_norm.bias) if shortcut_norm else (None, None)
            parameters = (self.weight, self.bias, *extra)
            pair: Pair = _NormAddRelu.apply(x, shortcut, self, shortcut_norm, *parameters)  # type: ignore[no-untyped-call]
            return pair
        shortcut = shortcut_norm(shortcut) if shortcut_norm else shortcut
        y = functional.relu_(self.plain(x).add_(shortcut))
        return y, y

    def relu_pool(self, x: Tensor) -> Pair:
        """The largest of relu(norm(x)) over 3 × 3 pixels, at stride 2."""
        if self._is_fused:
            pair: Pair = _NormReluPool.apply(x, self, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return pair
        y = functional.max_pool2d(functional.relu_(self.plain(x)), 3, stride=2, padding=1)
        return y, y

    @property
    def _is_fused(self) -> bool:
        return self.fused and self.training

    def moments(self, x: Tensor) -> Tensor:
        """Mean, 1/σ, scale and shift of this batch; the running statistics follow."""
        from lockstep.kernels.batch_norm import batch_moments

        statistics = (self.running_mean, self.running_var, self.num_batches_tracked)
        return batch_moments(x, self.weight, self.bias, *statistics, self.eps, self.momentum)  # type: ignore[arg-type]


class BatchNormRelu(BatchNorm):
    """Batch norm and ReLU as one module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x)


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: BatchNorm, gamma: Tensor, beta: Tensor) -> Tensor:
        from lockstep.kernels.batch_norm import normalize_add

        x = _dense(x)
        moments = norm.moments(x)
        ctx.save_for_backward(x, moments)
        return normalize_add(x, moments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.batch_norm import gradient_sums, input_gradient

        x, moments = ctx.saved_tensors
        dy = _dense(dy)
        sums = gradient_sums(dy, None, x, moments, mask_from=x)
        dx = input_gradient(dy, x, moments, sums.line, masked=False)
        return dx, None, sums.d_gamma, sums.d_beta


class _NormAddRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor, norm: BatchNorm, shortcut_norm: BatchNorm | None, *parameters: Tensor
    ) -> Pair:
        from lockstep.kernels.batch_norm import normalize_add

        x, shortcut = _dense(x), _dense(shortcut)
        moments = norm.moments(x)
        shortcut_moments = shortcut_norm.moments(shortcut) if shortcut_norm else None
        y = normalize_add(x, moments, shortcut, shortcut_moments)
        ctx.save_for_backward(x, y, moments, *((shortcut, shortcut_moments) if shortcut_norm else ()))
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.batch_norm import gradient_sums, input_gradient

        x, y, moments, *of_shortcut = ctx.saved_tensors
        dy, more_dy = _two_gradients(dy, more_dy)
        g = torch.empty_like(x)
        sums = gradient_sums(dy, more_dy, x, moments, mask_from=y, g=g)
        dx = input_gradient(g, x, moments, sums.line, masked=True)
        if not of_shortcut:
            return dx, g, None, None, sums.d_gamma, sums.d_beta, None, None
        shortcut, shortcut_moments = of_shortcut
        more = gradient_sums(g, None, shortcut, shortcut_moments, mask_from=None)
        d_shortcut = input_gradient(g, shortcut, shortcut_moments, more.line, masked=True)
        return dx, d_shortcut, None, None, sums.d_gamma, sums.d_beta, more.d_gamma, more.d_beta


class _NormReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: BatchNorm, gamma: Tensor, beta: Tensor) -> Pair:
        from lockstep.kernels.pool import normalize_pool

        x = _dense(x)
        moments = norm.moments(x)
        y, winner = normalize_pool(x, moments)
        ctx.save_for_backward(x, winner, moments)
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.pool import pool_gradient

        x, winner, moments = ctx.saved_tensors
        dx, sums = pool_gradient(*_two_gradients(dy, more_dy), winner, x, moments)
        return dx, None, sums.d_gamma, sums.d_beta


def _two_gradients(dy: Tensor | None, more_dy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both ways back, dense; either may be unused."""
    first, *others = [_dense(part) for part in (dy, more_dy) if part is not None]
    return first, others[0] if others else None
