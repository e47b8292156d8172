"""Accuracy is the same number on any number of ranks, and batch-norm statistics are averaged for it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.engine.build import build_eval_pipeline, build_network, open_sources
from lockstep.engine.evaluate import answer, evaluate
from lockstep.engine.statistics import averaged_statistics
from tests.engine.conftest import NUM_VAL, tiny_config
from tests.ranks import run_ranks


def classify(world: World, config: RunConfig, flip: bool = False) -> tuple[Any, list[int]]:
    """Evaluate a network whose weights are random but the same everywhere."""
    sources = open_sources(config.data)
    model = build_network(config, len(sources.train.classes))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * (3 / parameter[0].numel()) ** 0.5)
    with build_eval_pipeline(config, world, sources.val) as batches:
        result = evaluate(model, batches, world, flip=flip)
        seen = [int(sample) for batch in batches for sample in batch.samples]
    assert model.training
    return result, seen


def test_every_validation_sample_counts_once_whatever_the_rank_count(images: Path) -> None:
    config = tiny_config(images)
    (alone, everything), *_ = run_ranks(classify, 1, config)
    assert alone.total == NUM_VAL
    assert sorted(everything) == list(range(NUM_VAL))
    assert alone.correct1 <= alone.correct5 <= alone.total
    assert alone.correct5 != NUM_VAL // 2  # which is what one and the same answer to all would come to
    for size in (2, 3):
        results = run_ranks(classify, size, config)
        assert sorted(sample for _, seen in results for sample in seen) == list(range(NUM_VAL))
        for result, _ in results:
            assert (result.correct1, result.correct5, result.total) == (alone.correct1, alone.correct5, alone.total)
            assert np.isclose(result.loss, alone.loss, rtol=1e-6)


def test_mirror_images_change_the_counts_alike_on_any_number_of_ranks(images: Path) -> None:
    config = tiny_config(images)
    alone, mirrored = (run_ranks(classify, 1, config, flip)[0][0] for flip in (False, True))
    assert mirrored.total == NUM_VAL
    assert mirrored.loss != alone.loss
    for result, _ in run_ranks(classify, 2, config, True):
        assert (result.correct1, result.correct5) == (mirrored.correct1, mirrored.correct5)
        assert np.isclose(result.loss, mirrored.loss, rtol=1e-6)


def test_an_image_and_its_mirror_image_are_answered_alike() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 6, 5)).double()
    images = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    flipped = torch.from_numpy(np.ascontiguousarray(images.numpy()[..., ::-1]))
    both = answer(network, images, flip=True)
    assert torch.allclose(both, answer(network, flipped, flip=True))
    assert torch.allclose(both.double(), (network(images) + network(flipped)) / 2, atol=1e-6)
    assert torch.equal(answer(network, images, flip=False), network(images))


def average(world: World) -> list[tuple[list[float], list[float], int]]:
    """Statistics while they are averaged, and afterwards."""
    layer = torch.nn.BatchNorm2d(2)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.running_mean.fill_(world.rank)
    layer.running_var.fill_(10.0 * world.rank)
    layer.num_batches_tracked.fill_(7)
    seen = []
    with averaged_statistics(layer, world):
        seen.append((layer.running_mean.tolist(), layer.running_var.tolist(), int(layer.num_batches_tracked)))
    seen.append((layer.running_mean.tolist(), layer.running_var.tolist(), int(layer.num_batches_tracked)))
    return seen


def test_running_statistics_are_the_mean_over_ranks_while_they_are_needed_and_no_longer() -> None:
    for rank, (inside, after) in enumerate(run_ranks(average, 3)):
        assert inside == ([1.0, 1.0], [10.0, 10.0], 7)
        assert after == ([rank, rank], [10.0 * rank, 10.0 * rank], 7)
