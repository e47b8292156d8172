"""1×1 convolutions that do a norm's sums on the way, against plain arithmetic in FP64, under Triton's interpreter."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lockstep.models import set_fused
from lockstep.models.norm import BatchNorm
from lockstep.models.resnet import Bottleneck, run_chain

pytest.importorskip("triton")

from lockstep.kernels.batch_norm import Normed, Sums, batch_moments
from lockstep.kernels.pointwise import product_stats, suits_stats
from lockstep.kernels.pointwise_back import product_gradients, product_sums, suits_gradients, suits_sums

HALVES = [torch.float16, torch.bfloat16]
# Images, height, width, inner and outer channels: tiles that end with the rows and tiles that do not.
SHAPES = [(2, 8, 8, 64, 64), (3, 5, 7, 64, 128), (1, 1, 3, 128, 192), (2, 9, 5, 256, 64)]
BACK_SHAPES = [(2, 8, 8, 64, 256), (3, 5, 7, 64, 128), (1, 1, 3, 64, 64)]


def random_images(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return values.contiguous(memory_format=torch.channels_last)


def random_moments(channels: int, seed: int, device: str = "cpu") -> Tensor:
    """Mean, 1/σ, scale and shift; some channels are turned round."""
    return torch.randn(4, channels, generator=torch.Generator().manual_seed(seed)).to(device)


def check_statistics(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    count, height, width, inner, outer = shape
    x = random_images((count, inner, height, width), 0, dtype, device)
    weight = random_images((outer, inner, 1, 1), 1, dtype, device) / inner**0.5
    norm = BatchNorm(outer).to(device)
    assert norm.running_mean is not None
    norm.running_mean.normal_(generator=torch.Generator(device).manual_seed(2))
    z, partial = product_stats(x, weight, norm.running_mean)
    exact = nn.functional.conv2d(x.double(), weight.double())
    assert z.is_contiguous(memory_format=torch.channels_last)
    assert (z - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    expected = BatchNorm(outer).to(device)
    expected.load_state_dict(norm.state_dict())
    expected.double()(z.double())  # the statistics are those of the values as they are stored
    moments = norm.moments(z, partial)
    values = z.double().permute(1, 0, 2, 3).flatten(1)
    torch.testing.assert_close(moments[0].double(), values.mean(1), rtol=1e-4, atol=1e-5)
    inverse = (values.var(1, correction=0) + norm.eps).rsqrt()
    torch.testing.assert_close(moments[1].double(), inverse, rtol=1e-4, atol=1e-5)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(norm.get_buffer(name).double(), buffer.double(), rtol=1e-4, atol=1e-5)


def check_sums(sums: Sums, exact: Tensor, x: Tensor, moments: Tensor) -> None:
    """The gradients of γ and β are those of a gradient known exactly."""
    mean, inverse = moments[0].double()[:, None, None], moments[1].double()
    assert (sums.d_beta - exact.sum((0, 2, 3))).abs().max() < 1e-5 * exact.abs().sum((0, 2, 3)).max()
    expected = (exact * (x.double() - mean)).sum((0, 2, 3)) * inverse
    assert (sums.d_gamma - expected).abs().max() < 1e-4 * expected.abs().max()


def check_matrix(d_weight: Tensor, dz: Tensor, y: Tensor, slack: float = 1e-5) -> None:
    """dzᵀ·y, rounded, and with FP32 sums or a y that is itself a little off."""
    exact = torch.einsum("nkhw,nchw->kc", dz.double(), y.double())
    size = torch.einsum("nkhw,nchw->kc", dz.double().abs(), y.double().abs())
    assert ((d_weight.flatten(1) - exact).abs() <= torch.finfo(dz.dtype).eps * exact.abs() + slack * size).all()


def check_gradients(shape: tuple[int, ...], dtype: torch.dtype, num_norms: int, device: str = "cpu") -> None:
    count, height, width, inner, outer = shape
    dz = random_images((count, inner, height, width), 0, dtype, device)
    more_dy, y = (random_images((count, outer, height, width), seed, dtype, device) for seed in (1, 3))
    weight = random_images((inner, outer, 1, 1), 4, dtype, device) / inner**0.5
    norms = [
        Normed(
            random_images((count, outer, height, width), 5 + seed, dtype, device), random_moments(outer, seed, device)
        )
        for seed in range(num_norms)
    ]
    g = torch.empty_like(y)
    sums, d_weight = product_sums(dz, weight, more_dy, y, norms, g)
    product = torch.einsum("nkhw,kc->nchw", dz.double(), weight.double().flatten(1))
    exact = torch.where(y > 0, product + more_dy.double(), 0.0)
    assert (g - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert len(sums) == num_norms
    for part, norm in zip(sums, norms, strict=True):
        # Where the second norm's sums take a pass of their own, they are of g as it is stored.
        rounded = part is not sums[0] and inner > 128
        check_sums(part, g.double() if rounded else exact, *norm)
    check_matrix(d_weight, dz, y)


def check_way_back(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    count, height, width, inner, outer = shape
    dz = random_images((count, outer, height, width), 0, dtype, device)
    x = random_images((count, inner, height, width), 1, dtype, device)
    weight = random_images((outer, inner, 1, 1), 2, dtype, device) / outer**0.5
    dx, d_weight = product_gradients(dz, weight, x)
    exact = torch.einsum("nchw,ck->nkhw", dz.double(), weight.double().flatten(1))
    assert (dx - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    check_matrix(d_weight, dz, x)


# The interpreter's products know no bfloat16; on a GPU both are tested.
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_comes_with_its_statistics(shape: tuple[int, ...]) -> None:
    check_statistics(shape, torch.float16)


@pytest.mark.parametrize("num_norms", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_comes_with_its_sums_and_that_of_the_matrix(shape: tuple[int, ...], num_norms: int) -> None:
    check_gradients(shape, torch.float16, num_norms)


@pytest.mark.parametrize("shape", BACK_SHAPES)
def test_both_gradients_of_a_product_come_together(shape: tuple[int, ...]) -> None:
    check_way_back(shape, torch.float16)


@pytest.mark.filterwarnings("ignore:invalid value")  # the running statistics stay lost
@pytest.mark.parametrize("lost", [float("inf"), float("-inf"), float("nan")])
def test_a_running_mean_that_is_lost_does_not_take_the_batch_along(lost: float) -> None:
    x = random_images((2, 64, 4, 4), 0, torch.float16)
    weight = random_images((64, 64, 1, 1), 1, torch.float16) / 8
    mean, var, count = torch.full((64,), lost), torch.ones(64), torch.tensor(0)
    z, partial = product_stats(x, weight, mean)
    moments = batch_moments(z, torch.ones(64), torch.zeros(64), mean, var, count, 1e-5, 0.1, partial)
    torch.testing.assert_close(moments[0], z.float().mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert moments.isfinite().all()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.kernels import pointwise, pointwise_back, tail

def compile(kernel, constants, capability, warps):
    names = kernel.arg_names
    floats = ("pivot", "partial", "weight_partial", "moments", "also_moments")
    floats += ("before_moments", "product_partial", "behind", "shortcut_moments", "constant", "sizes")
    whole = ("num_rows", "channels", "num_tiles")
    signature = {name: "*fp32" if name in floats else "i32" if name in whole else "*fp16" for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in constants}
    given = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=given, attrs=aligned)
    options = {"num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared

# What an A100 and a GPU for games have, and the largest of each kind.
for capability, shared in ((80, 163 << 10), (86, 99 << 10)):
    pointwise._shared_bytes = lambda device: shared
    stages = lambda row, matrix: pointwise.count_stages(None, row, matrix)
    sums = pointwise_back._product_sums_kernel
    for kernel, warps, stages, constants in (
        (pointwise._product_stats_kernel, 4, stages(256, 256 * 64), {"K": 256, "BLOCK_C": 64}),
        (sums, 8, stages(448, 64 * 128), {"ALSO": False, "BEFORE": 0, "K": 64, "BLOCK_C": 128}),
        (sums, 8, stages(448, 256 * 64), {"ALSO": False, "BEFORE": 0, "K": 256, "BLOCK_C": 64}),
        (sums, 8, stages(320, 12288), {"ALSO": True, "BEFORE": 64, "K": 64, "BLOCK_C": 64}),
        (sums, 8, stages(320, 16384), {"ALSO": False, "BEFORE": 64, "K": 128, "BLOCK_C": 64}),
        (pointwise_back._product_gradients_kernel, 8, stages(320, 256 * 64), {"K": 64, "CHANNELS": 256}),
        (tail._join_kernel, 4, 1 + stages(128, 64 * 128), {"PROJECTED": True, "K": 64, "BLOCK_C": 64}),
        (tail._gradients_kernel, 8, stages(320, 384 * 64), {"K": 64, "CHANNELS": 256}),
    ):
        constants = constants | {"BLOCK_M": pointwise.BLOCK_M, "STAGES": stages}
        taken = compile(kernel, constants, capability, warps)
        assert taken <= shared, (kernel, constants, capability, taken)
    constants = {"K": 64, "SHARE": 4160, "BLOCK_M": tail.SQUARE_ROWS, "STAGES": pointwise.MAX_STAGES}
    assert compile(tail._square_kernel, constants, capability, 8) <= shared
"""


