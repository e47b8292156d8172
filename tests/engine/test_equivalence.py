"""The same global batch gives the same weights on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Cursor
from lockstep.engine.build import assemble, build_schedule, build_train_pipeline, open_sources
from lockstep.engine.step import LOSS, train_step
from lockstep.optim.storage import named_arrays
from tests.engine.conftest import tiny_config
from tests.ranks import run_ranks

RULES = {
    "sgd": ["optim.name=sgd", "optim.trust_coefficient=0.001", "optim.lr=0.05"],
    "lars": ["optim.lr=2.0", "optim.trust_coefficient=0.001"],
    "lamb": ["optim.name=lamb", "optim.trust_coefficient=0.001", "optim.momentum=0.9", "optim.lr=0.01"],
}


def build_plain_network() -> nn.Module:
    """Convolutions and no batch norm, whose statistics would depend on the shares."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train_plain(world: World, config: RunConfig) -> dict[str, Any]:
    """One epoch: the weights after it, every sample seen with its label and pixels, and the loss of each step."""
    sources = open_sources(config.data)
    parts = assemble(config, world, build_plain_network(), build_schedule(config, 5, 10))
    seen: dict[int, tuple[int, Tensor]] = {}
    losses = []
    with build_train_pipeline(config, world, sources.train, Cursor()) as pipeline:
        for step, batch in enumerate(pipeline):
            for sample, label, image in zip(batch.samples, batch.labels, batch.images, strict=True):
                assert int(sample) not in seen, "an epoch saw a sample twice"
                seen[int(sample)] = (int(label), image)
            losses.append(train_step(parts, batch, parts.schedule.lr_at(step))[LOSS].item())
            if batch.cursor.epoch > 0:
                break
    return {"weights": named_arrays(parts.weights, parts.layout), "seen": seen, "losses": losses}


@pytest.mark.parametrize("optim", ["sgd", "lars", "lamb"])
def test_1_2_3_and_4_ranks_give_the_same_weights_and_see_the_same_samples(images: Path, optim: str) -> None:
    config = tiny_config(images, *RULES[optim])
    alone = run_ranks(train_plain, 1, config)[0]
    assert len(alone["seen"]) == 130  # five steps of 28 are the whole epoch, its last step smaller
    for size in (2, 3, 4) if optim == "lars" else (3,):
        results = run_ranks(train_plain, size, config)
        for result in results:
            for name, expected in alone["weights"].items():
                difference = torch.linalg.norm(result["weights"][name] - expected) / torch.linalg.norm(expected)
                assert difference <= 1e-5, (size, name, difference)
            np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-5)
        together = {sample: value for result in results for sample, value in result["seen"].items()}
        assert sum(len(result["seen"]) for result in results) == len(together)
        assert together.keys() == alone["seen"].keys()
        for sample, (label, image) in together.items():
            assert label == alone["seen"][sample][0]
            assert torch.equal(image, alone["seen"][sample][1]), "the crop of a sample depends on the rank count"


def test_passes_of_a_step_add_up_to_the_whole(images: Path) -> None:
    whole = run_ranks(train_plain, 1, tiny_config(images))[0]
    split = run_ranks(train_plain, 2, tiny_config(images, "train.max_batch_per_rank=5"))[0]
    for name, expected in whole["weights"].items():
        assert torch.linalg.norm(split["weights"][name] - expected) <= 1e-5 * torch.linalg.norm(expected), name


def test_more_ranks_than_samples_in_the_last_batch(images: Path) -> None:
    """130 samples in batches of 43 leave one for the fourth step, so two of three ranks get none."""
    config = tiny_config(images, "train.global_batch=43")
    alone, together = run_ranks(train_plain, 1, config)[0], run_ranks(train_plain, 3, config)
    for name, expected in alone["weights"].items():
        assert torch.linalg.norm(together[1]["weights"][name] - expected) <= 1e-5 * torch.linalg.norm(expected), name
