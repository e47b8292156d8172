"""The optimiser benchmark: its rows, its peers' arithmetic, and what it says where there is no GPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from lockstep.bench import device_time, optimizer
from lockstep.errors import LockstepError
from lockstep.layout import ParameterSpec
from tests.optim.equations import run_lars


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: str) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 2))

    monkeypatch.setattr(optimizer, "_build_network", build)
    monkeypatch.setattr(device_time, "COPY_BYTES", 1 << 20)


@pytest.mark.usefixtures("small")
def test_every_update_gets_a_row_with_its_floor(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    rows = optimizer.run_bench(["resnet50"], rounds=2, json_file=tmp_path / "rows.json", console=console)
    assert [row.name for row in rows] == [
        "lockstep lars, plain",
        "lockstep lars, clipped, plain",
        "lockstep lamb, plain",
        "lockstep lamb, clipped, plain",
        "lockstep adamw, plain",
        "lockstep adamw, clipped, plain",
        "lockstep sgd, plain",
        "lockstep sgd, clipped, plain",
        "torch SGD, fused",
        "torch SGD, foreach",
        "torch AdamW, fused",
        "torch AdamW, foreach",
        "LARS, torch._foreach",
        "LARS, loop over tensors",
    ]
    num_parameters = 4 * 27 + 4 + 8 + 16 + 2
    counts = (26, 26, 42, 44, 30, 30, 22, 22, 20, 20, 28, 28, 28, 28)
    assert [row.bytes for row in rows] == [num_parameters * count for count in counts]
    assert all(row.median_s > 0 and row.floor_s > 0 for row in rows)
    written: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    assert list(written[0]) == ["name", "model", "median_s", "spread_s", "bytes", "floor_s"]
    assert "There is no GPU here" in console.export_text()


@pytest.mark.parametrize("step", [optimizer.step_loop, optimizer.step_foreach])
def test_the_peers_are_lars(step: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(5, 7, generator=generator)), nn.Parameter(torch.zeros(3))]
    start = [parameter.detach().double().numpy().copy() for parameter in parameters]
    momentum = [torch.zeros_like(parameter) for parameter in parameters]
    gradients = [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(3)]
    for row in gradients:
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = gradient
        step(parameters, momentum, 10.0)
    for index, parameter in enumerate(parameters):
        own = [row[index].double().numpy() for row in gradients]
        spec = ParameterSpec("w", tuple(parameter.shape), decay=True, adapt=True)
        settings = {"momentum": 0.9, "weight_decay": 1e-4, "trust_coefficient": 1e-3}
        expected = run_lars(start[index], own, [10.0] * 3, spec, **settings)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_an_unknown_model_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match=r"no benchmark of 'vgg': choose resnet50, alexnet or both\."):
        optimizer.parse_models("vgg")


@pytest.mark.usefixtures("small")
def test_a_sweep_needs_a_gpu() -> None:
    with pytest.raises(LockstepError, match="--sweep tries the fused kernels and needs a GPU"):
        optimizer.run_bench(["resnet50"], rounds=2, sweep=True)


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="cannot be written"):
        optimizer.run_bench(["resnet50"], rounds=2, json_file=tmp_path)
