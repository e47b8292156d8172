"""The passes as calls, under Triton's interpreter: together they are the whole norm, which is PyTorch's."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.bench.norm_launches import build_copy, build_launches, build_norms, call_norm
from lockstep.bench.norm_shapes import ADD, ADD_NORM, POOL, RELU, Use, list_passes

pytest.importorskip("triton")

CPU = torch.device("cpu")
USES = [
    Use(RELU, 2, 5, 6),
    Use(ADD, 2, 5, 6, num_gradients=2),
    Use(ADD, 2, 5, 6),
    Use(ADD_NORM, 2, 5, 6, num_gradients=2),
    Use(POOL, 2, 5, 6, padding=1, num_gradients=2),
    Use(POOL, 2, 5, 7),
]


def flatten(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [part for item in result for part in flatten(item)]


def run_whole(use: Use, arrays: Any, *, fused: bool) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the norm's input and the shortcut."""
    norm, shortcut_norm = build_norms(use, CPU, fused=fused)
    inputs = [tensor.clone().requires_grad_() for tensor in arrays.inputs]
    y = call_norm(use.kind, norm, inputs[0], inputs[1] if len(inputs) == 2 else None, shortcut_norm, use.padding)
    dy = arrays.dy if arrays.more_dy is None else arrays.dy + arrays.more_dy
    return y.detach(), list(torch.autograd.grad(y, inputs, dy))


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.kind}, {use.num_gradients}")
def test_the_passes_in_order_are_the_whole_norm(use: Use) -> None:
    arrays = build_copy(use, CPU, torch.float32)
    passes, results = list_passes(use), [flatten(launch()) for launch in build_launches(use, arrays)]
    assert len(passes) == len(results)
    y, gradients = run_whole(use, arrays, fused=False)
    [forward] = [result for part, result in zip(passes, results, strict=True) if part.name.startswith("normalise")]
    torch.testing.assert_close(forward[0], y)
    [found] = [result for part, result in zip(passes, results, strict=True) if "input gradient" in part.name]
    expected = gradients if use.kind == ADD_NORM else gradients[:1]  # else the shortcut's is written on the way
    torch.testing.assert_close(found[: len(expected)], expected)


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.kind}, {use.num_gradients}")
def test_a_pass_may_be_launched_again_and_again(use: Use) -> None:
    launches = build_launches(use, build_copy(use, CPU, torch.float32))
    first = [copy.deepcopy(flatten(launch())) for launch in launches]
    for launch, expected in zip(reversed(launches), reversed(first), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(flatten(launch()), expected, strict=True))


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.kind}, {use.num_gradients}")
def test_what_is_given_to_the_compiler_is_one_graph(use: Use) -> None:
    torch.compiler.reset()
    arrays = build_copy(use, CPU, torch.float32)
    norm, shortcut_norm = build_norms(use, CPU, fused=False)
    compiled: Any = torch.compile(call_norm, dynamic=False, fullgraph=True, backend="eager")
    y = compiled(use.kind, norm, arrays.x, arrays.shortcut, shortcut_norm, use.padding)
    torch.testing.assert_close(y.detach(), run_whole(use, arrays, fused=False)[0])