def test_compiled_they_fit_into_the_shared_memory_of_large_and_small_gpus() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("suits", [suits_stats, suits_sums, suits_gradients])
def test_only_small_matrices_of_half_numbers_are_for_these_kernels(suits: Callable[..., bool]) -> None:
    assert suits(torch.float16, 64, 256)
    assert suits(torch.bfloat16, 64, 128)
    assert not suits(torch.float32, 64, 256)  # tensor cores would round what they read
    assert not suits(torch.float16, 256, 2048)
    assert not suits(torch.float16, 512, 64)
    assert not suits(torch.float16, 96, 64)
    assert not suits(torch.float16, 64, 96)


def check_chain(device: str, size: int) -> None:
    """Gradients of three blocks in FP16 are as near to those in FP32 as those of PyTorch's own operations in FP16."""
    torch.manual_seed(0)
    exact = nn.Sequential(Bottleneck(64, 64, 1), Bottleneck(256, 64, 1), Bottleneck(256, 128, 2)).to(device)
    x = random_images((4, 64, size, size), 0, torch.float32, device).relu()
    dy = random_images((4, 512, size // 2, size // 2), 1, torch.float32, device)
    seen = []
    for half, fused in ((False, False), (True, False), (True, True)):
        blocks = copy.deepcopy(exact).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for module in blocks.modules():
            if half and isinstance(module, nn.Conv2d):
                module.half()
        set_fused(blocks, fused)
        start = (x.half() if half else x.clone()).requires_grad_()
        y = run_chain(list(blocks), (start, start)) if fused else blocks((start, start))[0]
        y.backward(dy.to(y.dtype))
        gradients = [start.grad, *(parameter.grad for parameter in blocks.parameters())]
        seen.append([y.detach().double(), *(gradient.double() for gradient in gradients if gradient is not None)])
    assert len(seen[2]) == len(seen[1]) == len(list(exact.parameters())) + 2
    for truth, plain, ours in zip(*seen, strict=True):
        assert (ours - truth).norm() < 1.5 * (plain - truth).norm() + 1e-3 * truth.norm()


def test_a_chain_of_blocks_trains_alike() -> None:
    check_chain("cpu", 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], (16, 56, 56, 64, 256), (16, 28, 28, 256, 512)])
def test_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_statistics(shape, dtype, "cuda")
    for num_norms in (1, 2):
        check_gradients(shape, dtype, num_norms, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [BACK_SHAPES[1], (16, 56, 56, 64, 256)])
def test_on_a_gpu_both_gradients_of_a_product_come_together(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_way_back(shape, dtype, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_a_chain_of_blocks_trains_alike() -> None:
    check_chain("cuda", 56)
