"""A training step fed from images beside the same step on data in memory."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lockstep.bench.feed import Wanted, measure_feed, run
from lockstep.bench.input import open_photos
from lockstep.bench.photos import Repeated, build_photos
from lockstep.comm.world import join_world
from lockstep.errors import LockstepError
from tests.engine import commands


def test_a_few_images_make_a_source_of_any_length(tmp_path: Path) -> None:
    few = open_photos(build_photos(tmp_path, 3), Console())
    many = Repeated(few, 3000)
    assert len(many.labels) == many.num_samples == 3000
    assert many.read(7) == few.read(1) != few.read(0)
    assert many.name(2999) == few.name(2)
    assert len(np.unique(many.labels)) == len(many.classes) == 1000


def test_both_sides_are_measured_and_the_share_is_theirs(tmp_path: Path) -> None:
    source = open_photos(build_photos(tmp_path, 4), Console())
    wanted = Wanted("resnet18", batch=2, image_size=32, seconds=0.4, threads=1)
    with join_world(None) as world:
        memory, fed = measure_feed(source, wanted, world)
    assert (memory.stage, fed.stage) == ("train in memory", "train")
    assert memory.images_per_second > 0 < fed.images_per_second
    assert fed.share == pytest.approx(fed.images_per_second / memory.images_per_second)
    assert fed.threads == 1


def test_a_network_it_does_not_know_is_a_sentence(tmp_path: Path) -> None:
    source = open_photos(build_photos(tmp_path, 1), Console())
    with pytest.raises(LockstepError, match="--train vgg is unknown; choose alexnet or resnet18"):
        run(source, Wanted("vgg", 2, 32, 0.1), Console())


def test_the_command_says_what_share_is_left(tmp_path: Path) -> None:
    photos = build_photos(tmp_path, 2)
    options = ("--train=resnet18", "--image-size=32", "--batch=2", "--threads=1", "--seconds=0.2", "--read-processes=0")
    status, out, err = commands.finish(commands.start("bench", "input", str(photos), *options))
    assert status == 0, err
    assert "% of the" in out


def test_no_time_at_all_is_still_one_step_each(tmp_path: Path) -> None:
    source = open_photos(build_photos(tmp_path, 2), Console())
    with join_world(None) as world:
        memory, fed = measure_feed(source, Wanted("resnet18", 2, 32, seconds=0.0, threads=1), world)
    assert memory.images_per_second > 0
    assert fed.images_per_second > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--train=resnet18", "--feed=100"), "give one of them"),
        (("--train=resnet18", "--rounds=3"), "With --train there are no rounds"),
        (("--seconds=10",), "--seconds goes with --train"),
        (("--read-processes=0",), "--read-processes goes with --train"),
    ],
)
def test_options_that_do_not_go_together_are_a_sentence(options: tuple[str, ...], words: str) -> None:
    status, _, err = commands.finish(commands.start("bench", "input", *options))
    assert status != 0
    assert words in err
    assert "Traceback" not in err
