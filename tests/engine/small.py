"""A small network and its configuration, a world of one thread and a sink that listens, for tests of the engine."""

from typing import Any

import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.config import CommConfig, DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.events import Event
from lockstep.report.run import SilentSink
from tests.ranks import world_of_one


class Keeping(SilentSink):
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def alone() -> World:
    """A world of one with one thread: of tiny passes by the hundred, two would spend them waiting for each other."""
    world = world_of_one()
    torch.set_num_threads(1)  # until the test ends: `conftest.py`
    return world


def small_config(
    compute: Any, comm: dict[str, Any] | None = None, optim: dict[str, Any] | None = None, **train: Any
) -> RunConfig:
    """ResNet-18, a quarter as wide, on 16 images of 64 pixels."""
    return RunConfig(
        data=DataConfig(image_size=64),
        model=ModelConfig(name="resnet18", width=16),
        optim=OptimConfig(**{"name": "lars", "lr": 0.1} | (optim or {})),
        precision=PrecisionConfig(compute=compute),
        comm=CommConfig(**{"tune_s": 0.0} | (comm or {})),
        train=TrainConfig(global_batch=16, duration="1ep", **train),  # type: ignore[arg-type]
    )


def compile_without_a_compiler(module: nn.Module, *, dynamic: bool | None = None, backend: Any = "eager") -> None:
    """Traced as it would be, with nothing behind."""
    module._compiled_call_impl = torch.compile(module._call_impl, backend=backend, dynamic=dynamic)
