"""The reference of settings, held against the configuration itself, and the names that other trainers use."""

import inspect
import json
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from lockstep.cli import spell_resume
from lockstep.config import KEYS, SECTIONS, to_toml
from lockstep.errors import LockstepError
from lockstep.recipes.complaints import ELSEWHERE, describe_option, describe_unknown
from lockstep.recipes.read import apply_overrides, describe_kept_rate, load_recipe, recipe_text
from lockstep.recipes.settings import draw_page, find_settings, list_settings
from tests.engine import commands

ROOT = Path(__file__).parents[1]


def test_the_page_of_the_docs_is_made_of_what_there_is() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == draw_page(list_settings()), "docs/settings.md is stale; run `make settings`"


def test_every_setting_is_described() -> None:
    settings = list_settings()
    assert tuple(setting.key for setting in settings) == KEYS
    assert all(setting.meaning and setting.allowed for setting in settings)


def test_defaults_are_those_of_a_recipe_that_says_nothing() -> None:
    bare = load_recipe("quickstart")[1].model_dump(mode="json")
    least = tomllib.loads("[optim]\nlr = 0.1\n[train]\nglobal_batch = 8\nduration = '1ep'\n")
    resolved = tomllib.loads(to_toml(type(load_recipe("quickstart")[1]).model_validate(least)))
    assert bare.keys() == resolved.keys()
    for setting in list_settings():
        section, _, name = setting.key.rpartition(".")
        if setting.default and setting.default != "follows the others":
            assert json.loads(setting.default) == (resolved[section] if section else resolved)[name], setting.key


def test_limits_are_kept_by_the_configuration() -> None:
    """Beyond a limit that is stated, a value is refused; at one that belongs, it is not refused for that."""
    checked = 0
    for setting in list_settings():
        section, _, name = setting.key.rpartition(".")
        for word, beyond in (("at least ", -1), ("at most ", 1)):
            if word in setting.allowed:
                kind = int if "whole" in setting.allowed else float
                limit = kind(setting.allowed.split(word)[1].split()[0])
                for value, is_refused in ((limit + beyond, True), (limit, False)):
                    assert is_refused == (name in _refused(section, {name: value})), (setting.key, value)
                checked += 1
    assert checked > 40


def _refused(section: str, table: dict[str, object]) -> set[object]:
    try:
        SECTIONS[section].model_validate(table)
    except ValidationError as error:
        return {
            part
            for one in error.errors()
            if one["type"] in ("greater_than_equal", "less_than_equal")
            for part in one["loc"]
        }
    return set()


def test_recipes_that_set_a_key_are_named_with_its_value() -> None:
    by_key = {setting.key: setting.recipes for setting in list_settings()}
    table = tomllib.loads(recipe_text("quickstart"))
    assert json.loads(by_key["optim.lr"]["quickstart"]) == table["optim"]["lr"]
    assert "quickstart" not in by_key["comm.division"]


def test_settings_are_found_by_a_part_a_pattern_or_their_meaning() -> None:
    assert [setting.key for setting in find_settings("optim.lr")] == ["optim.lr"]
    assert {setting.key for setting in find_settings("*.beta?")} == {"optim.beta1", "optim.beta2"}
    assert [setting.key for setting in find_settings("mirror")] == ["data.eval_flip", "data.flip", "data.flip_in_turn"]
    assert [setting.key for setting in find_settings("epochs")] == ["train.duration"]
    with pytest.raises(LockstepError, match=r"There is no key momentun; the nearest is optim\.momentum"):
        find_settings("momentun")


def test_the_command_prints_a_table_json_and_the_page() -> None:
    status, out, err = commands.run("recipes", "settings", "clip_norm", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)[0] == find_settings("optim.clip_norm")[0]._asdict()
    assert "optim.clip_norm" in commands.run("recipes", "settings", "clip_norm")[1]


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_others_call_it_leads_to_a_setting_that_works(name: str) -> None:
    ours = ELSEWHERE[name]
    assert f"There is no key {name}; here it is {ours}" == describe_unknown(name)
    if ours.startswith("--"):
        from lockstep import cli

        assert ours.split()[0].removeprefix("--") in inspect.signature(cli.train).parameters
    else:
        key, _, value = ours.partition(" = ")
        section, setting = key.split(".")[:2]
        raw = apply_overrides(tomllib.loads(recipe_text("resnet50-256")), [f"{key}={value}"])
        assert setting in raw[section]
        invalid = _all_refused(section, {setting: raw[section][setting]})
        assert setting not in invalid, invalid


