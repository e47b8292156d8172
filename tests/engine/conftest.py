"""A tiny generated data set and a recipe that trains on it in seconds."""

from pathlib import Path

import pytest

from lockstep.config import RunConfig
from lockstep.data.generated import build_generated
from lockstep.recipes.read import load_recipe

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
    ]
