"""Recipes for another batch: published points, proportion, the way back, and sentences."""

import itertools
import math
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lockstep.config import Duration, RunConfig
from lockstep.errors import LockstepError
from lockstep.recipes.points import Family, find_family, find_samples
from lockstep.recipes.read import list_recipes, load_recipe
from lockstep.recipes.recipe_commands import recipes
from lockstep.recipes.transfer import Scaled, scale_recipe

NAMES = [recipe.name for recipe in list_recipes()]
SAMPLES = {"quickstart": 4096, "finetune-resnet50": 30_000, "cifar10-resnet18": 50_000, "imagenette-resnet50": 9_469}
RULES = ["lars", "sgd", "lamb"]


def family_of(rule: str) -> Family:
    family = find_family(rule)
    assert family is not None
    return family


def write_point(family: Family, number: int, path: Path) -> Path:
    """A published point as a recipe."""
    point = family.points[number]
    lines = ["[data]", 'source = "folder"', 'path = "imagenet"', "[optim]", f'name = "{family.rule}"']
    lines += [f"lr = {point.lr}", f'warmup = "{point.warmup}ep"']
    if point.momentum is not None:
        lines += [f"momentum = {point.momentum}", f"weight_decay = {point.weight_decay}"]
    lines += ["[train]", f"global_batch = {point.batch}", f'duration = "{point.epochs}ep"']
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("rule", RULES)
def test_every_published_point_becomes_every_other_exactly(rule: str, tmp_path: Path) -> None:
    family = family_of(rule)
    for number in range(len(family.points)):
        file = write_point(family, number, tmp_path / "point.toml")
        for point in family.points:
            config = scale_recipe(str(file), point.batch).config
            assert config.train.global_batch == point.batch
            assert config.optim.lr == pytest.approx(point.lr, rel=1e-12)
            assert config.optim.warmup == Duration(point.warmup, "ep")
            assert config.train.duration == Duration(point.epochs, "ep")
            if point.momentum is not None:
                assert config.optim.momentum == pytest.approx(point.momentum, abs=1e-9)
                assert config.optim.weight_decay == pytest.approx(point.weight_decay, rel=1e-12)


def test_the_points_rise() -> None:
    for rule in RULES:
        points = family_of(rule).points
        for low, high in itertools.pairwise(points):
            assert low.batch < high.batch
            assert low.lr / (1 - (low.momentum or 0)) <= high.lr / (1 - (high.momentum or 0))
            assert low.warmup <= high.warmup
            assert low.epochs <= high.epochs


def test_goyals_two_recipes_are_each_others() -> None:
    for a, b in (("resnet50-256", "resnet50-8k"), ("resnet50-8k", "resnet50-256")):
        wanted = load_recipe(b)[1]
        assert scale_recipe(a, wanted.train.global_batch).config == wanted


def read_values(config: RunConfig) -> dict[str, float]:
    optim, train = config.optim, config.train
    lengths = (train.duration, optim.warmup)
    assert {length.unit for length in lengths} == {"ep"}
    return {
        "speed": optim.lr / (1 - optim.momentum),
        "lr": optim.lr,
        "momentum": optim.momentum,
        "decay": optim.weight_decay,
        "epochs": train.duration.value,
        "warm-up": optim.warmup.value,
    }


def scale(name: str, batch: int) -> Scaled:
    return scale_recipe(name, batch, SAMPLES.get(name))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.data())
def test_a_larger_batch_has_no_smaller_rate_warm_up_or_length(name: str, data: st.DataObject) -> None:
    batches = st.integers(1, SAMPLES.get(name, 1_281_167))
    low, high = sorted((data.draw(batches), data.draw(batches)))
    small, large = (read_values(scale(name, batch).config) for batch in (low, high))
    for what in ("speed", "momentum", "epochs", "warm-up"):
        assert small[what] <= large[what] * (1 + 1e-4)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.data())
def test_the_way_back_leads_to_the_recipe(name: str, data: st.DataObject) -> None:
    own = load_recipe(name)[1]
    batch = data.draw(st.integers(1, SAMPLES.get(name, 1_281_167)))
    there = scale(name, batch)
    back = scale_text(there.toml, own.train.global_batch, SAMPLES.get(name))
    for what, value in read_values(own).items():
        assert read_values(back.config)[what] == pytest.approx(value, rel=2e-3, abs=1e-9), what