def _all_refused(section: str, table: dict[str, object]) -> dict[object, str]:
    try:
        SECTIONS[section].model_validate(table)
    except ValidationError as error:
        return {part: one["msg"] for one in error.errors() for part in one["loc"]}
    return {}


def test_other_trainers_names_in_any_spelling_and_section() -> None:
    for name in ("epochs", "train.epochs", "Epochs"):
        assert describe_unknown(name).endswith('; here it is train.duration = "90ep"')
    for name in ("learning_rate", "learning-rate"):
        assert describe_unknown(name).endswith("; here it is optim.lr = 0.1")
    assert describe_unknown("optim.momentun").endswith("; the nearest is optim.momentum")


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("epochs=3", "--set train.duration=3ep"),
        ("train.max_steps=70", "--set train.duration=70st"),
        ("batch_size=32", "--set train.global_batch=32"),
        ("learning_rate=0.02", "--set optim.lr=0.02"),
        ("warmup_epochs=2", "--set optim.warmup=2ep"),
        ("model.drop_path=0.2", "--set model.settings.drop_path_rate=0.2"),
        ("optimizer=adamw", "--set optim.name=adamw"),
        ("opt=Adam", "--set optim.name=adamw"),
        ("hflip=0", "--set data.flip=false"),
        ("model_ema_decay=0.99", "--set optim.average=0.99"),
        ("gpus=2", "--ranks 2"),
        ("num_workers=4", "--set data.decode_threads=4"),
        ("reprob=0.2", "--set augment.erase=0.2"),
        ("data_dir=/tmp", "--set data.source=folder --set data.path=/tmp"),
        ("arch=resnet18", "--set model.name=resnet18"),
        ("pretrained=w/a.pth", "--set model.weights=w/a.pth"),
        # Where it may mean something else, or is no value, there is an example.
        ("per_device_train_batch_size=32", "--set train.global_batch=256"),
        ("batch_size=0.5", "--set train.global_batch=256"),
        ("epochs=-1", "--set train.duration=90ep"),
        ("epochs=many", "--set train.duration=90ep"),
        ("epochs=true", "--set train.duration=90ep"),
        ("learning_rate=inf", "--set optim.lr=0.1"),
        ("wandb=true", "--log wandb"),
        ("optimizer=adagrad", "--set optim.name=sgd"),
        ("pretrained=true", "--set model.weights=torchvision:resnet50"),
        ("hflip=0.3", "--set data.flip=true"),
        ("gpus=0", "--ranks 4"),
    ],
)
def test_a_value_under_another_trainers_name_is_carried_over_where_it_is_plain(given: str, ours: str) -> None:
    with pytest.raises(LockstepError) as caught:
        load_recipe("quickstart", [given])
    assert str(caught.value) == f"There is no key {given.partition('=')[0]}; here it is {ours} (--set {given})."


def test_what_a_file_gives_under_another_trainers_name_is_shown_as_a_file_has_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"epochs = 3\n{recipe_text('quickstart')}")
    with pytest.raises(LockstepError, match=r'There is no key epochs; here it is train\.duration = "3ep" \(recipe '):
        load_recipe(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("model=resnet50", "--set model.name=resnet50"),
        ("optim=adamw", "--set optim.name=adamw"),
        ("data=/tmp/x", "--set data.source=folder --set data.path=/tmp/x"),
    ],
)
def test_one_value_for_a_whole_table_leads_to_the_key_that_is_meant(given: str, ours: str, tmp_path: Path) -> None:
    table, _, value = given.partition("=")
    with pytest.raises(LockstepError) as caught:
        load_recipe("quickstart", [given])
    assert str(caught.value) == f"{table} is a table of keys; here it is {ours} (--set {given})."
    (tmp_path / "mine.toml").write_text(f'{table} = "{value}"\n')
    with pytest.raises(LockstepError, match=f"^{table} is a table of keys; here it is {table}[.][a-z]+ = "):
        load_recipe(str(tmp_path / "mine.toml"))


def test_a_table_that_is_no_table_and_means_nothing_is_said() -> None:
    with pytest.raises(LockstepError, match="model = 3 must be a table of keys"):
        load_recipe("quickstart", ["model=3"])


