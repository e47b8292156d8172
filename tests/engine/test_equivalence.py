"""The same global batch gives the same weights on any number of ranks."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Cursor
from lockstep.engine.build import (
    assemble,
    build_schedule,
    build_train_pipeline,
    open_sources,
    plan_input,
    set_number_formats,
)
from lockstep.engine.step import LOSS, train_step
from lockstep.optim.storage import named_arrays
from tests.engine.conftest import tiny_config
from tests.ranks import Backend, over_nccl, run_ranks

RULES = {
    "sgd": ["optim.name=sgd", "optim.lr=0.05"],
    "lars": ["optim.lr=2.0", "optim.trust_coefficient=0.001"],
    "lamb": ["optim.name=lamb", "optim.lr=0.01"],
    # A root far above that of the gradients: a weight whose gradient is mere rounding would go either way.
    "adamw": ["optim.name=adamw", "optim.lr=0.01", "optim.adamw_epsilon=0.01"],
}
# Gradients here have a norm of about 0.3.
CLIPPED = {f"{name}, clipped": [*RULES[name], "optim.clip_norm=0.1"] for name in ("lars", "adamw")}
# Every change of a sample; a pair of mixed samples is cut by most shares.
AUGMENTED = {
    "augmented": [
        *RULES["sgd"], "augment.pad=3", "augment.policy=trivial", "augment.erase=0.5", "augment.mixup=0.4",
        "augment.cutmix=1", "optim.label_smoothing=0.1",
    ]
}  # fmt: skip
CASES = {
    **RULES,
    **CLIPPED,
    **AUGMENTED,
    "whole": [],
    "in passes": ["train.max_batch_per_rank=5"],
    "accumulated, clipped": [*CLIPPED["lars, clipped"], "train.accumulate=4"],
    "few at the end": ["train.global_batch=43"],  # 130 samples leave one for the fourth step
}
ALL_SIZES = (1, 2, 3, 4)
# On how many ranks a case is asked for, where not on all.
SIZES = {"whole": (1,), "in passes": (2,), "accumulated, clipped": (2,), "few at the end": (1, 3, 4)}
# A GPU chooses another kernel for another share of the batch, which rounds in another order.
TOLERANCE = {"gloo": 1e-5, "nccl": 1e-4}

Results = list[dict[str, Any]]
Train = Callable[[str, int], Results]


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
    set_number_formats(config.precision)
    sources = open_sources(config.data)
    parts = assemble(config, world, build_plain_network(), build_schedule(config, 5, 10))
    seen: dict[int, tuple[Any, Tensor]] = {}
    losses = []
    with build_train_pipeline(config, world, sources.train, Cursor(), plan_input(config, world)) as pipeline:
        for step, batch in enumerate(pipeline):
            for sample, label, image in zip(batch.samples, batch.labels, batch.images, strict=True):
                assert int(sample) not in seen, "an epoch saw a sample twice"
                seen[int(sample)] = (label.tolist(), image.cpu())
            losses.append(train_step(parts, batch, parts.schedule.lr_at(step))[LOSS].item())
            if batch.cursor.epoch > 0:
                break
    return {"weights": named_arrays(parts.weights, parts.layout), "seen": seen, "losses": losses}


def train_cases(world: World, configs: Mapping[str, RunConfig]) -> dict[str, dict[str, Any]]:
    """Every case in one start of the ranks."""
    return {case: train_plain(world, config) for case, config in configs.items()}


@pytest.fixture(scope="module", params=["gloo", over_nccl()])
def backend(request: pytest.FixtureRequest) -> Backend:
    name: Backend = request.param
    return name


@pytest.fixture(scope="module")
def train(images: Path, backend: Backend) -> Train:
    """(case, number of ranks) -> every rank's results; ranks start once for all cases."""
    # nvJPEG's pixels are not those of the host's decoder, and either may decode a sample.
    configs = {case: tiny_config(images, *settings, "data.decoder=cpu") for case, settings in CASES.items()}

    @functools.cache
    def start(size: int) -> list[dict[str, dict[str, Any]]]:
        wanted = {case: config for case, config in configs.items() if size in SIZES.get(case, ALL_SIZES)}
        return run_ranks(train_cases, size, wanted, backend=backend)

    return lambda case, size: [results[case] for results in start(size)]


def check_weights(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name, weights in expected["weights"].items():
        difference = torch.linalg.norm(found["weights"][name] - weights) / torch.linalg.norm(weights)
        assert difference <= tolerance, (name, difference)


def check_samples(results: Results, alone: dict[str, Any]) -> None:
    """All ranks together saw the samples that one saw, none twice, each with the same label and pixels."""
    together = {sample: value for result in results for sample, value in result["seen"].items()}
    assert sum(len(result["seen"]) for result in results) == len(together)
    assert together.keys() == alone["seen"].keys()
    for sample, (label, image) in together.items():
        assert label == alone["seen"][sample][0]
        assert torch.equal(image, alone["seen"][sample][1]), "the crop of a sample depends on the rank count"


@pytest.mark.parametrize("optim", [*RULES, *CLIPPED, *AUGMENTED])
def test_any_number_of_ranks_gives_the_same_weights_and_sees_the_same_samples(
    train: Train, backend: Backend, optim: str
) -> None:
    (alone,) = train(optim, 1)
    assert len(alone["seen"]) == 130  # five steps of 28 are the whole epoch, its last step smaller
    for size in (2, 3, 4) if backend == "gloo" else (2, 4):
        results = train(optim, size)
        for result in results:
            check_weights(result, alone, TOLERANCE[backend])
            np.testing.assert_allclose(result["losses"], alone["losses"], rtol=TOLERANCE[backend])
        check_samples(results, alone)


def test_passes_of_a_step_add_up_to_the_whole(train: Train, backend: Backend) -> None:
    check_weights(train("in passes", 2)[0], train("whole", 1)[0], TOLERANCE[backend])


def test_accumulated_passes_are_clipped_together(train: Train, backend: Backend) -> None:
    check_weights(train("accumulated, clipped", 2)[0], train("lars, clipped", 1)[0], TOLERANCE[backend])


@pytest.mark.parametrize("optim", ["lars", "adamw"])
def test_clipping_changes_the_weights(train: Train, optim: str) -> None:
    """Or the equality above would say nothing of it."""
    clipped, whole = train(f"{optim}, clipped", 1)[0]["weights"], train(optim, 1)[0]["weights"]
    assert max(torch.linalg.norm(clipped[name] - whole[name]) / torch.linalg.norm(whole[name]) for name in whole) > 5e-3


def test_more_ranks_than_samples_in_the_last_batch(train: Train, backend: Backend) -> None:
    """One sample is left for the fourth step, so that all ranks but one get none."""
    case = "few at the end"
    (alone,), together = train(case, 1), train(case, 3 if backend == "gloo" else 4)
    check_weights(together[1], alone, TOLERANCE[backend])
