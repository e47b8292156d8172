"""A tiny generated data set and a recipe that trains on it in seconds."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lockstep.config import RunConfig, to_toml
from lockstep.data.generated import build_generated
from lockstep.engine.build import build_network
from lockstep.engine.checkpoint import save_checkpoint
from lockstep.engine.run import run_rank
from lockstep.recipes.read import load_recipe
from lockstep.report.display import build_display
from lockstep.report.run import RunSink

NUM_TRAIN, NUM_VAL = 130, 50


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder of 130 training and 50 validation images."""
    return build_generated(tmp_path_factory.mktemp("cache"), NUM_TRAIN, NUM_VAL)


@pytest.fixture(scope="session")
def tiny(images: Path) -> RunConfig:
    """Epochs of 5 steps, the last one smaller; a checkpoint every 3 steps."""
    return tiny_config(images)


def tiny_config(images: Path, *overrides: str) -> RunConfig:
    """The `tiny` recipe with changes."""
    return load_recipe("quickstart", [*tiny_settings(images), *overrides])[1]


def tiny_settings(images: Path) -> list[str]:
    """What makes the quickstart tiny."""
    return [
        "data.source=folder",
        f"data.path={images}",
        "data.image_size=32",
        "data.eval_resize=36",
        "model.width=8",
        "train.global_batch=28",
        "train.duration=2ep",
        "train.log_every=1",
        "train.eval_every=1ep",
        "train.checkpoint_every=3st",
        "comm.tune_s=0",
        # The same on a GPU, which would settle on others by itself.
        "precision.compute=fp32",
        "train.max_batch_per_rank=256",
    ]


def spell_small_run(run: Path, ranks: int, duration: str) -> list[str]:
    """The arguments of a tiny run of so many ranks on generated images, in this folder."""
    settings = [*tiny_settings(run.parent), "data.source=generated", 'data.path=""', "data.train_images=64"]
    settings += ["data.val_images=20", f"train.duration={duration}", "optim.warmup=0st", "train.eval_every=0st"]
    return ["train", "quickstart", f"--ranks={ranks}", f"--out={run}", *(f"--set={setting}" for setting in settings)]


# Names that would be more than text on a page, in Markdown or in a terminal, if somebody let them.
STRANGE = {"bar": "<b onclick=x>bar", "disc": "di|sc `# *", "ring": "rïng\x1b[2J"}


@pytest.fixture(scope="session")
def named_images(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images under strange names of classes."""
    root = Path(shutil.copytree(images, tmp_path_factory.mktemp("named") / "shapes"))
    for split in ("train", "val"):
        for name, strange in STRANGE.items():
            (root / split / name).rename(root / split / strange)
    return root


@pytest.fixture(scope="session")
def trained_run(named_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of ten steps, with all its records."""
    folder = tmp_path_factory.mktemp("runs") / "shapes-run"
    config = tiny_config(named_images)

    def open_sink(world: object, folder: Path) -> RunSink:
        return RunSink(folder, build_display(Console(quiet=True), folder), [])

    assert run_rank(config, "tiny", folder, resume=False, membership=None, open_sink=open_sink) == "finished"
    return folder


def make_run(folder: Path, config: RunConfig) -> Path:
    """A run's folder with a network of three classes that was never trained."""
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    network = build_network(config, 3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    save_checkpoint(
        folder / "checkpoints", 1, {"model": network.state_dict()}, {"classes": ["one", "two", "three"]}, keep=1
    )
    return folder


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """What a test makes of PyTorch's threads is for that test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
