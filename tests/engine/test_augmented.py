"""Runs with every augmentation on: they learn, are judged by plain images, and are tried on batches like their own."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.comm.world import join_world
from lockstep.config import AugmentConfig
from lockstep.data.order import Cursor
from lockstep.engine.build import assemble, build_eval_pipeline, build_train_pipeline, open_sources, plan_input
from lockstep.engine.measure import fake_batch
from lockstep.engine.recorded import RecordedStep
from lockstep.engine.step import LOSS, train_step
from lockstep.optim.loss import count_correct
from lockstep.optim.schedule import Schedule
from lockstep.recipes.read import load_recipe
from tests.data.pictures import Pictures, encode
from tests.engine.conftest import tiny_config
from tests.engine.small import small_config
from tests.engine.test_recorded import build
from tests.ranks import world_of_one

EVERY = [
    "augment.pad=3",
    "augment.policy=trivial",
    "augment.erase=0.25",
    "augment.mixup=0.2",
    "augment.cutmix=1",
    "optim.label_smoothing=0.1",
]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def colored(count: int) -> Pictures:
    """Red, green, blue and grey squares, noisy."""
    random = np.random.default_rng(count)
    colors = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200], [120, 120, 120]])
    squares = colors[np.arange(count) % 4][:, None, None] + random.integers(-50, 50, (count, 12, 12, 3))
    source = Pictures([encode(square.astype(np.uint8), "PNG") for square in squares])
    source.labels = np.arange(count) % 4
    return source


def test_training_with_everything_on_learns_what_plain_images_show() -> None:
    world = world_of_one()
    config = load_recipe(
        "quickstart",
        [*EVERY, "data.image_size=12", "data.eval_resize=12", "train.global_batch=25", "optim.name=adamw",
         "optim.lr=0.02", "optim.trust_coefficient=0.001", "comm.tune_s=0"],
    )[1]  # fmt: skip
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    torch.set_num_threads(1)  # of so small a network several would only wait for each other
    parts = assemble(config, world, network, Schedule("constant", 0.02, total_steps=99))
    losses, correct = [], 0
    with build_train_pipeline(config, world, colored(80), Cursor(), plan_input(config, world)) as pipeline:
        for batch in islice(pipeline, 80):
            losses.append(train_step(parts, batch, 0.02)[LOSS].item())
    with build_eval_pipeline(config, world, colored(100)) as pipeline, torch.no_grad():
        for batch in pipeline:
            correct += int(count_correct(parts.model(batch.images), batch.labels, (1,)))
    assert np.mean(losses[-10:]) < losses[0] - 0.25
    assert correct >= 90


def test_a_run_is_tried_on_batches_like_its_own(images: Path) -> None:
    world = world_of_one()
    for settings in ([], EVERY):
        config = tiny_config(images, *settings)
        with build_train_pipeline(
            config, world, open_sources(config.data).train, Cursor(), plan_input(config, world)
        ) as pipeline:
            real, tried = next(pipeline), fake_batch(config, world)
        for one, other in ((real.images, tried.images), (real.labels, tried.labels)):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_evaluation_sees_the_same_images_whatever_training_does(images: Path) -> None:
    batches = []
    for settings in ([], EVERY):
        config = tiny_config(images, *settings)
        with build_eval_pipeline(config, world_of_one(), open_sources(config.data).val) as pipeline:
            batches.append(next(iter(pipeline)))
    assert torch.equal(batches[0].images, batches[1].images)
    assert torch.equal(batches[0].labels, batches[1].labels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_step_reads_mixed_labels() -> None:
    config = small_config("fp16", optim={"label_smoothing": 0.1})
    config = config.model_copy(update={"augment": AugmentConfig(mixup=0.2)})
    with join_world(None) as world:
        batch = fake_batch(config, world)
        labels = torch.rand(6, *batch.labels.shape, device=world.device)
        labels[:, :, :2] = (labels[:, :, :2] * 10).floor()
        losses = []
        for is_recorded in (False, True):
            parts = build(config, world)
            recorded = RecordedStep(parts, len(batch.labels), batch.global_size, pytest.fail)
            for values in labels:
                batch.labels.copy_(values)
                side = recorded(batch, 0.1) if is_recorded else train_step(parts, batch, 0.1)
            losses.append(side[LOSS].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
