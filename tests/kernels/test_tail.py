"""The end of a block without its largest array, against PyTorch in FP64, under Triton's interpreter."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lockstep.models import set_fused
from lockstep.models.chain import Pointwise, Tail
from lockstep.models.norm import BatchNorm, Summed

pytest.importorskip("triton")

from lockstep.kernels.batch_norm import Sums
from lockstep.kernels.tail import square_sums, suits_tail, tail_gradients

HALVES = [torch.float16, torch.bfloat16]


class Shape(NamedTuple):
    """Images, height, width; channels before the convolution, behind it and behind the next."""

    count: int
    height: int
    width: int
    inner: int
    channels: int
    next_inner: int


# Tiles that end with the rows and tiles that do not, every number of channels.
SHAPES = [Shape(2, 8, 8, 64, 256, 64), Shape(3, 5, 7, 64, 256, 128), Shape(1, 3, 7, 64, 128, 256)]


def random_images(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return values.contiguous(memory_format=torch.channels_last)


def build_tail(shape: Shape, projected: bool, size: float) -> Tail:
    """With parameters and running statistics of all kinds; `size` is that of the last norm's γ."""
    convolution = Pointwise(shape.inner, shape.channels, 1, bias=False)
    next_convolution = Pointwise(shape.channels, shape.next_inner, 1, bias=False)
    norms = [BatchNorm(channels) for channels in (shape.inner, shape.channels, shape.channels, shape.next_inner)]
    random = torch.Generator().manual_seed(4)
    for part in (convolution, next_convolution):
        part.weight.data.normal_(std=part.in_channels**-0.5, generator=random)
    for norm in norms:
        for values in (norm.weight.data, norm.bias.data, norm.running_mean):
            assert values is not None
            values.normal_(generator=random)
    norms[1].weight.data *= size
    return Tail(norms[0], convolution, norms[1], norms[2] if projected else None, next_convolution, norms[3])


def collect(tail: Tail, x: Tensor, shortcut: Tensor, z: Tensor, y: Tensor, dz: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What comes out both ways, and the running statistics."""
    torch.autograd.backward([z, y], [dz.to(z.dtype), dy.to(y.dtype)])
    seen = {"z": z, "y": y, "dx": x.grad, "d_shortcut": shortcut.grad}
    for name, module in tail._asdict().items():
        if module is not None and name != "next_norm":
            seen |= {f"{name}.{key}": parameter.grad for key, parameter in module.named_parameters()}
            seen |= {f"{name}.{key}": buffer for key, buffer in module.named_buffers()}
    found = {}
    for name, values in seen.items():
        assert values is not None, name
        found[name] = values.detach().double()
    return found


def run_plain(
    tail: Tail, x: Tensor, shortcut: Tensor, dz: Tensor, dy: Tensor, is_on: Tensor | None = None
) -> dict[str, Tensor]:
    """By PyTorch's own operations, in the precision of the tensors given; with `is_on`, ReLU lets that through."""
    x, shortcut = x.clone().requires_grad_(), shortcut.clone().requires_grad_()
    out = tail.last_norm(tail.convolution(tail.norm(x).relu()))
    total = out + (tail.shortcut_norm(shortcut) if tail.shortcut_norm else shortcut)
    y = total.relu() if is_on is None else torch.where(is_on, total, 0.0)
    assert tail.next_convolution is not None
    return collect(tail, x, shortcut, tail.next_convolution(y), y, dz, dy)


def run_fused(tail: Tail, x: Tensor, shortcut: Tensor, dz: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x, shortcut = x.clone().requires_grad_(), shortcut.clone().requires_grad_()
    for module in tail:
        if module is not None:
            set_fused(module, True)
    (z, partial), y = tail.run(x, Summed(shortcut))
    assert partial is None or not partial.requires_grad
    return collect(tail, x, shortcut, z, y, dz, dy)


def check_tail(shape: Shape, dtype: torch.dtype, projected: bool, size: float, device: str = "cpu") -> None:
    """As near to FP64 as PyTorch's own operations in half precision, or nearer."""
    count, height, width, inner, channels, next_inner = shape
    x = random_images((count, inner, height, width), 0, dtype, device)
    shortcut, dy = (random_images((count, channels, height, width), seed, dtype, device) for seed in (1, 2))
    dz = random_images((count, next_inner, height, width), 3, dtype, device)

    def build(precision: torch.dtype) -> tuple[Tail, list[Tensor]]:
        """Weights in half precision, norms in FP32, as a network has them; in FP64 the same values."""
        tail = build_tail(shape, projected, size)
        for module in tail:
            if module is not None:
                module.to(device, torch.float32 if isinstance(module, nn.BatchNorm2d) else dtype)
                if precision == torch.float64:
                    module.double()
        return tail, [values.to(precision) for values in (x, shortcut, dz, dy)]

    errors = []
    for run in (run_plain, run_fused):
        tail, given = build(dtype)
        found = run(tail, *given)
        # Rounding carries a few sums across zero, which is no error.
        tail, given = build(torch.float64)
        exact = run_plain(tail, *given, is_on=found["y"] > 0)
        assert found.keys() == exact.keys()
        errors.append(
            {name: (found[name] - truth).norm() / truth.norm().clamp(min=1e-3) for name, truth in exact.items()}
        )
    plain, ours = errors
    for name, error in ours.items():
        assert error <= 1.5 * plain[name] + 2e-4, f"{name}: {error:.2e} beside {plain[name]:.2e}"


# The interpreter's products know no bfloat16; on a GPU both are tested. The last norm's γ starts at zero and grows.
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_near_to_fp64_as_pytorch(shape: Shape, projected: bool) -> None:
    check_tail(shape, torch.float16, projected, 1.0)


@pytest.mark.parametrize("size", [0.0, 1e-4])
def test_whatever_the_size_of_the_last_norm(size: float) -> None:
    check_tail(SHAPES[1], torch.float16, projected=False, size=size)


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 1.0), (2.0, 1.0), (1.5, 0.05)])
def test_neither_distance_from_zero_nor_correlation_makes_errors_add_up(beta: float, gamma: float) -> None:
    num_rows, inner, channels = 2048, 64, 256
    x = random_images((2, inner, 32, 32), 0, torch.float16, "cpu")
    weight = random_images((channels, inner, 1, 1), 1, torch.float16, "cpu") / 8
    rows, matrix = x.double().permute(0, 2, 3, 1).reshape(num_rows, inner), weight.double().flatten(1)
    inverse = (rows.var(0, correction=0) + 1e-5).rsqrt()
    scale = gamma * inverse
    moments = torch.stack([rows.mean(0), inverse, scale, beta - rows.mean(0) * scale]).float()
    squares = square_sums(x, moments)

    u = (rows * moments[2].double() + moments[3].double()).relu()
    z = u @ matrix.t()
    norm = BatchNorm(channels)
    behind = norm.product_moments(squares, moments, weight, num_rows).double()
    variance = z.var(0, correction=0)
    assert ((behind[1] ** -2 - norm.eps) / variance - 1).abs().max() < 1e-3
    assert ((behind[0] - z.mean(0)) / variance.sqrt()).abs().max() < 1e-3

    g = random_images((2, channels, 32, 32), 2, torch.float16, "cpu")
    g = (g + 0.1 * nn.functional.conv2d(x.float(), weight.float())).half()  # which goes the way the weights go
    given, middle = g.double().permute(0, 2, 3, 1).reshape(num_rows, channels), z - z.mean(0)
    inverse = (variance + norm.eps).rsqrt()
    first, second = given.sum(0), (given * middle).sum(0)
    line = torch.stack([inverse, -(inverse**3) * second / num_rows, -inverse * first / num_rows])
    dz = line[0] * given + line[1] * middle + line[2]
    exact = (dz @ matrix) * (u > 0)
    sums = Sums((second * inverse).float(), first.float(), line.float())
    du, own, d_weight = tail_gradients(g, sums, weight, x, moments, squares)
    assert (du.double().permute(0, 2, 3, 1).reshape(num_rows, inner) - exact).norm() < 2e-3 * exact.norm()
    assert (own.d_beta - exact.sum(0)).norm() < 1e-3 * exact.sum(0).norm() + 1e-5 * exact.abs().sum(0).norm()
    assert (d_weight.flatten(1) - dz.t() @ u).norm() < 1e-2 * (dz.t() @ u).norm()


