"""Whether recipe and data fit: one sentence for each thing that is unwise, with the setting to change, and no other."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.comm.world import World
from lockstep.engine.build import Sources
from lockstep.engine.fit import describe_fit
from lockstep.engine.run import share_sources
from lockstep.events import Notice
from lockstep.recipes.read import load_recipe
from tests.data.pictures import Pictures, encode, picture
from tests.engine import commands
from tests.engine.conftest import tiny_config, tiny_settings
from tests.ranks import run_ranks


class Many(Pictures):
    """So many pictures of one size, all alike."""

    def __init__(self, count: int, side: int) -> None:
        super().__init__([encode(picture(side, side + 4))])
        self.num_samples, self.classes = count, ("ant", "bee")
        self.labels = np.arange(count) % 2

    def read(self, index: int) -> bytes:
        return super().read(0)

    def fingerprint(self) -> dict[str, str]:
        return {}


def judge(recipe: str, count: int, side: int, *settings: str) -> list[str]:
    source = Many(count, side)
    config = load_recipe(recipe, ["data.source=folder", "data.path=x", *settings])[1]
    return [notice.text for notice in describe_fit(config, Sources(source, source))]


def test_images_enlarged_many_times_name_size_and_stem() -> None:
    (text,) = judge("resnet50-256", 60_000, 32)
    assert "short sides of about 32 pixels and are enlarged 7 times to data.image_size = 224" in text
    assert 'Set data.image_size = 32, data.eval_resize = 32 and model.stem = "cifar"' in text


def test_the_settings_named_are_taken_and_nothing_is_left_to_say() -> None:
    wanted = ("data.image_size=32", "data.eval_resize=32", "model.stem=cifar")
    assert judge("resnet50-256", 60_000, 32, *wanted) == []


def test_small_images_under_the_first_layers_for_large_ones() -> None:
    (text,) = judge("resnet50-256", 60_000, 32, "data.image_size=32", "data.eval_resize=32")
    assert text.endswith('Set model.stem = "cifar".')


def test_photographs_of_the_usual_size_are_not_mentioned() -> None:
    assert judge("resnet50-256", 1_281_167, 375) == []
    assert judge("resnet50-256", 1_281_167, 160) == []


def test_a_batch_larger_than_the_data_set_names_a_smaller_one() -> None:
    (text,) = judge("resnet50-64k", 60_000, 300)
    assert "train.global_batch = 65,536 is larger than the data set: each step takes all 60,000 samples" in text
    assert "Set train.global_batch to 256 or less" in text


@pytest.mark.parametrize(("count", "batch"), [(9_000, 256), (2_000, 32), (300, 16), (77, 8), (40, 4), (16, 2)])
def test_a_recipe_for_imagenet_on_few_images_names_what_to_change(count: int, batch: int) -> None:
    (text,) = judge("resnet50-256", count, 300, f"train.global_batch={batch}")
    assert f"{count:,} images are few for resnet50 and a schedule made for ImageNet's 1,281,167" in text
    assert "model.weights" in text
    assert f"train.global_batch of {batch} or less" in text


def test_an_epoch_of_two_steps_is_mentioned() -> None:
    texts = judge("resnet50-8k", 9_000, 300)
    assert "An epoch of 9,000 samples is only 2 steps at train.global_batch = 8,192" in texts[0]
    assert len(texts) == 2


def test_classes_without_samples_are_named() -> None:
    source = Many(60_000, 300)
    source.classes = ("ant", "bee", "cow")  # type: ignore[assignment]
    config = load_recipe("resnet50-256", ["data.source=folder", "data.path=x"])[1]
    texts = [notice.text for notice in describe_fit(config, Sources(source, source))]
    assert texts == [f"1 of 3 classes have no {what} sample: cow." for what in ("training", "validation")]


def test_a_single_class_is_mentioned() -> None:
    source = Many(60_000, 40)
    source.classes, source.labels = ("ant",), np.zeros(60_000, np.int64)
    config = load_recipe("cifar10-resnet18", ["data.source=folder", "data.path=x"])[1]
    (notice,) = describe_fit(config, Sources(source, source))
    assert "There is one class alone, ant, so that every answer is right." in notice.text


def test_the_quickstart_has_nothing_to_say(tmp_path: Path) -> None:
    config = load_recipe("quickstart", [])[1]
    source = Many(config.data.train_images, 64)
    assert describe_fit(config, Sources(source, source)) == []


def test_a_run_says_it_once_behind_its_first_record(images: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(images / "train")
    (tmp_path / "data" / "test").symlink_to(images / "val")
    settings = [f"--set={setting}" for setting in tiny_settings(tmp_path / "data")]
    status, out, err = commands.run(
        "train", "quickstart", "--ranks=2", f"--out={tmp_path / 'run'}", *settings, "--set=train.duration=1st",
        "--set=optim.warmup=0st", "--set=train.global_batch=200",
    )  # fmt: skip
    assert status == 0, out + err
    events = commands.events(tmp_path / "run")
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert type(events[0]).__name__ == "RunStarted"
    assert sum("test/ serves as the validation split" in text for text in texts) == 1
    assert sum("train.global_batch = 200 is larger than the data set" in text for text in texts) == 1


def list_split(world: World, path: Path) -> tuple[list[str], list[str]]:
    sources = share_sources(tiny_config(path, "data.val_share=0.2"), world, None)
    return tuple([part.name(n) for n in range(part.num_samples)] for part in (sources.train, sources.val))  # type: ignore[return-value]


def test_two_ranks_share_a_split_off_part(images: Path) -> None:
    """Also of a folder of classes alone, whatever its name is."""
    for path in (images, images / "train"):
        (train, val), other = run_ranks(list_split, 2, path)
        assert (train, val) == tuple(other)
        assert not set(train) & set(val)
        assert {Path(name) for name in train + val} == set((images / "train").rglob("*.jpeg"))
