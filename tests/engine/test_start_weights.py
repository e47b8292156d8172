"""Weights that a run starts from: fine-tuning, frozen parts, and a resume that does not need them any more."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.comm.world import World, join_world
from lockstep.config import RunConfig
from lockstep.engine.build import Parts, assemble, build_network, build_parts, open_sources
from lockstep.engine.checkpoint import list_checkpoints
from lockstep.engine.measure import fake_batch
from lockstep.engine.run import run_rank
from lockstep.engine.start_weights import load_start, read_source
from lockstep.engine.step import train_step
from lockstep.errors import LockstepError
from lockstep.events import Evaluated, Event, RunStarted
from lockstep.models import build_model, initialize
from lockstep.optim.schedule import Schedule
from lockstep.report.run import SilentSink
from tests.engine.conftest import tiny_config
from tests.engine.small import small_config
from tests.engine.test_run import texts
from tests.ranks import run_ranks

SHORT = ["train.duration=3st", "optim.warmup=0st", "train.eval_every=0st", "optim.schedule=constant"]


def train(config: RunConfig, folder: Path, *, resume: bool = False) -> list[Event]:
    """A run in this process, and what it says."""
    heard: list[Event] = []

    class Ear(SilentSink):
        def emit(self, event: Event) -> None:
            heard.append(event)

    run_rank(config, "tiny", folder, resume=resume, membership=None, open_sink=lambda world, folder: Ear())
    return heard


def newest(folder: Path) -> dict[str, Tensor]:
    return load_file(list_checkpoints(folder / "checkpoints")[0] / "model.safetensors")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in torchvision's format, for seven classes: `state_dict` under torchvision's names."""
    model = build_model("resnet18", 7, image_size=32, width=8)
    initialize(model, seed=11)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_run_starts_from_a_file_with_frozen_parts_and_needs_it_no_more(
    images: Path, pretrained: Path, tmp_path: Path, compute: str
) -> None:
    weights = tmp_path / "mine.pth"
    weights.write_bytes(pretrained.read_bytes())
    settings = [*SHORT, f"model.weights={weights}", 'model.freeze=["conv1", "bn1", "layer1"]']
    settings += [f"precision.compute={compute}", "optim.weight_decay=0.1"]
    heard = train(tiny_config(images, *settings), tmp_path / "run")
    assert texts(heard)[:2] == [
        f"Starting from {weights}.",
        f"model.weights = {weights}: the classifier fc is fresh, for 10 classes, as the weights are for 7.",
    ]
    weights.unlink()
    before, first = torch.load(pretrained, weights_only=True), newest(tmp_path / "run")
    train(tiny_config(images, *settings, "train.duration=5st"), tmp_path / "run", resume=True)
    second = newest(tmp_path / "run")
    assert first.keys() == second.keys() == before.keys()
    for name in before:
        is_frozen = name.startswith(("conv1", "bn1", "layer1"))
        assert torch.equal(first[name], second[name]) == is_frozen, name
        assert not is_frozen or torch.equal(first[name], before[name]), name
    start = next(event for event in heard if isinstance(event, RunStarted))
    assert not [name for name in start.layers if name.startswith(("conv1", "bn1", "layer1"))]


def test_the_first_outputs_are_those_of_the_weights(images: Path, pretrained: Path) -> None:
    """In evaluation, up to the classifier, the network computes what the file's own does."""
    own = build_model("resnet18", 7, image_size=32, width=8)
    own.load_state_dict(torch.load(pretrained, weights_only=True))
    own.fc = nn.Identity()
    config = tiny_config(images)
    with join_world(None) as world:
        parts = build_parts(config, world, open_sources(config.data))
        load_start(str(pretrained), parts, world, 10)
        parts.model.fc = nn.Identity()
        batch = fake_batch(config, world).images
        torch.testing.assert_close(parts.model.eval()(batch), own.eval()(batch))


def start_on_ranks(world: World, images: Path, weights: str) -> list[Any]:
    """What every rank has after the start; only the first has the file."""
    config = tiny_config(images)
    parts = build_parts(config, world, open_sources(config.data))
    notes = load_start(weights if world.is_first else "somewhere/else.pth", parts, world, 10)
    return [parts.weights, parts.model.get_buffer("layer4.1.bn2.running_var"), notes]


def test_rank_0_alone_reads_and_all_have_the_same(images: Path, pretrained: Path) -> None:
    (weights, variance, notes), (same, same_variance, silence) = run_ranks(start_on_ranks, 2, images, str(pretrained))
    assert torch.equal(weights, same)
    assert torch.equal(variance, same_variance)
    assert torch.equal(variance, torch.load(pretrained, weights_only=True)["layer4.1.bn2.running_var"])
    assert len(notes) == 2
    assert silence == []


