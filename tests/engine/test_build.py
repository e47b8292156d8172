"""What is built from a configuration, where nothing else tests it."""

import pytest
import torch

from lockstep.comm.world import World
from lockstep.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.engine import build
from tests.data.pictures import Pictures, encode, picture


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


@pytest.mark.parametrize(
    ("kinds", "wanted", "decoder", "threads"),
    [
        (("PNG",), "auto", "cpu", 14),
        (("PNG", "PNG", "JPEG"), "auto", "cpu", 14),
        (("JPEG",), "auto", "both", 4),
        (("JPEG", "JPEG", "PNG"), "auto", "both", 4),
        (("PNG",), "both", "both", 4),
    ],
)
def test_all_cores_decode_what_nvjpeg_cannot(
    kinds: tuple[str, ...], wanted: str, decoder: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "choose_decoder", lambda asked, device: "both" if asked == "auto" else asked)
    config = RunConfig(
        data=DataConfig(decoder=wanted),  # type: ignore[arg-type]
        optim=OptimConfig(name="sgd", lr=0.1),
        train=TrainConfig(global_batch=8, duration="1ep"),  # type: ignore[arg-type]
    )
    world = World(0, 1, 0, 1, torch.device("cuda"), 16)
    images = [encode(picture(16, 16, seed), kinds[seed % len(kinds)]) for seed in range(12)]
    plan = build.plan_input(config, world, Pictures(images))  # type: ignore[arg-type]
    assert (plan.decoder, plan.threads) == (decoder, threads)


@pytest.mark.parametrize(
    ("kind", "decoder", "cores", "wanted", "processes"),
    [
        ("PNG", "auto", 16, -1, 8),
        ("PNG", "auto", 6, -1, 4),
        ("PNG", "auto", 2, -1, 1),
        ("PNG", "cpu", 16, -1, 8),
        ("PNG", "auto", 16, 0, 0),
        ("PNG", "auto", 16, 3, 3),
        ("PNG", "both", 16, -1, 2),
        ("JPEG", "auto", 16, -1, 2),
        ("JPEG", "auto", 16, 0, 0),
        ("JPEG", "auto", 16, 5, 5),
        ("JPEG", "cpu", 16, -1, 0),
        ("JPEG", "cpu", 16, 5, 0),
    ],
)
def test_processes_read_for_nvjpeg_or_decode_where_it_cannot(
    kind: str, decoder: str, cores: int, wanted: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "choose_decoder", lambda asked, device: "both" if asked == "auto" else asked)
    config = RunConfig(
        data=DataConfig(decoder=decoder, read_processes=wanted),  # type: ignore[arg-type]
        optim=OptimConfig(name="sgd", lr=0.1),
        train=TrainConfig(global_batch=8, duration="1ep"),  # type: ignore[arg-type]
    )
    source = Pictures([encode(picture(16, 16, seed), kind) for seed in range(12)])
    world = World(0, 1, 0, 1, torch.device("cuda"), cores)
    assert build.plan_input(config, world, source).read_processes == processes  # type: ignore[arg-type]
    world = World(0, 1, 0, 1, torch.device("cpu"), cores)
    monkeypatch.setattr(build, "choose_decoder", lambda asked, device: "cpu")
    assert build.plan_input(config, world, source).read_processes == 0  # type: ignore[arg-type]
