"""Fused batch norm against PyTorch's own operations in FP64, forward and backward, under Triton's interpreter."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.models.norm import BatchNorm, Pair

pytest.importorskip("triton")

Forward = Callable[..., Tensor | Pair]  # of a norm, two tensors and another norm
FORWARDS: dict[str, Forward] = {
    "relu": lambda norm, x, shortcut, other: norm.relu(x),
    "add": lambda norm, x, shortcut, other: norm.add_relu(x, shortcut),
    "add a normalised shortcut": lambda norm, x, shortcut, other: norm.add_relu(x, shortcut, other),
    "pool": lambda norm, x, shortcut, other: norm.relu_pool(x),
    "pool without a border": lambda norm, x, shortcut, other: norm.relu_pool(x, padding=0),
}
SHAPES = [(3, 16, 5, 4), (2, 24, 7, 9), (1, 3, 3, 4), (4, 130, 6, 6)]


def build_norm(channels: int, seed: int) -> BatchNorm:
    generator = torch.Generator().manual_seed(seed)
    norm = BatchNorm(channels)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(channels, generator=generator))
        norm.bias.copy_(torch.randn(channels, generator=generator))
    return norm


def random_tensor(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.contiguous(memory_format=torch.channels_last)


def run(
    forward: Forward, norms: list[BatchNorm], x: Tensor, shortcut: Tensor, gradients: list[Tensor]
) -> dict[str, Tensor]:
    """Everything a caller can see after forward and backward, in FP64."""
    norm, other = norms
    inputs = [x.clone().requires_grad_(), shortcut.clone().requires_grad_()]
    out = forward(norm, *inputs, other)
    if isinstance(out, tuple):
        loss: Any = sum((part * gradient.to(part.dtype)).sum() for part, gradient in zip(out, gradients, strict=True))
        out = out[0]
    else:
        loss = (out * gradients[0].to(out.dtype)).sum()
    loss.backward()
    seen = {"y": out.detach(), "dx": inputs[0].grad, "d_shortcut": inputs[1].grad}
    for name, part in (("norm", norm), ("other", other)):
        seen |= {f"{name}.d_gamma": part.weight.grad, f"{name}.d_beta": part.bias.grad}
        seen |= {f"{name}.{key}": value.clone() for key, value in part.named_buffers()}
    return {key: value.double() for key, value in seen.items() if value is not None}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORWARDS)
def test_it_equals_the_plain_version_in_fp64(name: str, shape: tuple[int, ...]) -> None:
    check(name, shape, torch.float32, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORWARDS)
def test_half_precision_differs_by_its_rounding_alone(name: str, dtype: torch.dtype) -> None:
    check(name, (3, 16, 6, 4), dtype, 4 * torch.finfo(dtype).eps)


def check(name: str, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    x = random_tensor(shape, 1, dtype) * 3 + 5  # far from zero, where naive sums of squares cancel
    border = {"pool": 1, "pool without a border": 0}.get(name)
    out_shape = shape if border is None else (*shape[:2], *((side + 2 * border - 3) // 2 + 1 for side in shape[2:]))
    shortcut = random_tensor(shape, 2, dtype)
    gradients = [random_tensor(out_shape, seed, dtype) for seed in (3, 4)]
    plain = [build_norm(shape[1], seed) for seed in (5, 6)]
    fused = copy.deepcopy(plain)
    for norm in fused:
        norm.fused = True
        norm.to(device)
    expected = run(FORWARDS[name], [norm.double() for norm in plain], x.double(), shortcut.double(), gradients)
    got = run(FORWARDS[name], fused, x.to(device), shortcut.to(device), [g.to(device) for g in gradients])
    assert expected.keys() == got.keys()
    # Where a million values meet ReLU, rounding carries a few across zero; their gradients are right for neither side.
    flipped = (got["y"].cpu() > 0) != (expected["y"] > 0)
    assert flipped.double().mean() <= tolerance
    for key, value in expected.items():
        found = got[key].cpu()
        if value.shape == flipped.shape:
            found = torch.where(flipped, value, found)
        # γ's and β's are sums over all of them, of gradients times values that may be four times their usual size.
        slack = 4 * flipped.sum().sqrt() if key.endswith(("d_gamma", "d_beta")) else 0.0
        allowed = slack + tolerance * value.norm().clamp(min=1e-6 * value.numel() ** 0.5)
        difference = (found - value).norm()
        assert difference <= allowed, f"{key} is off by {difference:.2e}, {allowed:.2e} allowed"


def test_evaluation_is_plain() -> None:
    norm = build_norm(8, 0).eval()
    x = random_tensor((2, 8, 3, 3), 1, torch.float32)
    expected = norm.relu(x.clone())
    norm.fused = True
    assert torch.equal(norm.relu(x.clone()), expected)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", FORWARDS)
def test_what_is_not_a_number_is_not_hidden(name: str) -> None:
    norms = [build_norm(4, seed) for seed in (5, 6)]
    for norm in norms:
        norm.fused = True
    x = random_tensor((2, 4, 7, 7), 1, torch.float32)
    x[0, 2, 3, 3] = float("nan")
    out = FORWARDS[name](norms[0], x, random_tensor((2, 4, 7, 7), 2, torch.float32), norms[1])
    y = out[0] if isinstance(out, tuple) else out
    assert y[:, 2].isnan().all()
    assert y[:, [0, 1, 3]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("shape", [(4, 64, 112, 112), (8, 256, 28, 28), (7, 2048, 7, 7), (3, 130, 9, 11)])
def test_on_a_gpu(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(name, shape, dtype, max(1e-4, 4 * torch.finfo(dtype).eps), "cuda")