def test_a_run_or_a_checkpoint_may_be_started_from(images: Path, tmp_path: Path) -> None:
    train(tiny_config(images, *SHORT), tmp_path / "first")
    expected = newest(tmp_path / "first")
    for place in (tmp_path / "first", list_checkpoints(tmp_path / "first" / "checkpoints")[0]):
        found = read_source(str(place))
        assert all(torch.equal(found[name], values) for name, values in expected.items())
    heard = train(tiny_config(images, *SHORT, f"model.weights={tmp_path / 'first'}"), tmp_path / "second")
    assert texts(heard)[0] == f"Starting from {tmp_path / 'first'}."
    assert not any("classifier" in text for text in texts(heard))  # as many classes: it came along


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.mkdir(), "holds neither a run nor a checkpoint"),
        (lambda path: None, "is no file and no folder; give a .safetensors or .pth file"),
        (lambda path: path.write_text("x"), "neither .safetensors nor .pth"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text("{}")), "is damaged"),
        (lambda path: (path / "checkpoints").mkdir(parents=True), "no checkpoint under"),
    ],
)
def test_another_place_is_a_sentence(make: Any, sentence: str, tmp_path: Path) -> None:
    make(tmp_path / "place")
    with pytest.raises(LockstepError, match=sentence):
        read_source(str(tmp_path / "place"))


def test_a_run_that_ended_before_its_first_checkpoint_starts_from_the_weights_again(
    images: Path, pretrained: Path, tmp_path: Path
) -> None:
    """A run's folder without any checkpoint, as a kill in the first steps leaves it."""
    config = tiny_config(images, *SHORT, f"model.weights={pretrained}")
    train(config, tmp_path / "whole")
    run = tmp_path / "killed"
    run.mkdir()
    (run / "config.toml").write_text((tmp_path / "whole" / "config.toml").read_text())
    heard = train(config, run, resume=True)
    assert f"Starting from {pretrained}." in texts(heard)
    assert all(torch.equal(values, newest(run)[name]) for name, values in newest(tmp_path / "whole").items())


def accuracy(heard: list[Event]) -> float:
    return [event for event in heard if isinstance(event, Evaluated)][-1].top1


def write_stripes(folder: Path, angles: range, num_train: int, num_val: int) -> Path:
    """An image folder in which a class is the direction of stripes of any phase and colour, under noise."""
    draw = np.random.default_rng(len(angles))
    y, x = np.mgrid[:24, :24]
    for split, count in (("train", num_train), ("val", num_val)):
        for degrees in angles:
            place = folder / split / f"angle{degrees}"
            place.mkdir(parents=True)
            angle = np.deg2rad(degrees)
            for number in range(count):
                wave = np.sin(1.2 * (x * np.cos(angle) + y * np.sin(angle)) + draw.uniform(0, 2 * np.pi))
                image = wave[..., None] * draw.uniform(20, 60, 3) + draw.uniform(90, 160, 3)
                image += draw.normal(0, 25, image.shape)
                Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    return folder


def test_fine_tuning_beats_training_from_scratch_at_equal_epochs(tmp_path: Path) -> None:
    """Six directions of stripes learned, written as torchvision writes it; then four others, in two epochs."""
    settings = ["optim.name=sgd", "optim.lr=0.1", "optim.warmup=0st", "data.flip=false", "data.crop_area=[0.8, 1]"]
    settings += ["train.eval_every=0st", "train.checkpoint_every=0st", "train.log_every=100", "train.global_batch=24"]
    settings += ["model.stem=cifar", "data.image_size=24", "data.eval_resize=24"]
    first = write_stripes(tmp_path / "first", range(0, 180, 30), 40, 4)
    second = write_stripes(tmp_path / "second", range(15, 180, 45), 24, 25)
    train(tiny_config(first, *settings, "train.duration=8ep"), tmp_path / "before")
    torch.save(newest(tmp_path / "before"), tmp_path / "resnet18.pth")
    tune = [*settings, "train.duration=2ep"]
    scratch = accuracy(train(tiny_config(second, *tune), tmp_path / "scratch"))
    heard = train(tiny_config(second, *tune, f"model.weights={tmp_path / 'resnet18.pth'}"), tmp_path / "tuned")
    assert "the classifier fc is fresh, for 4 classes, as the weights are for 6." in texts(heard)[1]
    assert accuracy(heard) > scratch + 0.15, scratch


def build(config: RunConfig, world: World) -> Parts:
    return assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_early_layers_learn_more_slowly_by_the_factor(layer_decay: float) -> None:
    """One step of SGD without momentum: every weight moves by lr · factor · gradient."""
    optim = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    with join_world(None) as world:
        moved = []
        for factor in (1.0, layer_decay):
            parts = build(small_config("fp32", optim=optim | {"layer_decay": factor}), world)
            before = parts.weights.clone()
            train_step(parts, fake_batch(small_config("fp32"), world), 0.1)
            moved.append((parts.layout, parts.weights - before))
    layout, usual = moved[0]
    blocks = ["conv1 bn1", *(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)), "fc"]
    for slot in layout.slots:
        depth = next(n for n, names in enumerate(blocks) if any(slot.name.startswith(name) for name in names.split()))
        step = usual[slot.offset : slot.end]
        slow = moved[1][1][slot.offset : slot.end]
        torch.testing.assert_close(slow, step * layer_decay ** (9 - depth), rtol=1e-3, atol=1e-6, msg=slot.name)
