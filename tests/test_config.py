"""The configuration tree: what it accepts, the sentence for everything it does not, and the way through TOML."""

import os
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.config import (
    KEYS,
    SECTIONS,
    Duration,
    RunConfig,
    Section,
    to_toml,
)
from lockstep.errors import LockstepError
from lockstep.recipes.read import apply_overrides, load_recipe

SMALLEST = {"optim": {"lr": 0.1}, "train": {"global_batch": 8, "duration": "2ep"}}


def complaint(tmp_path: Path, text: str, *overrides: str) -> str:
    """The sentence a recipe earns."""
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LockstepError) as caught:
        load_recipe(str(path), overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def complaint_about(tmp_path: Path, *overrides: str) -> str:
    """The sentence overrides of an otherwise right recipe earn, without the part that names the recipe."""
    sentence = complaint(tmp_path, RIGHT, *overrides)
    return sentence.removesuffix(f" (recipe {tmp_path / 'my.toml'} with --set).")


RIGHT = """
[optim]
lr = 0.1
[train]
global_batch = 8
duration = "2ep"
"""


def test_a_recipe_needs_only_learning_rate_batch_and_duration(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(RIGHT)
    name, config = load_recipe(str(path))
    assert (name, config.optim.lr, config.train.global_batch) == ("my", 0.1, 8)
    assert config.train.duration == Duration(2, "ep")
    assert config.model.name == "resnet50"


def test_every_key_has_a_description() -> None:
    models: list[type[Section]] = [RunConfig, *SECTIONS.values()]
    for model in models:
        assert all(field.description for field in model.model_fields.values())


def test_the_tree_is_frozen() -> None:
    config = RunConfig.model_validate(SMALLEST)
    with pytest.raises(ValidationError):
        config.optim.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.lr=fast", 'optim.lr = "fast" must be a number, such as 0.1'),
        ("optim.lr=true", "optim.lr = true must be a number, such as 0.1"),
        ("optim.lr=0", "optim.lr = 0 must be above 0, such as 0.1"),
        ("optim.lr=nan", "optim.lr = NaN must be a finite number, such as 0.1"),
        ("train.global_batch=0", "train.global_batch = 0 must be at least 1, such as 256"),
        ("train.global_batch=8.5", "train.global_batch = 8.5 must be a whole number, such as 256"),
        ("train.seed=-1", "train.seed = -1 must be at least 0, such as 0"),
        ("optim.momentum=1.0", "optim.momentum = 1.0 must be below 1, such as 0.9"),
        ("optim.beta1=1", "optim.beta1 = 1 must be below 1, such as 0.9"),
        ("optim.beta2=-0.1", "optim.beta2 = -0.1 must be at least 0, such as 0.999"),
        ("optim.label_smoothing=1", "optim.label_smoothing = 1 must be below 1, such as 0.0"),
        ("optim.name=adam", "optim.name = \"adam\" must be 'sgd', 'lars', 'lamb', 'adamw', 'muon', 'svrg' or 'halp'"),
        ("optim.adamw_epsilon=0", "optim.adamw_epsilon = 0 must be above 0, such as 1e-08"),
        ("optim.clip_norm=-1", "optim.clip_norm = -1 must be at least 0, such as 0.0"),
        ("optim.clip_norm=inf", "optim.clip_norm = Infinity must be a finite number, such as 0.0"),
        ("optim.clip_norm=1e39", "optim.clip_norm = 1e+39 must be at most 1e+38, such as 0.0"),
        ("train.accumulate=2.5", "train.accumulate = 2.5 must be a whole number, such as 0"),
        ("train.accumulate=-1", "train.accumulate = -1 must be at least 0, such as 0"),
        ("data.bad_share=2", "data.bad_share = 2 must be at most 1, such as 0.001"),
        ("data.flip=1", "data.flip = 1 must be true or false"),
        ("data.path=3", "data.path = 3 must be text in quotes"),
        ("data.mean=0.5", "data.mean = 0.5 must be a list, such as [0.485, 0.456, 0.406]"),
        ("data.mean=[0.5, 0.5]", "data.mean[2] is missing; give a value such as [0.485, 0.456, 0.406]"),
        (
            "data.mean=[1, 2, 3, 4]",
            "data.mean = [1, 2, 3, 4] must be a list of 3 values, such as [0.485, 0.456, 0.406]",
        ),
        ('data.mean=["red", 0.5, 0.5]', 'data.mean[0] = "red" must be a number, such as [0.485, 0.456, 0.406]'),
        ("optim=3", "optim = 3 must be a table of keys"),
        (
            "train.duration=5",
            'train.duration = 5 must be a duration, in epochs such as "90ep" or whole steps such as "1500st"',
        ),
        (
            'data.image_sizes=[{until = "6ep"}]',
            "data.image_sizes[0].size is missing; give a value such as 160",
        ),
        (
            'data.image_sizes=[{until = "6ep", size = 64}, {until = "8ep", size = 0}]',
            "data.image_sizes[1].size = 0 must be at least 1, such as 160",
        ),
        (
            'optim.milestones=["30"]',
            'optim.milestones[0] = "30" must be a duration, in epochs such as "90ep" or whole steps such as "1500st"',
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(tmp_path: Path, override: str, sentence: str) -> None:
    assert complaint_about(tmp_path, override) == sentence


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["data.image_size=300"],
            "data.eval_resize = 256 is smaller than data.image_size = 300; "
            "the central crop needs at least that many pixels",
        ),
        (
            ["data.source=folder"],
            'data.source = "folder" needs data.path, the folder that holds train/ and val/',
        ),
        (
            ["data.path=imagenet"],
            'data.path = "imagenet" has no effect with data.source = "generated", only with folder; '
            'leave it at "" or add --set data.source=folder',
        ),
        (["data.crop_area=[0.5, 0.2]"], "data.crop_area = [0.5, 0.2] must be two rising shares in (0, 1]"),
        (["data.crop_area=[0.5, 1.2]"], "data.crop_area = [0.5, 1.2] must be two rising shares in (0, 1]"),
        (["data.crop_ratio=[2, 1]"], "data.crop_ratio = [2.0, 1.0] must be two rising numbers above 0"),
        (
            ["augment.pad=100", 'data.image_sizes=[{until="1ep", size=100}]'],
            "augment.pad = 100 reflects more pixels than images of data.image_size = 100 have beside their edge; lower "
            "it",
        ),
        (["data.std=[1, 0, 1]"], "data.std = [1.0, 0.0, 1.0] must be three numbers above 0"),
        (
            ["precision.compute=bf16", "precision.min_scale=2"],
            'precision.min_scale = 2.0 has no effect with precision.compute = "bf16", only with auto, fp16; '
            "leave it at 1.0 or change precision.compute",
        ),
        (
            ["precision.compute=fp16", "precision.initial_scale=0.5"],
            "precision.initial_scale = 0.5 must lie between precision.min_scale = 1.0 and "
            "precision.max_scale = 16777216.0",
        ),
        (
            ["optim.name=lars", "optim.nesterov=true"],
            'optim.nesterov = true has no effect with optim.name = "lars", only with sgd; '
            "leave it at false or change optim.name",
        ),
        (
            ["optim.name=adamw", "optim.momentum=0.8"],
            'optim.momentum = 0.8 has no effect with optim.name = "adamw", only with sgd, lars, muon; '
            "leave it at 0.9 or change optim.name",
        ),
        (
            ["optim.name=lamb", "optim.adamw_epsilon=1e-5"],
            'optim.adamw_epsilon = 1e-05 has no effect with optim.name = "lamb", only with adamw; '
            "leave it at 1e-08 or change optim.name",
        ),
        (
            ["optim.beta1=0.8"],
            'optim.beta1 = 0.8 has no effect with optim.name = "sgd", only with lamb, adamw; '
            "leave it at 0.9 or change optim.name",
        ),
        (
            ["train.accumulate=2", "train.max_batch_per_rank=4"],
            "train.accumulate = 2 and train.max_batch_per_rank = 4 both say in how many passes a step runs; leave one "
            "of the two at 0",
        ),
        (
            ["train.accumulate=2", "train.norm_batch=4"],
            "train.accumulate = 2 and train.norm_batch = 4 both say how large a pass is; leave one of the two at 0",
        ),
        (
            ["optim.average_every=5"],
            "optim.average_every = 5 has no effect without an average; set optim.average, such as 0.99, or leave it "
            "at 1",
        ),
        (
            ["train.accumulate=9"],
            "train.accumulate = 9 asks for more passes than train.global_batch = 8 has samples; lower it",
        ),
        (
            ["model.name=alexnet", "model.stem=cifar"],
            'model.stem = "cifar" has no effect with model.name = "alexnet", '
            'only with resnet18, resnet34, resnet50, resnet101, resnet152; leave it at "imagenet" or change model.name',
        ),
        (
            ["model.batch_norm=false"],
            'model.batch_norm = false has no effect with model.name = "resnet50", only with alexnet; '
            "leave it at true or change model.name",
        ),
        (
            ["model.pool5_batch_norm=false"],
            'model.pool5_batch_norm has an effect only with model.name = "alexnet"; leave it out',
        ),
        (
            ["model.name=alexnet", "model.batch_norm=false", "model.pool5_batch_norm=true"],
            "model.pool5_batch_norm = true needs model.batch_norm = true; drop one of the two",
        ),
        (
            ['optim.milestones=["30ep"]'],
            'optim.milestones = ["30ep"] has no effect with optim.schedule = "cosine", only with step; '
            "leave it at [] or change optim.schedule",
        ),
        (
            ["optim.schedule=step"],
            'optim.schedule = "step" needs optim.milestones, such as ["30ep", "60ep", "80ep"]',
        ),
        (
            ["optim.schedule=step", 'optim.milestones=["1ep", "60st", "1ep", "1ep"]'],
            'optim.milestones must rise, but "1ep" comes after "1ep"',
        ),
        (
            ["optim.warmup=3ep"],
            'optim.warmup = "3ep" is longer than train.duration = "2ep"; shorten the warm-up',
        ),
        (
            ['data.image_sizes=[{until = "9st", size = 64}]'],
            'data.image_sizes has until = "9st", and must change between epochs, such as "6ep"',
        ),
        (
            ['data.image_sizes=[{until = "4ep", size = 64}, {until = "4ep", size = 96}]'],
            "data.image_sizes must rise, but ends after 4, 4 epochs",
        ),
        (
            ['data.image_sizes=[{until = "4ep", size = 64}]', "model.name=alexnet"],
            "data.image_sizes has no effect on alexnet, whose hidden layers take one size; leave it out or change "
            "model.name",
        ),
        (
            ["data.flip=false", "data.flip_in_turn=true"],
            "data.flip_in_turn = true has no effect with data.flip = false; leave one of them out",
        ),
        (["train.duration=0st"], 'train.duration = "0st" trains nothing; give a length such as "90ep"'),
        (
            ["augment.cutout=64", "data.image_size=64"],
            "augment.cutout = 64 erases all of some images of data.image_size = 64; lower it",
        ),
        (
            ["augment.erase=0.5", "augment.cutout=8"],
            "augment.erase and augment.cutout both erase a part of a sample; set one of them to 0",
        ),
    ],
)
def test_an_impossible_combination_is_a_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    assert complaint_about(tmp_path, *overrides) == sentence


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optim.momentun", "optim.momentum"),
        ("optimizer.lr", "optim.lr"),
        ("lr", "optim.lr"),
        ("train.globalbatch", "train.global_batch"),
        ("train.global_batch_size", "train.global_batch"),
        ("model.label_smoothing", "optim.label_smoothing"),
        ("data.imagesize", "data.image_size"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(LockstepError) as caught:
        apply_overrides(SMALLEST, [f"{key}=1"])
    assert str(caught.value) == f"There is no key {key}; the nearest is {nearest} (--set {key}=1)."


def test_a_misspelt_key_in_a_file_is_told_before_the_missing_key_it_caused(tmp_path: Path) -> None:
    sentence = complaint(tmp_path, RIGHT.replace("lr =", "lrr ="))
    assert sentence == f"There is no key optim.lrr; the nearest is optim.lr (recipe {tmp_path}/my.toml, and 1 more)."


def test_an_unknown_section_is_answered_with_the_nearest(tmp_path: Path) -> None:
    sentence = complaint(tmp_path, RIGHT.replace("[optim]", "[optimizer]"))
    assert sentence.startswith("There is no key optimizer; the nearest is optim (")


def test_a_missing_key_is_named_with_an_example(tmp_path: Path) -> None:
    sentence = complaint(tmp_path, "")
    assert sentence == (f"optim.lr is missing; give a value such as 0.1 (recipe {tmp_path}/my.toml, and 2 more).")


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    sentence = complaint(tmp_path, "[optim]\nlr = \n")
    assert sentence == f"recipe {tmp_path}/my.toml is not valid TOML: Invalid value (at line 2, column 6)."


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(LockstepError, match=r"^--set optim.lr has no value; write --set optim.lr=VALUE\.$"):
        apply_overrides(SMALLEST, ["optim.lr"])


def test_override_values_are_toml_or_bare_text() -> None:
    raw = apply_overrides(
        SMALLEST,
        ["model.name=resnet18", "train.duration=5ep", "data.mean=[0, 0.5, 1]", "data.flip=false", "optim.lr=2"],
    )
    assert raw["model"] == {"name": "resnet18"}
    assert raw["train"] == {"global_batch": 8, "duration": "5ep"}
    assert raw["data"] == {"mean": [0, 0.5, 1], "flip": False}
    assert raw["optim"] == {"lr": 2}
    assert SMALLEST["optim"] == {"lr": 0.1}


def test_an_override_does_not_hide_a_section_that_is_no_table(tmp_path: Path) -> None:
    sentence = complaint(tmp_path, "optim = 3", "optim.lr=1")
    assert sentence.startswith("optim = 3 must be a table of keys (")


def test_the_last_override_of_a_key_counts() -> None:
    assert apply_overrides({}, ["optim.lr=1", "optim.lr=2"]) == {"optim": {"lr": 2}}


@pytest.mark.parametrize("name", ["sgd", "lars", "lamb", "adamw"])
def test_another_rule_takes_the_old_ones_settings_out_of_a_recipe(name: str) -> None:
    _, config = load_recipe("quickstart", [f"optim.name={name}"])
    assert config.optim.name == name
    assert config.optim.trust_coefficient == (0.02 if name == "lars" else 0.001)
    assert (config.optim.lr, config.optim.warmup) == (1.0, Duration(2, "ep"))


def test_any_choice_takes_what_it_leaves_without_effect_out_of_a_recipe() -> None:
    raw = {"optim": {"lr": 1, "schedule": "poly", "power": 3.0}, "data": {"source": "folder", "path": "imagenet"}}
    assert apply_overrides(raw, ["optim.schedule=cosine"])["optim"] == {"lr": 1, "schedule": "cosine"}
    assert apply_overrides(raw, ["data.source=generated"])["data"] == {"source": "generated"}
    assert apply_overrides(raw, ["optim.schedule=poly", "data.source=folder"]) == raw


@pytest.mark.parametrize("share", ["5e-324", "9e-7"])
def test_a_share_that_nothing_can_be_divided_by_is_refused(share: str) -> None:
    with pytest.raises(LockstepError, match=r"train.snapshot_share = .*; give 0 for no snapshots, or at least 1e-06"):
        load_recipe("quickstart", [f"train.snapshot_share={share}"])


def test_a_share_may_be_none_or_small() -> None:
    shares = [load_recipe("quickstart", [f"train.snapshot_share={share}"])[1].train for share in ("0", "1e-6")]
    assert [train.snapshot_share for train in shares] == [0, 1e-6]


def test_a_setting_given_together_with_a_rule_that_ignores_it_is_refused() -> None:
    with pytest.raises(LockstepError, match=r"optim.trust_coefficient = 0.01 has no effect"):
        load_recipe("quickstart", ["optim.name=adamw", "optim.trust_coefficient=0.01"])
    with pytest.raises(LockstepError, match=r"optim.nesterov = true has no effect"):
        load_recipe("quickstart", ["optim.nesterov=true"])  # the recipe's own rule decides


def test_a_run_folder_loads_its_config_and_keeps_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart-20250101-000000"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(RunConfig.model_validate(SMALLEST)))
    for target in (folder, folder / "config.toml"):
        name, config = load_recipe(str(target))
        assert (name, config) == (folder.name, RunConfig.model_validate(SMALLEST))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"holds no config\.toml; give a recipe or a run's folder\.$"):
        load_recipe(str(tmp_path))


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(LockstepError) as caught:
        load_recipe("quikstart")
    assert str(caught.value) == "There is no recipe and no file quikstart; did you mean quickstart?"


