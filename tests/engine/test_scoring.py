"""How good a network is: the run's own counts again, and others counted by hand."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from lockstep.comm.world import World
from lockstep.data.pack import pack_folder
from lockstep.engine.inference import load_run, predict, world_of
from lockstep.engine.run import run_rank
from lockstep.engine.scoring import Score, open_scored, score
from lockstep.errors import LockstepError
from lockstep.events import Evaluated, Event, Sink, read_events
from lockstep.report.run import SilentSink
from tests.engine.conftest import NUM_VAL, tiny_config
from tests.ranks import run_ranks, world_of_one


def measure(run: Path, data: Path | None = None) -> Score:
    trained = load_run(run)
    result = score(trained, open_scored(trained, data), world_of(trained.device))
    assert result is not None
    return result


def test_the_counts_are_those_of_the_runs_last_evaluation(trained_run: Path) -> None:
    told = [event for event in read_events(trained_run) if isinstance(event, Evaluated)][-1]
    found = measure(trained_run)
    assert told.total == NUM_VAL
    assert (found.accuracy.correct1, found.accuracy.correct5) == (told.correct1, told.correct5)
    assert (found.accuracy.total, found.accuracy.loss) == (told.total, told.loss)
    assert found.unreadable == []


def test_so_they_are_in_half_precision(images: Path, tmp_path: Path) -> None:
    heard: list[Event] = []

    class Ear(SilentSink):
        def emit(self, event: Event) -> None:
            heard.append(event)

    def open_sink(world: World, folder: Path) -> Sink:
        return Ear()

    config = tiny_config(images, "precision.compute=bf16", "train.duration=5st", "optim.warmup=0st")
    run_rank(config, "tiny", tmp_path, resume=False, membership=None, open_sink=open_sink)
    told = [event for event in heard if isinstance(event, Evaluated)][-1]
    found = measure(tmp_path).accuracy
    assert (found.correct1, found.correct5, found.loss) == (told.correct1, told.correct5, told.loss)


def test_classes_and_confusion_add_up_to_what_each_image_is_taken_for(trained_run: Path, named_images: Path) -> None:
    found = measure(trained_run)
    files = sorted((named_images / "val").rglob("*.jpeg"))
    trained = load_run(trained_run)
    expected = Counter(
        (file.parent.name, answer.guesses[0].name)
        for file, answer in zip(files, predict(trained, files, top=1), strict=True)
    )
    names = trained.classes
    assert {(names[label], names[answer]): times for label, answer, times in found.confusion} == dict(expected)
    for place, (right, total) in enumerate(found.classes):
        assert right == expected[names[place], names[place]]
        assert total == sum(times for (name, _), times in expected.items() if name == names[place])
    assert sum(times for *_, times in found.mistakes) == NUM_VAL - found.accuracy.correct1


def test_another_folder_is_matched_by_names_also_with_fewer_classes(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    for name in ("triangle", "cross"):  # not in the network's order, and not its numbers
        shutil.copytree(named_images / "train" / name, tmp_path / "test" / name)
    found = measure(trained_run, tmp_path)
    assert found == measure(trained_run, tmp_path / "test")
    trained = load_run(trained_run)
    present = {trained.classes[place]: total for place, (_, total) in enumerate(found.classes) if total}
    assert present == {"cross": 13, "triangle": 13}
    files = sorted((tmp_path / "test").rglob("*.jpeg"))
    right = sum(
        answer.guesses[0].name == file.parent.name for file, answer in zip(files, predict(trained, files), strict=True)
    )
    assert (found.accuracy.correct1, found.accuracy.total) == (right, 26)


def test_a_pack_counts_as_its_folder(trained_run: Path, named_images: Path, tmp_path: Path) -> None:
    pack_folder(named_images, tmp_path / "pack", shard_mb=0.05, workers=1)
    assert measure(trained_run, tmp_path / "pack") == measure(trained_run)


def test_a_class_that_the_network_does_not_know_is_a_sentence(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    for name in ("star", "zebra", "yak"):
        shutil.copytree(named_images / "val" / "star", tmp_path / name)
    with pytest.raises(LockstepError, match=r"2 of the 3 classes of .* are none that the network knows: yak, zebra"):
        measure(trained_run, tmp_path)
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "star" / "nothing"):
        with pytest.raises(LockstepError, match="name a folder that holds one of images for each class"):
            measure(trained_run, place)


def test_unreadable_images_are_named_and_left_out(trained_run: Path, named_images: Path, tmp_path: Path) -> None:
    shutil.copytree(named_images / "val" / "star", tmp_path / "star")
    (tmp_path / "star" / "a.jpeg").write_bytes(b"\xff\xd8\xff no image")
    found = measure(trained_run, tmp_path)
    assert found.accuracy.total == 5
    assert len(found.unreadable) == 1
    assert "a.jpeg" in found.unreadable[0]


def measure_as_rank(world: World, run: Path) -> Score | None:
    trained = load_run(run)
    return score(trained, open_scored(trained), world)


def test_any_number_of_ranks_comes_to_the_same(trained_run: Path) -> None:
    expected = measure_as_rank(world_of_one(), trained_run)
    first, *others = run_ranks(measure_as_rank, 3, trained_run)
    assert others == [None, None]
    assert first is not None
    assert expected is not None
    assert (first.classes, first.confusion) == (expected.classes, expected.confusion)
    assert first.accuracy.correct5 == expected.accuracy.correct5
