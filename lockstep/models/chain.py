"""1×1 convolutions and the norms around them, fused across the blocks of a ResNet: step 6 of the walk.

A block's sum goes into the next block's first convolution, so the two share one autograd function; what that spares
stands in `kernels/pointwise.py`. All this is for training on a GPU; without it the same modules run one by one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lockstep.models.norm import BatchNorm, Summed, dense, join, join_operands, part_gradients


class Pointwise(nn.Conv2d):
    """A 1×1 convolution: over channels-last pixels a plain matrix product, which cuBLAS does faster than cuDNN."""

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(x, self.weight) if self.fused else super().forward(x)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x.permute(0, 2, 3, 1), weight.flatten(1)).permute(0, 3, 1, 2)


def convolve(convolution: nn.Conv2d, x: Tensor, norm: BatchNorm) -> Summed:
    """The convolution of x, with the sums of the norm that follows where they can be had on the way."""
    if isinstance(convolution, Pointwise):
        return Summed(*_Product.apply(x, convolution.weight, norm.running_mean))  # type: ignore[no-untyped-call]
    return Summed(convolution(x))


def join_convolve(
    norm: BatchNorm,
    x: Summed,
    shortcut_norm: BatchNorm | None,
    shortcut: Summed,
    convolution: nn.Conv2d,
    next_norm: BatchNorm,
) -> tuple[Summed, Tensor]:
    """relu(norm(x) + shortcut) and, before it, its 1×1 convolution with the sums of the norm that follows."""
    operands = join_operands(norm, x, shortcut_norm, shortcut)
    z, partial, y = _JoinProduct.apply(convolution.weight, next_norm.running_mean, *operands)  # type: ignore[no-untyped-call]
    return Summed(z, partial), y


def _multiply_and_sum(x: Tensor, weight: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor | None]:
    from lockstep.kernels.pointwise import product_stats, suits_stats

    out_channels, in_channels = weight.shape[:2]
    if suits_stats(x.dtype, in_channels, out_channels):
        return product_stats(x, weight, pivot)
    return _multiply(x, weight), None


def _flatten(x: Tensor) -> Tensor:
    """Channels-last pixels as the rows of a matrix."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def _weight_gradient(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return (_flatten(dz).t() @ _flatten(x)).view_as(weight)


def _input_gradient(dz: Tensor, weight: Tensor) -> Tensor:
    return (dz.permute(0, 2, 3, 1) @ weight.flatten(1)).permute(0, 3, 1, 2)


def _leave_out(ctx: Any, partial: Tensor | None) -> None:
    """No gradient comes back for the sums: the norm's own says what depends on them."""
    ctx.set_materialize_grads(False)
    if partial is not None:
        ctx.mark_non_differentiable(partial)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor | None]:
        x = dense(x)
        z, partial = _multiply_and_sum(x, weight, pivot)
        ctx.save_for_backward(x, weight)
        _leave_out(ctx, partial)
        return z, partial

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dz = dense(dz)
        return _input_gradient(dz, weight), _weight_gradient(dz, x, weight), None


class _JoinProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pivot: Tensor, *operands: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        y, saved = join(*operands)
        z, partial = _multiply_and_sum(y, weight, pivot)
        ctx.save_for_backward(weight, *saved)
        _leave_out(ctx, partial)
        return z, partial, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, _: None, more_dy: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.batch_norm import gradient_sums
        from lockstep.kernels.pointwise import product_sums, suits_sums

        weight, *saved = ctx.saved_tensors
        x, y, moments, *_ = saved
        dz, more_dy = dense(dz), dense(more_dy)
        g = torch.empty_like(x)
        if suits_sums(x.dtype, *weight.shape[:2]):
            sums = product_sums(dz, weight, more_dy, x, y, moments, g)
        else:
            sums = gradient_sums(_input_gradient(dz, weight), more_dy, x, moments, mask_from=y, g=g)
        return _weight_gradient(dz, y, weight), None, *part_gradients(saved, g, sums)
