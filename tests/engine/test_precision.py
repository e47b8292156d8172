"""Half precision through the whole step: overflow, several ranks, checkpoints, and what goes wrong without FP32."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts, assemble
from lockstep.engine.evaluate import evaluate
from lockstep.engine.recorded import refuse_waits
from lockstep.engine.state import State, load_state
from lockstep.engine.step import LOSS, train_step
from lockstep.events import Notice, RunEnded, StepDone
from lockstep.optim.doctor import Doctor
from lockstep.optim.loss_scale import SCALE
from lockstep.optim.schedule import Schedule
from lockstep.optim.storage import named_arrays
from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.engine.saving import save_state
from tests.ranks import Backend, over_nccl, run_ranks, to_host, world_of_one

ORDER = {"seed": 0, "num_samples": 1}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def build_network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def build_parts(
    world: World, compute: str, *, max_batch: int = 256, optim: str = "lars", clip_norm: float = 0.0, **precision: Any
) -> Parts:
    more = {"trust_coefficient": 0.02} if optim == "lars" else {}
    config = RunConfig.model_validate(
        {
            "optim": {"name": optim, "lr": 1.0, "clip_norm": clip_norm, **more},
            "precision": {"compute": compute, **precision},
            "comm": {"buffer_mb": 0.001},
            "train": {"global_batch": 16, "duration": "9st", "max_batch_per_rank": max_batch},
        }
    )
    return assemble(config, world, build_network(), Schedule("constant", 1.0, total_steps=9))


def build_batch(world: World, count: int = 16) -> Batch:
    """Four classes that the mean colour tells apart, the same share of them on every rank."""
    labels = torch.arange(count) % 4
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    images = 0.2 * images + torch.eye(4)[labels][:, :3, None, None]
    own = slice(count * world.rank // world.size, count * (world.rank + 1) // world.size)
    size = own.stop - own.start
    share = images[own].to(world.device, memory_format=torch.channels_last)
    return Batch(share, labels[own].to(world.device), count, 0, np.arange(size), Cursor())


def train(parts: Parts, world: World, steps: int, lr: float = 1.0) -> list[float]:
    batch = build_batch(world)
    return [float(train_step(parts, batch, lr)[LOSS]) for _ in range(steps)]


def snapshot(parts: Parts) -> list[Tensor]:
    return [array.clone() for array in (parts.weights, parts.half_weights, *parts.rule.state().values())]


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_the_model_computes_in_half_but_for_batch_norm(compute: str) -> None:
    world = world_of_one()
    parts = build_parts(world, compute)
    train(parts, world, 1)
    types = {name: parameter.dtype for name, parameter in parts.model.named_parameters()}
    assert {name for name, dtype in types.items() if dtype == torch.float32} == {"1.weight", "1.bias"}
    assert {dtype for name, dtype in types.items() if not name.startswith("1.")} == {HALF[compute]}
    assert {buffer.dtype for name, buffer in parts.model.named_buffers() if "running" in name} == {torch.float32}
    assert torch.equal(parts.half_weights, parts.weights[: parts.layout.split].to(HALF[compute]))
    assert parts.model[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("optim", "lr", "clip_norm"),
    [
        ("sgd", 0.1, 0.0),
        ("lars", 1.0, 0.0),
        ("lamb", 0.02, 0.0),
        ("adamw", 0.02, 0.0),
        ("muon", 0.03, 0.0),
        ("sgd", 0.5, 0.2),
    ],
)
def test_fp16_and_bf16_train_like_fp32(optim: str, lr: float, clip_norm: float) -> None:
    world = world_of_one()
    losses = {
        compute: train(build_parts(world, compute, optim=optim, clip_norm=clip_norm), world, 12, lr)
        for compute in ("fp32", "fp16", "bf16")
    }
    assert losses["fp32"][-1] < 0.6 * losses["fp32"][0]
    np.testing.assert_allclose(losses["fp16"], losses["fp32"], rtol=0.05, atol=0.02)
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=0.2, atol=0.08)


def test_passes_of_a_half_step_add_up_to_the_whole() -> None:
    world = world_of_one()
    parts = [build_parts(world, "fp16", max_batch=size) for size in (16, 16)]
    cut = build_parts(world, "fp16", max_batch=5)
    for item in (*parts, cut):
        item.model[1].eval()  # statistics of a pass are not those of the batch
        train(item, world, 3)
    torch.testing.assert_close(cut.weights, parts[0].weights, rtol=0.01, atol=2e-3)
    assert torch.equal(parts[0].weights, parts[1].weights)


def overflow_once(world: World) -> dict[str, Any]:
    """Four steps, the second with an overflow in one layer of the last rank alone."""
    parts = build_parts(world, "fp16")
    assert parts.loss_scale is not None
    doctor = Doctor(parts.layout, parts.loss_scale)
    train(parts, world, 1)
    before = snapshot(parts)
    convolution = parts.model[3].weight
    handle = convolution.register_hook(lambda g: g * float("inf")) if world.rank == world.size - 1 else None
    losses = train(parts, world, 1)
    if handle:
        handle.remove()
    kept = all(torch.equal(a, b) for a, b in zip(snapshot(parts), before, strict=True))
    diagnosis = doctor.examine()
    scale, count = float(parts.loss_scale.state[SCALE]), int(parts.rule.count)
    losses += train(parts, world, 6)
    return {
        "kept": kept,
        "scale": scale,
        "count": count,
        "text": diagnosis.text,
        "losses": losses,
        "weights": parts.weights,
        "end": int(parts.rule.count),
    }


@pytest.mark.parametrize("backend", ["gloo", over_nccl()])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_training_goes_on(backend: Backend) -> None:
    results = run_ranks(overflow_once, 2, backend=backend)
    for result in results:
        assert result["kept"]
        assert result["scale"] == 32768
        assert (result["count"], result["end"]) == (1, 7)
        assert result["text"].startswith("Skipped 1 step whose gradients overflowed, first in 3.weight (1 time)")
        assert math.isfinite(result["losses"][0])
        assert result["losses"][-1] < 0.9 * result["losses"][0]
    assert torch.equal(results[0]["weights"], results[1]["weights"])


def train_in_half(world: World) -> dict[str, Tensor]:
    """Weights after three steps in each format, clipped and not, by format and parameter."""
    weights = {}
    for compute, clip_norm in product(HALF, (0.0, 0.1)):
        parts = build_parts(world, compute, clip_norm=clip_norm)
        parts.model[1].eval()  # statistics of a share are not those of the batch
        train(parts, world, 3)
        named = named_arrays(parts.weights, parts.layout)
        weights |= {f"{compute} {clip_norm} {name}": array for name, array in named.items()}
    return weights


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), over_nccl(4)])
def test_ranks_agree_to_the_bit_and_with_one_rank_to_half_precision(backend: Backend, size: int) -> None:
    alone = to_host(train_in_half(world_of_one()))
    first, *others = run_ranks(train_in_half, size, backend=backend)
    for name, expected in alone.items():
        assert all(torch.equal(first[name], other[name]) for other in others)
        assert torch.linalg.norm(first[name] - expected) <= 0.02 * torch.linalg.norm(expected) + 2e-3, name


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
@pytest.mark.parametrize(("optim", "clip_norm"), [("lamb", 0.0), ("adamw", 0.0), ("adamw", 0.2), ("muon", 0.0)])
def test_a_half_run_resumes_bit_for_bit(compute: str, optim: str, clip_norm: float, tmp_path: Path) -> None:
    world = world_of_one()
    settings: dict[str, Any] = {"growth_steps": 3} if compute == "fp16" else {}
    whole = build_parts(world, compute, optim=optim, clip_norm=clip_norm, **settings)
    train(whole, world, 2, lr=0.01)
    save_state(tmp_path, State(step=2), whole, world, ORDER, keep=1)
    train(whole, world, 3, lr=0.01)
    resumed = build_parts(world, compute, optim=optim, clip_norm=clip_norm, **settings)
    load_state(tmp_path, resumed, world, ORDER, pytest.fail)
    train(resumed, world, 3, lr=0.01)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(resumed), snapshot(whole), strict=True))
    assert resumed.rule.count == 5
    if whole.loss_scale and resumed.loss_scale:
        assert whole.loss_scale.state[SCALE] == 2**17
        assert torch.equal(resumed.loss_scale.state, whole.loss_scale.state)


def test_a_checkpoint_holds_fp32_masters_that_any_precision_can_take_up(tmp_path: Path) -> None:
    world = world_of_one()
    parts = build_parts(world, "fp16")
    train(parts, world, 2)
    saved = save_state(tmp_path, State(step=2), parts, world, ORDER, keep=1)
    assert saved is not None
    arrays = load_file(saved.path / "model.safetensors")
    assert arrays.keys() == parts.model.state_dict().keys()
    assert {array.dtype for name, array in arrays.items() if "num_batches" not in name} == {torch.float32}
    assert not torch.equal(arrays["0.weight"], arrays["0.weight"].half().float())
    other = build_parts(world, "fp32")
    load_state(tmp_path, other, world, ORDER, pytest.fail)
    assert torch.equal(other.model[0].weight.detach(), arrays["0.weight"])


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_evaluation_runs_in_half(compute: str) -> None:
    world = world_of_one()
    parts = build_parts(world, compute)
    train(parts, world, 12)
    result = evaluate(parts.model, [build_batch(world)], world, parts.dtype)
    assert result.total == 16
    assert math.isfinite(result.loss)


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.1], ids=["", "clipped"])
@pytest.mark.parametrize("optim", ["sgd", "lars", "lamb", "adamw", "muon"])
def test_a_step_on_a_gpu_never_waits_for_the_host(compute: str, optim: str, clip_norm: float) -> None:
    world = world_of_one()
    parts = build_parts(world, compute, optim=optim, clip_norm=clip_norm)
    batch = build_batch(world)
    train_step(parts, batch, 0.01)  # compiles
    before = parts.weights.clone()
    with refuse_waits():
        train_step(parts, batch, 0.01)
    assert not torch.equal(parts.weights, before)


SHORT = [
    "optim.warmup=0st",
    "train.global_batch=10",
    "train.duration=30st",
    "train.eval_every=0st",
    "train.checkpoint_every=0st",
]


def settings(images: Path, *more: str) -> list[str]:
    return [f"--set={setting}" for setting in [*tiny_settings(images), "precision.compute=fp16", *SHORT, *more]]


def test_a_run_says_which_steps_it_skipped_and_goes_on(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "high"
    high = settings(images, "precision.initial_scale=16777216", "train.duration=12st")
    status, _, err = commands.run("train", "quickstart", "--ranks=1", f"--out={folder}", *high)
    assert status == 0, err
    notices = [event.text for event in commands.events(folder) if isinstance(event, Notice)]
    assert any("Skipped 1 step whose gradients overflowed, first in fc." in text for text in notices)
    losses = [event.loss for event in commands.events(folder) if isinstance(event, StepDone)]
    assert math.isnan(losses[0])  # a skipped step has no loss to report
    assert math.isfinite(losses[-1])


def test_a_run_whose_scale_cannot_fall_stops_with_a_sentence(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stalled"
    static = settings(images, "precision.initial_scale=1e8", "precision.loss_scale=static")
    status, out, err = commands.run("train", "quickstart", "--ranks=2", f"--out={folder}", *static)
    assert status == 1
    assert err.count("Training stands still: the gradients of the last 20 steps overflowed") == 1
    assert "Traceback" not in out + err
    ended = commands.events(folder)[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.status, ended.step) == ("failed", 20)
