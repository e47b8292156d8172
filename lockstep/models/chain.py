"""1×1 convolutions and the norms around them, fused across the blocks of a ResNet: step 6 of the walk.

A block's sum goes into the next block's first convolution, so the two share one autograd function; with few channels so
does everything from behind the block's second convolution. What that spares stands in `kernels/pointwise.py`,
`kernels/pointwise_back.py` and `kernels/tail.py`. All this is for training on a GPU; without it the same modules run
one by one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lockstep.models.norm import BatchNorm, Summed, dense, join, joined_norms, parameter_gradients, parameters_of


class Pointwise(nn.Conv2d):
    """A 1×1 convolution: over channels-last pixels a plain matrix product, which cuBLAS does faster than cuDNN."""

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight) if self.fused else super().forward(x)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """The 1×1 convolution of x by cuBLAS."""
    return functional.linear(x.permute(0, 2, 3, 1), weight.flatten(1)).permute(0, 3, 1, 2)


def convolve(convolution: nn.Conv2d, x: Tensor, norm: BatchNorm) -> Summed:
    """The convolution of x, with the sums of the norm that follows where they can be had on the way."""
    if isinstance(convolution, Pointwise):
        return Summed(*_Product.apply(x, convolution.weight, norm.running_mean))  # type: ignore[no-untyped-call]
    return Summed(convolution(x))


class Tail(NamedTuple):
    """The end of a block, from behind its second convolution, and the beginning of the next: (norm, ReLU, 1×1
    convolution, norm) + (shortcut, where it is projected through a norm), ReLU, 1×1 convolution."""

    norm: BatchNorm
    convolution: nn.Conv2d
    last_norm: BatchNorm
    shortcut_norm: BatchNorm | None
    next_convolution: nn.Conv2d | None
    next_norm: BatchNorm | None

    def run(self, x: Tensor, shortcut: Summed) -> tuple[Summed, Tensor]:
        """The next convolution of the block's sum, if there is one, with the sums of the norm that follows; the sum."""
        next_weight = self.next_convolution.weight if self.next_convolution else None
        joined = (*parameters_of(self.last_norm), *parameters_of(self.shortcut_norm))
        if self._is_small(x.dtype):
            operands = (x, *shortcut, self.convolution.weight, next_weight, *parameters_of(self.norm), *joined)
            z, partial, y = _WholeTail.apply(self, *operands)  # type: ignore[no-untyped-call]
        else:
            last = convolve(self.convolution, self.norm.relu(x), self.last_norm)
            z, partial, y = _Join.apply(self, *last, *shortcut, next_weight, *joined)  # type: ignore[no-untyped-call]
        return Summed(y if z is None else z, partial), y

    def _is_small(self, dtype: torch.dtype) -> bool:
        from lockstep.kernels.tail import suits_tail

        if self.next_convolution is None:
            return False
        out_channels, in_channels = self.convolution.weight.shape[:2]
        return suits_tail(dtype, in_channels, out_channels, self.next_convolution.out_channels)

    def convolve_next(self, y: Tensor, next_weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The next convolution, if there is one, and its sums."""
        if next_weight is None:
            return None, None
        assert self.next_norm is not None
        assert self.next_norm.running_mean is not None
        return _multiply_and_sum(y, next_weight, self.next_norm.running_mean)


def _multiply_and_sum(x: Tensor, weight: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor | None]:
    from lockstep.kernels.pointwise import product_stats, suits_stats

    out_channels, in_channels = weight.shape[:2]
    if suits_stats(x.dtype, in_channels, out_channels):
        return product_stats(x, weight, pivot)
    return multiply(x, weight), None


def _flatten(x: Tensor) -> Tensor:
    """Channels-last pixels as the rows of a matrix."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def weight_gradient(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `multiply`'s weight."""
    return (_flatten(dz).t() @ _flatten(x)).view_as(weight)


def multiply_back(dz: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `multiply`'s x."""
    return (dz.permute(0, 2, 3, 1) @ weight.flatten(1)).permute(0, 3, 1, 2)


def _leave_out(ctx: Any, partial: Tensor | None) -> None:
    """No gradient comes back for the sums: the norm's own says what depends on them."""
    ctx.set_materialize_grads(False)
    if partial is not None:
        ctx.mark_non_differentiable(partial)


def _product_back(dz: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a product's operands."""
    from lockstep.kernels.pointwise_back import product_gradients, suits_gradients

    out_channels, in_channels = weight.shape[:2]
    if suits_gradients(x.dtype, in_channels, out_channels):
        return product_gradients(dz, weight, x)
    return multiply_back(dz, weight), weight_gradient(dz, x, weight)


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
        return *_product_back(dense(dz), *ctx.saved_tensors), None


class _WholeTail(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tail: Tail,
        x: Tensor,
        shortcut: Tensor,
        shortcut_partial: Tensor | None,
        weight: Tensor,
        next_weight: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        from lockstep.kernels.tail import product_join, square_sums

        x, shortcut = dense(x), dense(shortcut)
        moments = tail.norm.moments(x)
        squares = square_sums(x, moments)
        behind = tail.last_norm.product_moments(squares, moments, weight, x.numel() // x.shape[1])
        way = (shortcut, tail.shortcut_norm.moments(shortcut, shortcut_partial)) if tail.shortcut_norm else ()
        y = product_join(x, moments, weight, behind, shortcut, way[1] if way else None)
        z, partial = tail.convolve_next(y, next_weight)
        ctx.save_for_backward(x, moments, squares, weight, next_weight, behind, y, *way)
        _leave_out(ctx, partial)
        return z, partial, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, _: None, dy: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.batch_norm import Normed, input_gradient
        from lockstep.kernels.pointwise_back import Made, product_sums
        from lockstep.kernels.tail import tail_gradients

        x, moments, squares, weight, next_weight, behind, y, *way = ctx.saved_tensors
        made, g = Made(x, moments, weight), torch.empty_like(y)
        norms = [Normed(y, behind), *([Normed(*way)] if way else [])]  # the first one's input is what is made
        sums, d_next_weight = product_sums(dense(dz), next_weight, dense(dy), y, norms, g, made)
        du, own_sums, d_weight = tail_gradients(g, sums[0], weight, x, moments, squares)
        dx = input_gradient(du, x, moments, own_sums.line, masked=True)
        d_shortcut = input_gradient(g, *norms[1], sums[1].line, masked=True) if way else g
        parameters = parameter_gradients([own_sums, *sums], 3)
        return None, dx, d_shortcut, None, d_weight, d_next_weight, *parameters


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tail: Tail,
        x: Tensor,
        partial: Tensor | None,
        shortcut: Tensor,
        shortcut_partial: Tensor | None,
        next_weight: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        y, saved = join(tail.last_norm, Summed(x, partial), tail.shortcut_norm, Summed(shortcut, shortcut_partial))
        z, next_partial = tail.convolve_next(y, next_weight)
        ctx.save_for_backward(next_weight, *saved)
        _leave_out(ctx, next_partial)
        return z, next_partial, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, _: None, dy: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.kernels.batch_norm import join_gradients, join_sums
        from lockstep.kernels.pointwise_back import product_sums, suits_sums

        next_weight, *saved = ctx.saved_tensors
        norms, y = joined_norms(saved), saved[1]
        dy, g, d_next_weight = dense(dy), torch.empty_like(y), None
        if dz is None:
            sums = join_sums(dy, None, norms, y, g)
        elif suits_sums(y.dtype, *next_weight.shape[:2]):
            sums, d_next_weight = product_sums(dense(dz), next_weight, dy, y, norms, g)
        else:
            dz = dense(dz)
            sums = join_sums(multiply_back(dz, next_weight), dy, norms, y, g)
            d_next_weight = weight_gradient(dz, y, next_weight)
        dx, *of_shortcut = join_gradients(g, norms, sums)
        # Without a norm of its own, the shortcut's gradient is that of the sum.
        return None, dx, None, *(of_shortcut or [g]), None, d_next_weight, *parameter_gradients(sums, 2)
