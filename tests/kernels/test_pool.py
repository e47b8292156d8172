"""Norm, ReLU and pool against PyTorch's own operations in FP64, pixel by pixel, under Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from lockstep.kernels.batch_norm import batch_moments
from lockstep.kernels.pool import normalize_pool, pool_gradient

EPSILON = 1e-5
# Channels, height, width: sides of both kinds, with and without pixels that no window has, one tile and several.
SHAPES = [(3, 3, 3), (24, 4, 4), (96, 5, 8), (3, 12, 7), (24, 13, 10), (96, 11, 6)]


@pytest.fixture(autouse=True)
def nothing_is_written_by_chance() -> Iterator[None]:
    """New tensors are full of NaN (of 255, for the winners), so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random_images(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.contiguous(memory_format=torch.channels_last)


def random_parameters(channels: int) -> tuple[Tensor, Tensor]:
    """γ and β, some of either below zero."""
    gamma, beta = torch.randn(2, channels, generator=torch.Generator().manual_seed(0))
    gamma[::2] = gamma[::2].abs() + 0.1
    gamma[1::3] = -gamma[1::3].abs() - 0.1
    return gamma, beta


def find_moments(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    mean, var = torch.zeros_like(gamma), torch.ones_like(gamma)
    return batch_moments(x, gamma, beta, mean, var, torch.tensor(0), EPSILON, 0.1)


class Expected(NamedTuple):
    """What PyTorch makes of it in FP64."""

    y: Tensor
    winner: Tensor
    d_x: Tensor
    d_gamma: Tensor
    d_beta: Tensor


def run_plain(x: Tensor, gamma: Tensor, beta: Tensor, padding: int, dy: Tensor) -> Expected:
    x, gamma, beta = (part.double().requires_grad_() for part in (x.detach(), gamma, beta))
    before = functional.relu(functional.batch_norm(x, None, None, gamma, beta, training=True, eps=EPSILON))
    y, index = functional.max_pool2d(before, 3, stride=2, padding=padding, return_indices=True)
    found = torch.autograd.grad(y, (x, gamma, beta), dy)
    h, w = (2 * torch.arange(side) - padding for side in y.shape[2:])
    tap = (index // x.shape[3] - h[:, None]) * 3 + index % x.shape[3] - w
    return Expected(y.detach(), torch.where(y > 0, tap, 9), *found)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


def check(x: Tensor, padding: int) -> None:
    gamma, beta = random_parameters(x.shape[1])
    out_shape = (*x.shape[:2], *((side + 2 * padding - 3) // 2 + 1 for side in x.shape[2:]))
    gradients = [random_images(out_shape, seed, x.dtype) for seed in (2, 3)]
    tolerance = 2e-5 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    moments = find_moments(x, gamma, beta)
    y, winner = normalize_pool(x, moments, padding)
    assert y.shape == winner.shape == out_shape
    for dy, more_dy in ((gradients[0], None), gradients):
        d_x, sums = pool_gradient(dy, more_dy, winner, x, moments, padding)
        expected = run_plain(x, gamma, beta, padding, dy.double() if more_dy is None else dy.double() + more_dy)
        assert torch.equal(winner.long(), expected.winner)
        for found, exact in ((y, expected.y), (d_x, expected.d_x)):
            assert found.dtype == x.dtype
            assert found.is_contiguous(memory_format=torch.channels_last)
            assert_near(found, exact, tolerance)
        assert_near(sums.d_gamma, expected.d_gamma, 2e-5)
        assert_near(sums.d_beta, expected.d_beta, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_the_plain_version(shape: tuple[int, ...], padding: int, dtype: torch.dtype) -> None:
    check(random_images((2, *shape), 1, dtype) * 2 + 3, padding)


@pytest.mark.parametrize("sides", [(1, 2), (2, 1), (2, 2)])
def test_an_image_smaller_than_a_window_has_its_border(sides: tuple[int, int]) -> None:
    check(random_images((2, 5, *sides), 1, torch.float32), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 1])
def test_of_equals_the_first_wins(padding: int, dtype: torch.dtype) -> None:
    check(random_images((2, 24, 9, 8), 1, dtype).round(), padding)


def list_pixels(winner: Tensor, sides: torch.Size, padding: int) -> list[Tensor]:
    """Row and column of every winner that there is, and whether the image has them."""
    tap, there = winner.long(), winner < 9
    h, w = (2 * torch.arange(side) - padding for side in winner.shape[2:])
    rows, columns = h[:, None] + tap // 3, w + tap % 3
    return [((pixels >= 0) & (pixels < side))[there] for pixels, side in zip((rows, columns), sides, strict=True)]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("lost", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_lost_lead_nowhere_outside(lost: float, padding: int, dtype: torch.dtype) -> None:
    x = random_images((2, 8, 6, 7), 1, dtype)
    x[0, :4, :3, :4] = lost  # also all of a window
    x[1, :, 2, ::3] = lost
    gamma, beta = random_parameters(8)
    for moments in (find_moments(x, gamma, beta), torch.stack([beta, gamma.abs(), gamma, beta.abs()])):
        y, winner = normalize_pool(x, moments, padding)
        assert (winner <= 9).all()
        assert all(inside.all() for inside in list_pixels(winner, x.shape[2:], padding))
        d_x, _ = pool_gradient(torch.ones_like(y), None, winner, x, moments, padding)
        assert d_x.isfinite().all() <= moments.isfinite().all()  # the loss scale must hear of it


@pytest.mark.filterwarnings("ignore:invalid value")  # 0 · ∞ beyond the last window
def test_without_gamma_beta_alone_comes_out() -> None:
    x = random_images((2, 4, 7, 6), 1, torch.float32)
    gamma, beta = torch.zeros(4), torch.tensor([-1.0, 0.0, 0.5, 2.0])
    moments = find_moments(x, gamma, beta)
    y, winner = normalize_pool(x, moments, 1)
    assert torch.equal(y, beta.relu()[:, None, None].expand_as(y))
    assert torch.equal(winner == 9, y == 0)
    assert all(inside.all() for inside in list_pixels(winner, x.shape[2:], 1))
    d_x, sums = pool_gradient(torch.ones_like(y), None, winner, x, moments, 1)
    assert (d_x == 0).all()
    assert torch.equal(sums.d_beta, (y > 0).sum((0, 2, 3)).float())


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.kernels import pool

FLOATS, SIGNED = ("moments", "partial", "line"), ("dy", "more_dy", "x", "y", "dx")

def compile(kernel, half, **constants):
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(SIGNED, half)
    types |= {"winner": "*u8"} | dict.fromkeys(constants, "constexpr")
    given = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: types[name] for name in names}, constexprs=given)
    triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4})

for half, work in (("*fp16", tl.float16), ("*bf16", tl.float32)):
    compile(pool._pool_kernel, half, PAD=1, WORK=work, ROWS=2, BLOCK_W=8, BLOCK_C=64)
    for kernel in (pool._pool_sums_kernel, pool._pool_gradient_kernel):
        compile(kernel, half, PAD=1, MORE=True, BLOCK_M=16, BLOCK_C=64)
"""


def test_the_compiler_takes_what_the_interpreter_does() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