def test_an_unlikely_recipe_is_answered_with_all() -> None:
    with pytest.raises(LockstepError, match=r"no file zzz; the recipes are alexnet-64k, .*resnet50-8k\.$"):
        load_recipe("zzz")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.touch(mode=0)
    with pytest.raises(LockstepError, match=r"^Cannot read .*my\.toml: Permission denied\.$"):
        load_recipe(str(path))


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LockstepError, match=r"^Cannot read .*: Not a directory\.$"):
        load_recipe(str(tmp_path / "file" / "my.toml"))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(LockstepError, match=r"is not a text file in UTF-8; give a recipe in TOML\.$"):
        load_recipe(str(tmp_path / "my.toml"))


@pytest.mark.parametrize(
    ("text", "steps"),
    [("90ep", 9000), ("0.5ep", 50), ("0.004ep", 0), ("0.006ep", 1), ("1500st", 1500), ("0st", 0), (" 2ep ", 200)],
)
def test_a_duration_is_a_number_of_steps(text: str, steps: int) -> None:
    assert Duration.parse(text).steps(steps_per_epoch=100) == steps


@pytest.mark.parametrize(
    "given", ["90", "ep", "", "-1ep", "nanep", "infep", "infst", "1.5st", "9 weeks", 90, None, True]
)
def test_what_is_not_a_duration_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="a duration, in epochs"):
        Duration.parse(given)


