"""What is built from a configuration, where nothing else tests it."""

import pytest
import torch

from lockstep.comm.world import World
from lockstep.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.engine import build


@pytest.mark.parametrize(
    ("device", "decoder", "cores", "wanted", "threads"),
    [
        ("cpu", "cpu", 2, 0, 2),
        ("cpu", "cpu", 2, 7, 7),
        ("cuda", "cpu", 16, 0, 14),
        ("cuda", "cpu", 2, 0, 1),
        ("cuda", "both", 16, 0, 4),
        ("cuda", "both", 3, 0, 1),
        ("cuda", "both", 16, 12, 12),
    ],
)
def test_decode_threads_leave_room_for_those_that_drive_a_gpu(
    device: str, decoder: str, cores: int, wanted: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "choose_decoder", lambda asked, device: asked)
    config = RunConfig(
        data=DataConfig(decode_threads=wanted),
        optim=OptimConfig(name="sgd", lr=0.1),
        train=TrainConfig(global_batch=8, duration="1ep"),  # type: ignore[arg-type]
    )
    world = World(0, 1, 0, 1, torch.device(device), cores)
    assert build.count_decode_threads(config, world, decoder) == threads  # type: ignore[arg-type]
