"""Chance inside the network is a function of seed, step and rank: none of it has to be saved to resume exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.engine.build import assemble, build_schedule, open_sources
from lockstep.engine.trainer import StopRequest, Trainer
from lockstep.events import Event, StepDone
from tests.engine.conftest import tiny_config
from tests.ranks import run_ranks

NUM_STEPS = 6


class Stopper:
    """Asks one rank to stop when it reports a step."""

    def __init__(self, request: StopRequest, step: int) -> None:
        self._request = request
        self._step = step

    def emit(self, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == self._step:
            self._request.signal = 15

    def close(self) -> None:
        pass


def build_network(masks: list[Tensor]) -> nn.Module:
    """AlexNet's classifier in small; every training pass leaves the units that were dropped in `masks`."""
    torch.manual_seed(0)
    dropout = nn.Dropout(0.5)

    def record(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if dropout.training:
            masks.append(output == 0)

    dropout.register_forward_hook(record)
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 16), nn.Sigmoid(), dropout, nn.Linear(16, 10))


def train(world: World, config: RunConfig, folder: Path, stop_at: int | None) -> dict[str, Any]:
    """Train to the end, or stop after `stop_at` steps and go on with parts that remember nothing."""
    masks: list[Tensor] = []
    sources = open_sources(config.data)

    def build_trainer(stop_step: int) -> Trainer:
        parts = assemble(config, world, build_network(masks), build_schedule(config, 5, NUM_STEPS))
        request = StopRequest()
        sink = Stopper(request, stop_step if world.is_first else 0)
        return Trainer(config, "tiny", world, sources, parts, folder, sink, request)

    trainer = build_trainer((stop_at or 0) - 1)
    torch.manual_seed(99 + world.rank)
    status = trainer.run()
    if stop_at is not None:
        assert (status, trainer.state.step) == ("interrupted", stop_at)
        trainer = build_trainer(0)
        trainer.resume()
        torch.manual_seed(77)  # a new process stands at another place in its random numbers
        status = trainer.run()
    assert status == "finished"
    return {"weights": trainer.parts.weights.clone(), "masks": masks}


@pytest.fixture(scope="module")
def config(images: Path) -> RunConfig:
    return tiny_config(images, f"train.duration={NUM_STEPS}st", "optim.warmup=0st", "train.eval_every=2st")


@pytest.mark.parametrize("size", [1, 2])
def test_a_network_with_dropout_resumes_to_bit_identical_weights(config: RunConfig, tmp_path: Path, size: int) -> None:
    untouched = run_ranks(train, size, config, tmp_path / "untouched", None)
    resumed = run_ranks(train, size, config, tmp_path / "resumed", 4)
    for expected, found in zip(untouched, resumed, strict=True):
        assert len(expected["masks"]) == len(found["masks"]) == NUM_STEPS
        assert all(torch.equal(a, b) for a, b in zip(expected["masks"], found["masks"], strict=True))
        assert torch.equal(expected["weights"], found["weights"])


def test_what_is_dropped_differs_between_steps_ranks_and_seeds(config: RunConfig, tmp_path: Path) -> None:
    train_config = config.train.model_copy(update={"seed": 1})
    other = config.model_copy(update={"train": train_config})
    first, second = run_ranks(train, 2, config, tmp_path / "one", None)
    reseeded, _ = run_ranks(train, 2, other, tmp_path / "two", None)
    one = first["masks"][0]
    assert 0.4 < one.float().mean() < 0.6
    for mask in (first["masks"][1], second["masks"][0], reseeded["masks"][0]):
        assert mask.shape == one.shape
        assert not torch.equal(mask, one)
