"""Products with a norm's sums: which a network has, against its architecture, and that both sides do the same work."""

import io
from typing import get_args

import pytest
import torch
from rich.console import Console
from torch import Tensor

from lockstep.bench import products
from lockstep.bench.products import (
    GRADIENTS,
    STATISTICS,
    SUMS,
    TAIL,
    TAIL_BACK,
    Product,
    Row,
    build_launches,
    draw_table,
    find_products,
    sum_up,
)

pytest.importorskip("triton")


def test_resnet50s_are_those_with_small_matrices() -> None:
    found = find_products("resnet50", 2)
    by_kind = {
        kind: {key[2:]: count for key, count in found.items() if key.kind == kind} for kind in get_args(products.Kind)
    }
    # The first stage's blocks end at once; the last of them goes into the second stage.
    assert by_kind[TAIL] == by_kind[TAIL_BACK] == {(64, 256, 56, 64): 2, (64, 256, 56, 128): 1}
    # Into a block, around the first and out of it; later stages have larger matrices.
    assert by_kind[STATISTICS] == {
        (64, 64, 56, 0): 1,
        (64, 256, 56, 0): 1,
        (256, 64, 56, 0): 2,
        (256, 128, 56, 0): 1,
        (128, 512, 28, 0): 4,
    }
    assert by_kind[GRADIENTS] == {(64, 64, 56, 0): 1, (64, 256, 56, 0): 1}
    assert by_kind[SUMS] == {(128, 512, 28, 0): 3, (256, 512, 28, 0): 1, (256, 1024, 14, 0): 5}


@pytest.mark.parametrize("model", ["resnet18", "alexnet"])
def test_networks_without_bottlenecks_have_none(model: str) -> None:
    assert not find_products(model, 2)


def test_bytes_are_those_of_every_array_once() -> None:
    pixels = 2 * 7 * 7
    assert Product(STATISTICS, 2, 64, 256, 7).num_bytes == 2 * pixels * (64 + 256)
    assert Product(SUMS, 2, 64, 256, 7).num_bytes == 2 * pixels * (64 + 4 * 256)
    assert Product(GRADIENTS, 2, 64, 256, 7).num_bytes == 2 * pixels * (256 + 2 * 64)
    assert Product(TAIL, 2, 64, 256, 7, 64).num_bytes == 2 * pixels * (64 + 64 + 256 + 256)
    assert Product(TAIL_BACK, 2, 64, 256, 7, 128).num_bytes == 2 * pixels * ((128 + 64 + 3 * 256) + (256 + 64 + 64))


@pytest.mark.parametrize("kind", get_args(products.Kind))
def test_ours_and_what_is_done_apart_do_the_same(kind: products.Kind) -> None:
    torch.manual_seed(0)
    ours, apart = build_launches(Product(kind, 2, 64, 128, 5, 64), torch.device("cpu"))
    first, second = ours(), apart()
    pairs = [(first, second)] if isinstance(first, Tensor) else list(zip(first, second, strict=True))  # type: ignore[call-overload]
    assert pairs
    for one, other in pairs:
        assert (one - other).norm() < 5e-3 * other.norm()


def test_the_table_tells_how_much_longer_they_take_apart() -> None:
    row = Row(SUMS, 64, 256, 56, count=2, seconds=400e-6, apart_s=600e-6, floor_s=320e-6, bytes=1)
    text = io.StringIO()
    Console(file=text, width=200).print(draw_table([row]))
    line = " ".join(text.getvalue().splitlines()[-1].split())
    assert line == "product, gradient sums, matrix 64 → 256, 56 × 56 2 400.0 320.0 1.25 600.0 1.50"
    assert sum_up([row, row]) == "All of these in a step: 1.60 ms, apart 2.40 ms."
    assert list(row.to_json())[:4] == ["pass", "inner", "channels", "side"]
