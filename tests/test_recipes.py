"""The packaged recipes: each loads, says what it reproduces, and holds the published values."""

import tomllib
from pathlib import Path

import pytest

from lockstep.config import RunConfig, to_toml
from lockstep.errors import LockstepError
from lockstep.recipe_values import Duration
from lockstep.recipes.read import copy_recipe, list_recipes, load_recipe, recipe_text

NAMES = [
    "alexnet-64k",
    "cifar10-resnet18",
    "finetune-resnet50",
    "imagenette-resnet50",
    "quickstart",
    "resnet50-256",
    "resnet50-64k",
    "resnet50-8k",
]


def test_all_recipes_are_listed_with_one_sentence_each() -> None:
    recipes = list_recipes()
    assert [recipe.name for recipe in recipes] == NAMES
    for recipe in recipes:
        assert recipe.summary.endswith(".")
        assert 40 < len(recipe.summary) < 120


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads_and_replays(name: str) -> None:
    run, config = load_recipe(name)
    assert run == name
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_by_saying_what_it_reproduces(name: str) -> None:
    opening = recipe_text(name).partition("\n[")[0]
    assert opening.startswith("# ")
    assert "Reproduces" in opening
    assert "Published:" in opening or "Expected:" in opening


def test_goyals_learning_rate_follows_the_linear_scaling_rule() -> None:
    small, large = load_recipe("resnet50-256")[1], load_recipe("resnet50-8k")[1]
    assert large.optim.lr == pytest.approx(small.optim.lr * large.train.global_batch / small.train.global_batch)
    assert large.optim.milestones == small.optim.milestones
    assert large.optim.warmup == Duration(5, "ep")


@pytest.mark.parametrize(("name", "epochs"), [("resnet50-64k", 90), ("alexnet-64k", 95)])
def test_jias_recipes_use_lars_at_64k_without_decay_on_norm_and_bias(name: str, epochs: int) -> None:
    _, config = load_recipe(name)
    assert (config.optim.name, config.train.global_batch) == ("lars", 65536)
    assert config.train.duration == Duration(epochs, "ep")
    assert not config.optim.decay_norm_and_bias
    assert not config.optim.adapt_norm_and_bias


def test_a_copied_recipe_is_the_recipe(tmp_path: Path) -> None:
    copy_recipe("quickstart", tmp_path / "mine.toml")
    assert load_recipe(str(tmp_path / "mine.toml")) == ("mine", load_recipe("quickstart")[1])


def test_copying_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("precious")
    with pytest.raises(
        LockstepError, match=r"mine\.toml exists already; give another file name, or remove it first\.$"
    ):
        copy_recipe("quickstart", path)
    assert path.read_text() == "precious"


def test_copying_to_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"^Cannot write .*: No such file or directory\.$"):
        copy_recipe("quickstart", tmp_path / "none" / "mine.toml")


def test_an_unknown_recipe_has_no_text() -> None:
    with pytest.raises(LockstepError, match=r"did you mean resnet50-64k or resnet50-8k\?|did you mean resnet50-8k"):
        recipe_text("resnet50-16k")


def test_a_file_and_a_runs_configuration_are_shown_and_copied_like_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    copy_recipe("quickstart", file)
    assert recipe_text(str(file)) == recipe_text("quickstart")
    (tmp_path / "config.toml").write_text("# a run\n")
    assert recipe_text(str(tmp_path)) == "# a run\n"
    copy_recipe(str(file), tmp_path / "again.toml")
    assert (tmp_path / "again.toml").read_text() == file.read_text()