def test_the_argument_after_an_option_is_its_value() -> None:
    for words in (("--epochs", "5"), ("--epochs=5",)):
        assert commands.run("train", "quickstart", *words)[2].endswith("here it is --set train.duration=5ep.\n")
    assert "GPUs are taken by themselves" in commands.run("train", "quickstart", "--device", "cuda")[2]
    assert commands.run("train", "--amp", "quickstart")[2].endswith("here it is --set precision.compute=bf16.\n")


def test_another_rule_that_keeps_the_recipes_rate_is_a_sentence() -> None:
    assert describe_kept_rate("quickstart", ["optim.name=adamw"]) == (
        "optim.name = adamw keeps the recipe's optim.lr = 1, which was chosen for lars; with adamw it is usually about "
        "0.001: set optim.lr too."
    )
    for settings in (["optim.name=adamw", "optim.lr=1.0"], ["optim.lr=2.0"], ["optim.name=lars"]):
        assert describe_kept_rate("quickstart", settings) == ""


def test_data_weights_and_a_recipes_name_in_a_recipe_are_told_apart_from_recipes(tmp_path: Path) -> None:
    (tmp_path / "images" / "train").mkdir(parents=True)
    (tmp_path / "x.pth").write_bytes(b"x")
    (tmp_path / "mine.toml").write_text('recipe = "quickstart"\n')
    for name, words in (
        ("images", "is a folder of data and no recipe; train on it with .* --set data.source=folder --set data.path="),
        ("x.pth", "is a file of weights and no recipe; .* --set model.weights="),
        ("mine.toml", "There is no key recipe; .*lockstep recipes copy NAME FILE"),
    ):
        with pytest.raises(LockstepError, match=words):
            load_recipe(str(tmp_path / name))


@pytest.mark.parametrize("setting", ["model.freeze=conv1,bn1", "optim.milestones=30ep"])
def test_a_list_has_an_example_that_is_none_empty(setting: str) -> None:
    with pytest.raises(LockstepError, match=r'must be a list, such as \["'):
        load_recipe("quickstart", [setting])


@pytest.mark.parametrize("key", ["num_classes", "model.num_classes", "nb-classes"])
def test_the_number_of_classes_is_nobodys_to_give(key: str) -> None:
    assert describe_unknown(key) == f"There is no key {key}; the number of classes follows from the data"
    assert describe_option("--num-classes") == (
        "There is no option --num-classes; the number of classes follows from the data."
    )


def test_a_networks_own_setting_is_found_by_what_others_call_it() -> None:
    assert [setting.key for setting in find_settings("drop_path")] == ["model.settings"]


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--epochs", "--set train.duration=90ep"),
        ("--batch-size", "--set train.global_batch=256"),
        ("--weight-decay", "--set optim.weight_decay=0.0001"),
        ("--momentum", "--set optim.momentum=0.9"),
        ("--amp", "--set precision.compute=bf16"),
        ("--workers", "--set data.decode_threads=8"),
        ("--dist-backend", "--set comm.backend=nccl"),
        ("--wandb", "--log wandb"),
        ("--lr-steps", '--set \'optim.milestones=["30ep", "60ep"]\''),
    ],
)
def test_an_option_of_another_trainer_is_a_sentence(option: str, ours: str) -> None:
    assert describe_option(option) == f"There is no option {option}; here it is {ours}."


def test_an_option_that_nobody_has_is_left_to_the_parser() -> None:
    assert describe_option("--frobnicate") == ""
    assert describe_option("--name") == ""  # there are several
    status, _, err = commands.run("train", "quickstart", "--learning-rate=0.1")
    assert status == 1
    assert err == "lockstep: There is no option --learning-rate; here it is --set optim.lr=0.1.\n"


def test_resume_may_stand_anywhere_with_and_without_a_value() -> None:
    assert spell_resume(["--resume", "run"]) == ["--resume=yes", "run"]
    assert spell_resume(["run", "--resume"]) == ["run", "--resume=yes"]
    assert spell_resume(["r", "--resume", "auto", "--out", "x"]) == ["r", "--resume=auto", "--out", "x"]
    assert spell_resume(["r", "--resume=auto"]) == ["r", "--resume=auto"]
    assert spell_resume(["auto"]) == ["auto"]