def scale_text(toml: str, batch: int, samples: int | None) -> Scaled:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "there.toml"
        file.write_text(toml)
        return scale_recipe(str(file), batch, samples)


@pytest.mark.parametrize("name", NAMES)
def test_every_packaged_recipe_scales_and_says_why(name: str, tmp_path: Path) -> None:
    own = load_recipe(name)[1]
    for factor in (0.25, 1, 4):
        batch = int(own.train.global_batch * factor)
        scaled = scale_recipe(name, batch, SAMPLES.get(name))
        assert scaled.config.train.global_batch == batch
        assert all(len(item.why) > 5 for item in scaled.derived)
        assert tomllib.loads(scaled.toml)["train"]["global_batch"] == batch
        for line in scaled.toml.splitlines():
            assert len(line) <= 120 or not line.startswith("#")
        if factor == 1:
            assert scaled.config == own
        # What is not derived stays as it was.
        assert (scaled.config.data, scaled.config.model) == (own.data, own.model)
        assert scaled.config.precision == own.precision


def test_between_two_points_the_curve_is_straight_in_logarithms() -> None:
    lars = family_of("lars")
    spot = lars.read(math.sqrt(8192 * 13056))
    assert spot.lr == pytest.approx(math.sqrt(17.0 * 20.0))
    assert spot.warmup == pytest.approx(math.sqrt(5 * 9))
    assert spot.epochs == pytest.approx(math.sqrt(42 * 45))
    middle = lars.read(math.sqrt(35840 * 49152)).momentum
    assert middle is not None
    assert 1 - middle == pytest.approx(math.sqrt(0.06 * (1 - 0.951807)))
    assert not spot.untested


def test_what_leaves_the_published_range_says_so() -> None:
    found = {item.key: item for item in scale_recipe("resnet50-64k", 131_072).derived}
    assert found["optim.lr"].untested == "beyond the largest published batch, 67,840: untested"
    assert "1,624" in scale_recipe("resnet50-64k", 131_072).notes[-1]
    assert not any(item.untested for item in scale_recipe("resnet50-64k", 20_480).derived)
    assert "smallest published batch, 408" in scale_recipe("resnet50-64k", 100).toml