@given(st.floats(0, 1e12), st.integers(0, 10**12))
def test_a_duration_survives_its_text(epochs: float, steps: int) -> None:
    assert Duration.parse(str(Duration(epochs, "ep"))) == Duration(epochs, "ep")
    assert Duration.parse(str(Duration(steps, "st"))) == Duration(steps, "st")


durations = st.builds(Duration, st.floats(0.001, 1000), st.just("ep")) | st.builds(
    Duration, st.integers(1, 10**6), st.just("st")
)


def values_of(key: str) -> st.SearchStrategy[Any]:
    """Right values for a key, drawn from its type and bounds."""
    section, _, name = key.rpartition(".")
    field = (SECTIONS[section] if section else RunConfig).model_fields[name]
    bounds = {
        bound: getattr(item, bound)
        for item in field.metadata
        for bound in ("gt", "ge", "lt", "le")
        if hasattr(item, bound)
    }
    kind = field.annotation
    if get_args(kind) and not isinstance(field.default, tuple):
        return st.sampled_from(get_args(kind))
    if kind is int:
        return st.integers(bounds.get("ge", 0), 10**9)
    if kind is float:
        low, high = bounds.get("ge", bounds.get("gt", 0)), bounds.get("lt", bounds.get("le", 1e6))
        return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
    special = {"data.crop_area": (0.01, 1), "data.crop_ratio": (0.1, 10), "data.mean": (-1, 1), "data.std": (0.1, 9)}
    if key in special:
        low, high = special[key]
        return st.lists(st.floats(low, high), min_size=len(field.default), max_size=len(field.default)).map(sorted)
    if kind is Duration:
        return durations.map(str)
    return st.booleans() if kind is bool else st.text("aé\"'\\\n\t #[]=\x00")


