"""A step in passes: what batch norm sees of it, how large passes are by themselves, and very large batches."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lockstep.comm.world import World, join_world
from lockstep.config import USUAL_PASS, RunConfig, TrainConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts, assemble, build_network, set_number_formats
from lockstep.engine.pass_size import FILE, GAIN, choose_size, settle_pass
from lockstep.engine.passes import plan_passes
from lockstep.engine.setup import default_plan_folder
from lockstep.engine.state import list_changing
from lockstep.engine.step import LOSS, train_step
from lockstep.optim.schedule import Schedule
from lockstep.recipes.read import load_recipe
from tests.engine.small import alone, small_config
from tests.ranks import run_ranks

CLASSES = 4


def build_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, CLASSES))


def build_parts(world: World, model: nn.Module, global_batch: int, **train: object) -> Parts:
    config = RunConfig.model_validate(
        {
            "optim": {"name": "sgd", "lr": 0.1},
            "train": {"global_batch": global_batch, "duration": "9st", **train},
        }
    )
    return assemble(config, world, model, Schedule("constant", 0.1, total_steps=9))


def draw_batch(world: World, count: int, seed: int = 0, size: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, size, size, generator=generator)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    own = slice(count * world.rank // world.size, count * (world.rank + 1) // world.size)
    images = images[own].contiguous(memory_format=torch.channels_last)
    return Batch(images, labels[own], count, 0, np.arange(own.stop - own.start), Cursor())


def check_against_loop(parts: Parts, plain: nn.Module, batch: Batch, sizes: list[int], atol: float = 1e-5) -> None:
    """One step of ours beside a loop of torch over the same parts of the batch, each normalised by itself."""
    count = len(batch.labels)
    optimizer = torch.optim.SGD(
        [{"params": [p], "weight_decay": 1e-4 if p.ndim > 1 else 0.0} for p in plain.parameters()], 0.1, momentum=0.9
    )
    side = train_step(parts, batch, 0.1)
    total = 0.0
    for images, labels in zip(batch.images.split(sizes), batch.labels.split(sizes), strict=True):
        loss = functional.cross_entropy(plain(images), labels, reduction="sum") / count
        loss.backward()
        total += loss.item()
    optimizer.step()
    assert float(side[LOSS]) == pytest.approx(total, rel=1e-5)
    expected = plain.state_dict()
    for name, array in parts.model.state_dict().items():
        torch.testing.assert_close(array, expected[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(("norm_batch", "sizes"), [(8, [8, 8, 8]), (10, [8, 8, 8]), (7, [6, 6, 6, 6]), (0, [24])])
def test_batch_norm_sees_so_many_samples_and_no_more(norm_batch: int, sizes: list[int]) -> None:
    model = build_model()
    plain = copy.deepcopy(model)
    parts = build_parts(alone(), model, 24, norm_batch=norm_batch)
    check_against_loop(parts, plain, draw_batch(alone(), 24), sizes)
    assert int(plain[1].num_batches_tracked) == len(sizes)


def step_on(world: World, norm_batch: int) -> Tensor:
    parts = build_parts(world, build_model(), 24, norm_batch=norm_batch)
    train_step(parts, draw_batch(world, 24), 0.1)
    return parts.weights


def test_with_a_norm_batch_of_its_own_a_step_does_not_depend_on_the_ranks() -> None:
    """Two and three ranks have 12 and 8 samples each: batch norm sees the same four of them everywhere, or others."""
    one = step_on(alone(), 4)
    for size in (2, 3):
        torch.testing.assert_close(run_ranks(step_on, size, 4)[0], one, rtol=0, atol=1e-6)
    assert (step_on(alone(), 0) - one).abs().max() > 1e-4


@given(st.integers(1, 3000), st.integers(0, 400), st.integers(0, 400), st.integers(1, 8))
def test_no_pass_is_larger_than_any_setting_allows(batch: int, most: int, norm_batch: int, num_ranks: int) -> None:
    train = TrainConfig(
        global_batch=batch,
        duration="1ep",  # type: ignore[arg-type]
        max_batch_per_rank=most,
        norm_batch=norm_batch,
    )
    limits = [limit for limit in (most or USUAL_PASS, norm_batch) if limit]
    assert plan_passes(train, 0, min(num_ranks, batch)) == min(limits)


@given(st.integers(1, 5000), st.integers(0, 600), st.integers(0, 5000), st.integers(1, 5000))
def test_the_size_of_a_pass_fits_and_is_none_that_was_slower(
    num_samples: int, norm_batch: int, room: int, quick_up_to: int
) -> None:
    """Passes of up to `room` samples fit; each twice as large is quicker for each sample, up to a size."""
    tried: list[int] = []

    def take(size: int) -> float | None:
        tried.append(size)
        return None if size > room else 1.0 / min(size, quick_up_to)

    size = choose_size(num_samples, norm_batch, take)
    most = min(num_samples, norm_batch or num_samples)
    assert 1 <= size <= most
    assert max(tried) <= most
    assert len(tried) <= 2 + most.bit_length()

    def equal(size: int) -> int:
        return -(-num_samples // -(-num_samples // size))

    if room >= 1:
        assert equal(size) <= room
    if room >= num_samples and quick_up_to >= num_samples:
        assert equal(size) >= (1 - GAIN) * equal(most)
    if room >= most and quick_up_to <= 64:
        assert size == min(most, USUAL_PASS)


def test_sizes_are_tried_as_by_hand() -> None:
    def choose(seconds: dict[int, float | None], num_samples: int, norm_batch: int = 0) -> tuple[int, list[int]]:
        tried: list[int] = []

        def take(size: int) -> float | None:
            tried.append(size)
            return seconds[size]

        return choose_size(num_samples, norm_batch, take), tried

    assert choose({256: 1.0, 512: 0.95, 1024: 0.945}, 65536) == (512, [256, 512, 1024])
    assert choose({256: 1.0, 512: None}, 65536) == (256, [256, 512])
    assert choose({256: None, 128: None, 64: 1.0}, 65536) == (64, [256, 128, 64])
    assert choose({32: 1.0}, 65536, norm_batch=32) == (32, [32])
    assert choose({150: 1.0, 300: 0.9}, 300) == (300, [150, 300])
    assert choose({100: 1.0}, 100) == (100, [100])
    assert choose({1: None}, 1) == (1, [1])


def test_on_a_cpu_a_pass_has_256_samples_and_a_number_of_ones_own_stays() -> None:
    world = alone()
    for train, expected, size in (
        ({}, 256, 256),
        ({"norm_batch": 64}, 256, 64),
        ({"max_batch_per_rank": 7}, 7, 7),
        ({"accumulate": 2}, 0, 1000),
    ):
        config = RunConfig.model_validate(
            {"optim": {"lr": 1.0}, "train": {"global_batch": 2000, "duration": "1ep", **train}}
        )
        parts = assemble(config, world, build_model(), Schedule("constant", 0.1, total_steps=1))
        settled, parts, said = settle_pass(config, parts, world)
        assert (settled.train.max_batch_per_rank, parts.max_batch_per_rank, said) == (expected, size, "")


@pytest.mark.parametrize("passes", [{"max_batch_per_rank": 512}, {"accumulate": 8}, {"norm_batch": 512}])
def test_eight_passes_of_512_equal_one_of_4096(passes: dict[str, int]) -> None:
    """Without batch norm, within rounding; three steps with momentum."""
    found = []
    for way in ({"max_batch_per_rank": 4096}, passes):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        parts = build_parts(alone(), model, 4096, **way)
        start = parts.weights.clone()
        for seed in range(3):
            train_step(parts, draw_batch(alone(), 4096, seed), 0.1)
        found.append(parts.weights)
    assert (found[0] - start).abs().max() > 1e-3
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


def test_a_batch_of_65536_runs_on_one_cpu_rank_in_256_passes() -> None:
    """The paper's recipe with another network: the recipe's rule, its batch, and what batch norm sees."""
    settings = ["model.name=resnet18", "model.width=1", "model.stem=cifar", "data.image_size=4", "data.eval_resize=4"]
    _, config = load_recipe("resnet50-64k", [*settings, "precision.compute=fp32"])
    assert config.train.global_batch == 65536
    world = alone()
    passes: list[int] = []

    class Small(nn.Module):
        """A norm between two small layers."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first, self.norm, self.fc = nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)

        def forward(self, images: Tensor) -> Tensor:
            passes.append(len(images))
            return self.fc(self.norm(self.first(images.flatten(1))).relu())

    model = Small()
    plain = copy.deepcopy(model)
    parts = assemble(config, world, model, Schedule("constant", 0.1, total_steps=1))
    batch = draw_batch(world, 65536, size=2)
    side = train_step(parts, batch, 0.1)
    assert passes == [256] * 256
    loss: Tensor = sum(  # type: ignore[assignment]
        functional.cross_entropy(plain(images), labels, reduction="sum", label_smoothing=0.1) / 65536
        for images, labels in zip(batch.images.split(256), batch.labels.split(256), strict=True)
    )
    assert float(side[LOSS]) == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    gradient = plain.fc.weight.grad
    assert gradient is not None
    with torch.no_grad():  # LARS, of which this is the first step
        decayed = 1e-4 * plain.fc.weight
        trust = 0.001 * plain.fc.weight.norm() / (gradient.norm() + decayed.norm())
        expected = plain.fc.weight - 0.1 * trust * (gradient + decayed)
    torch.testing.assert_close(model.fc.weight, expected, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_on_a_gpu_a_pass_is_measured_remembered_and_leaves_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    config = small_config("fp16")
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 700})})
    with join_world(None) as world:
        set_number_formats(config.precision)
        parts = assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))
        before = [array.clone() for array in list_changing(parts).arrays()]
        settled, sized, said = settle_pass(config, parts, world)
        after = list_changing(sized).arrays()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert settled.train.max_batch_per_rank in (256, 512, 700)
        assert sized.max_batch_per_rank == settled.train.max_batch_per_rank
        assert "measured in" in said
        (file,) = default_plan_folder().glob(f"*/{FILE}")
        assert json.loads(file.read_text()) == {"max_batch_per_rank": settled.train.max_batch_per_rank}
        file.write_text('{"max_batch_per_rank": 64}')
        assert settle_pass(config, parts, world)[2].startswith("A pass has up to 64 samples (remembered")
        file.write_text('{"max_batch_per_rank": -3}')
        assert "measured in" in settle_pass(config, parts, world)[2]