def test_other_data_is_scaled_by_steps_an_epoch() -> None:
    """2,560 samples of CIFAR-10 are as many steps an epoch as 65,597 of ImageNet."""
    lars = family_of("lars")
    scaled = scale_recipe("quickstart", 256, samples=1_281_167 * 128 // 40_000)
    here, there = lars.read(128 * 1_281_167 / 4099), lars.read(256 * 1_281_167 / 4099)
    assert here.momentum is not None
    assert there.momentum is not None
    speed = there.lr / (1 - there.momentum) / (here.lr / (1 - here.momentum))
    assert scaled.config.optim.lr == pytest.approx(1.0 * speed, rel=1e-5)
    assert scaled.config.optim.momentum == 0.9
    assert "No point is published for resnet18 on 4,099 samples" in scaled.notes[0]


def test_the_end_of_the_points_is_told_in_the_datas_own_batches() -> None:
    (lr,) = (item for item in scale_recipe("cifar10-resnet18", 2560).derived if item.key == "optim.lr")
    assert lr.after == pytest.approx(0.4 * math.sqrt(5), rel=1e-5)
    # 8,192 of 1,281,167 are as many steps an epoch as 319.7 of 50,000.
    assert lr.untested == "beyond the largest published batch, 8,192 on ImageNet, as 320 here: untested"


def test_a_recipe_off_the_points_keeps_what_it_has_tuned(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = scale_recipe("resnet50-64k", 65_536).toml
    file.write_text(text.replace("lr = 24.699", "lr = 12.3495"))
    scaled = scale_recipe(str(file), 8192)
    assert scaled.config.optim.lr == pytest.approx(8.5)
    assert scaled.derived[1].why.endswith("point at 8,192, × 0.5 as the recipe's at 65,536")


@pytest.mark.parametrize(("rule", "factor"), [("adamw", 2.0), ("lamb", 2.0), ("sgd", 4.0)])
def test_without_samples_the_batches_alone_decide(rule: str, factor: float, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        f'[data]\nsource = "folder"\npath = "mine"\n[optim]\nname = "{rule}"\nlr = 0.01\nwarmup = "100st"\n'
        '[train]\nglobal_batch = 64\nduration = "1000st"\neval_every = "40st"\n'
    )
    config = scale_recipe(str(file), 256).config
    assert config.optim.lr == pytest.approx(0.01 * factor)
    assert (str(config.train.duration), str(config.optim.warmup), str(config.train.eval_every)) == (
        "250st",
        "25st",
        "10st",
    )


def test_what_is_placed_within_a_run_follows_its_length(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = scale_recipe("resnet50-64k", 65_536).toml
    text = text.replace('schedule = "poly"\npower = 2.0\n', 'schedule = "step"\nmilestones = ["45ep", "80ep"]\n')
    text = text.replace("end_lr = 0.0001\n", "")
    file.write_text(
        text.replace(
            'path = "imagenet"',
            'path = "imagenet"\nimage_sizes = [{until = "1ep", size = 96}, {until = "40ep", size = 160}]',
        )
    )
    config = scale_recipe(str(file), 3200).config
    stretch = 35 / 85
    assert [each.value for each in config.optim.milestones] == pytest.approx([45 * stretch, 80 * stretch], rel=1e-3)
    assert [(str(step.until), step.size) for step in config.data.image_sizes] == [("1ep", 96), ("16ep", 160)]


def test_a_warm_up_never_takes_more_than_half_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = scale_recipe("resnet50-64k", 3200).toml
    warmup = next(line for line in text.splitlines() if line.startswith("warmup = "))
    file.write_text(text.replace(warmup, 'warmup = "12ep"'))
    config = scale_recipe(str(file), 65_536).config
    assert config.optim.warmup.value == pytest.approx(config.train.duration.value / 2, rel=1e-3)


def test_sets_are_known_by_their_folders_name() -> None:
    assert find_samples("/data/ImageNet-1k") == 1_281_167
    assert find_samples("data/imagenette2-160") == 9_469
    assert find_samples("flowers") is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quickstart", "--batch", "0"], "--batch 0 must be a whole number from 1 to 1,000,000,000."),
        (
            ["quickstart", "--batch", "5000"],
            "--batch 5000 is more than the 4,096 samples of an epoch; give a smaller one.",
        ),
        (["resnet50-8k", "--batch", "64", "--samples", "-1"], "--samples -1 must be a whole number from 1 to"),
        (["nothing", "--batch", "64"], "There is no recipe and no file nothing"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], sentence: str) -> None:
    name, _, batch, *rest = arguments
    with pytest.raises(LockstepError) as refused:
        scale_recipe(name, int(batch), int(rest[1]) if rest else None)
    assert str(refused.value).startswith(sentence)


def test_lars_on_unknown_data_asks_for_samples(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(scale_recipe("resnet50-64k", 65_536).toml.replace('"imagenet"', '"photos"'))
    with pytest.raises(
        LockstepError, match=r'^How many samples .* data\.path = "photos", and lars .*; give --samples\.$'
    ):
        scale_recipe(str(file), 8192)
    text = file.read_text().replace("norm_batch = 256\n", "")
    file.write_text(text.replace("[train]", "[train]\naccumulate = 9000"))
    with pytest.raises(
        LockstepError, match=r"^train\.accumulate = 9000 asks for more passes .*\(recipe mine at batch 8192\)\.$"
    ):
        scale_recipe(str(file), 8192, 1_281_167)


def test_the_command_writes_a_recipe_that_loads(tmp_path: Path) -> None:
    file = tmp_path / "scaled.toml"
    command = ["scale", "resnet50-64k", "--batch", "8192"]
    said = CliRunner().invoke(recipes, [*command, "--out", str(file)], env={"COLUMNS": "200"})
    assert said.exit_code == 0
    assert "from MLPerf v4.0's reference point at 8,192" in said.output
    assert load_recipe(str(file))[1] == scale_recipe("resnet50-64k", 8192).config
    assert CliRunner().invoke(recipes, [*command, "--toml"]).output == file.read_text()
    again = CliRunner().invoke(recipes, [*command, "--out", str(file)])
    assert "exists already" in str(again.exception)


def test_weights_are_averaged_over_as_many_samples() -> None:
    """0.99 kept at each of 16 steps of 512 is 0.99^16 at one of 8,192, and back."""
    config = scale_recipe("cifar10-resnet18", 8192).config
    assert load_recipe("cifar10-resnet18")[1].optim.average == 0.99
    assert config.optim.average == pytest.approx(0.99**16, abs=1e-6)