@given(st.data())
def test_every_valid_tree_survives_its_toml(data: st.DataObject) -> None:
    raw: dict[str, Any] = {"optim": {"lr": 0.1}, "train": {"global_batch": 8, "duration": "2ep"}}
    for key in data.draw(st.lists(st.sampled_from(KEYS), max_size=12)):
        section, _, name = key.rpartition(".")
        (raw.setdefault(section, {}) if section else raw)[name] = data.draw(values_of(key))
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError:  # an impossible combination
        return
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.duration=1e308ep", 'train.duration = "1e308ep" must be at most 1e+12ep'),
        ("train.duration=1e13st", "must be at most 1e+12st"),
        ("train.seed=18446744073709551616", "train.seed = 18446744073709551616 must be at most"),
        ("comm.timeout_s=1e12", "comm.timeout_s = 1000000000000.0 must be at most 1e+07"),
        (f"train.seed={'9' * 5000}", "train.seed = "),
        (f"train.seed=0x{'f' * 5000}", "train.seed = what was given must be at most"),
        (f"data.mean={'[' * 3000}{']' * 3000}", "data.mean"),
        ("data.crop_ratio=[1e-300, 1e300]", "must lie between 0.001 and 1000"),
        ("data.std=[1e-300, 1, 1]", "no std below 0.000001"),
        ("model.width=1000000000", "model.width = 1000000000 must be at most 65536"),
    ],
)
def test_an_absurd_value_is_a_sentence(override: str, words: str) -> None:
    with pytest.raises(LockstepError) as caught:
        load_recipe("quickstart", [override])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", [f"x = {'9' * 5000}", f"x = {'[' * 5000}{']' * 5000}", "x = {a=" * 3000])
def test_a_recipe_that_only_a_program_would_write_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(LockstepError, match=r"is not valid TOML|is nested too deeply"):
        load_recipe(str(tmp_path / "recipe.toml"))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.toml")
    with pytest.raises(LockstepError, match="it is not a plain file"):
        load_recipe(str(tmp_path / "recipe.toml"))