def test_nothing_is_read_that_nobody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def empty_of_alarms(*size: Any, **options: Any) -> Tensor:
        values = empty(*size, **options)
        if values.dtype == torch.float32:
            values.view(torch.int32).fill_(0x7FA00000)  # a NaN that the processor warns of
        return values

    monkeypatch.setattr(torch, "empty", empty_of_alarms)
    check_tail(SHAPES[1], torch.float16, projected=True, size=1.0)


def test_it_takes_the_shapes_of_the_first_stages_and_no_others() -> None:
    assert suits_tail(torch.float16, 64, 256, 64)
    assert suits_tail(torch.bfloat16, 64, 256, 128)
    assert not suits_tail(torch.float32, 64, 256, 64)
    assert not suits_tail(torch.float16, 128, 512, 128)
    assert not suits_tail(torch.float16, 64, 256, 96)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_a_number_is_not_hidden() -> None:
    tail = build_tail(SHAPES[1], projected=False, size=1.0)
    for module in tail:
        if isinstance(module, Pointwise):
            module.half()
    x, shortcut = (random_images((2, channels, 4, 4), channels, torch.float16, "cpu") for channels in (64, 256))
    x[0, 5, 1, 1] = float("nan")
    (z, _), y = tail.run(x, Summed(shortcut))
    assert y.isnan().all()
    assert z.isnan().all()


@pytest.mark.filterwarnings("ignore:(invalid value|overflow)")
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["g", "line"])
def test_what_is_not_finite_comes_through(bad: float, where: str) -> None:
    x, g = (random_images((2, channels, 4, 4), channels, torch.float16, "cpu") for channels in (64, 256))
    weight = random_images((256, 64, 1, 1), 2, torch.float16, "cpu")
    sums = Sums(torch.randn(256), torch.randn(256), torch.randn(3, 256))
    (g[0, :, 0, 0] if where == "g" else sums.line[0])[7] = bad
    moments = torch.ones(4, 64)  # ReLU lets something through everywhere
    du, own_sums, d_weight = tail_gradients(g, sums, weight, x, moments, square_sums(x, moments))
    assert not du.isfinite().all()
    assert not own_sums.d_beta.isfinite().all()
    assert not d_weight.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [SHAPES[1], Shape(16, 56, 56, 64, 256, 64)])
def test_on_a_gpu(shape: Shape, dtype: torch.dtype) -> None:
    check_tail(shape, dtype, projected=False, size=1.0, device="cuda")
    check_tail(shape, dtype, projected=True, size=1e-2, device="cuda")
