"""How good a network is: the run's own counts again, and others counted by hand."""

import io
import json
import shutil
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lockstep.comm.world import World
from lockstep.data.pack import pack_folder
from lockstep.engine.inference import load_run, predict, world_of
from lockstep.engine.run import run_rank
from lockstep.engine.scoring import Score, open_scored, score
from lockstep.errors import LockstepError
from lockstep.events import Evaluated, Event, Sink, read_events
from lockstep.report.run import SilentSink
from tests.engine.conftest import NUM_VAL, make_run, tiny_config
from tests.ranks import run_ranks, world_of_one


def train(images: Path, folder: Path, *settings: str) -> Evaluated:
    """What a run of two steps last said of its accuracy."""
    heard: list[Event] = []

    class Ear(SilentSink):
        def emit(self, event: Event) -> None:
            heard.append(event)

    def open_sink(world: World, folder: Path) -> Sink:
        return Ear()

    config = tiny_config(images, "train.duration=2st", "optim.warmup=0st", *settings)
    run_rank(config, "tiny", folder, resume=False, membership=None, open_sink=open_sink)
    return [event for event in heard if isinstance(event, Evaluated)][-1]


def measure(run: Path, data: Any = None) -> Score:
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


@pytest.mark.parametrize(
    "setting",
    ["model.width=8", "model.freeze=['conv1', 'layer1']", "model={name = 'tests.engine.own_networks:Patches'}"],
    ids=["", "frozen", "own"],
)
def test_so_they_are_in_half_precision(images: Path, tmp_path: Path, setting: str) -> None:
    told = train(images, tmp_path, "precision.compute=bf16", setting)
    found = measure(tmp_path).accuracy
    assert (found.correct1, found.correct5, found.loss) == (told.correct1, told.correct5, told.loss)


def test_a_run_that_looks_at_mirror_images_is_measured_so_again(images: Path, tmp_path: Path) -> None:
    """Both its weights and their average."""
    told = train(images, tmp_path, "data.eval_flip=true", "optim.average=0.5")
    for average, counts in ((True, (told.average_correct1, told.average_loss)), (False, (told.correct1, told.loss))):
        trained = load_run(tmp_path, average=average)
        plain = replace(trained, config=trained.configure(eval_flip=False))
        found, other = (score(one, open_scored(one), world_of_one()) for one in (trained, plain))
        assert found is not None
        assert other is not None
        assert (found.accuracy.correct1, found.accuracy.loss) == counts
        assert found.accuracy.loss != other.accuracy.loss


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
    assert found.notes == (f"There is no val/ in {tmp_path}; test/ serves as the validation split.",)
    assert replace(found, notes=()) == measure(trained_run, tmp_path / "test")
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


def list_samples(folder: Path) -> list[tuple[str, bytes]]:
    """Class and bytes of every image below a folder of class folders."""
    return [(file.parent.name, file.read_bytes()) for file in sorted(folder.rglob("*.jpeg"))]


def write_tar(path: Path, samples: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, (name, data) in enumerate(samples):
            for suffix, content in (("cls", name.encode()), ("jpg", data)):
                member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def plain_run(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three classes whose names are words, and a cache of its own."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for split in ("train", "val"):
        for name, shape in (("one", "bar"), ("two", "star"), ("three", "ring")):
            shutil.copytree(images / split / shape, tmp_path / "data" / split / name)
    return make_run(tmp_path / "run", tiny_config(tmp_path / "data"))


def same_counts(found: Score, expected: Score) -> bool:
    """But for the order in which FP32 losses were added up."""
    return (found.classes, sorted(found.confusion)) == (expected.classes, sorted(expected.confusion))


def test_plain_tar_files_count_as_their_folder(plain_run: Path, tmp_path: Path) -> None:
    expected = measure(plain_run)
    assert expected.accuracy.total == 15
    data, wds = tmp_path / "data", tmp_path / "wds"
    write_tar(wds / "set-train-0.tar", list_samples(data / "train")[:4] + list_samples(data / "train")[-4:])
    write_tar(wds / "set-test-0.tar", list_samples(data / "val"))
    found = measure(plain_run, wds)
    assert same_counts(found, expected)
    assert any("its test files (set-test-0.tar, …) serve as the validation split" in note for note in found.notes)
    # Where nothing is for training, all of it is measured.
    write_tar(tmp_path / "alone" / "0.tar", list_samples(data / "val")[:10])
    write_tar(tmp_path / "alone" / "1.tar", list_samples(data / "val")[10:])
    assert same_counts(measure(plain_run, tmp_path / "alone"), expected)


def test_tar_files_beside_class_folders_are_not_the_data(plain_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "data" / "val", tmp_path / "alone")
    write_tar(tmp_path / "alone" / "all.tar", [("zebra", b"")])
    assert same_counts(measure(plain_run, tmp_path / "alone"), measure(plain_run))


def test_parquet_files_count_as_their_folder(plain_run: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set").mkdir()
    for split, name in (("train", "train-0.parquet"), ("val", "test-0.parquet")):
        samples = list_samples(tmp_path / "data" / split)
        columns = {
            "image": [{"bytes": data, "path": None} for _, data in samples],
            "label": [one for one, _ in samples],
        }
        parquet.write_table(arrow.table(columns), tmp_path / "set" / name)
    found = measure(plain_run, tmp_path / "set")
    assert same_counts(found, measure(plain_run))


@pytest.mark.parametrize("place", ["test", ""])
def test_a_folder_with_a_table_of_labels_counts_as_its_class_folders(
    plain_run: Path, tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "table" / place
    folder.mkdir(parents=True)
    rows = []
    for number, (name, data) in enumerate(list_samples(tmp_path / "data" / "val")):
        (folder / f"{number}.jpeg").write_bytes(data)
        rows.append(json.dumps({"file_name": f"{number}.jpeg", "label": name}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    found = measure(plain_run, tmp_path / "table")
    assert same_counts(found, measure(plain_run))
    assert "Labels come from the column label" in found.notes[0]


def test_what_was_split_off_is_what_is_measured_again(plain_run: Path, tmp_path: Path) -> None:
    """Also: what is left out is said."""
    config = load_run(plain_run).config
    data = config.data.model_copy(update={"path": str(tmp_path / "data" / "train"), "val_share": 0.4})
    (tmp_path / "data" / "train" / "one" / "a.heic").write_bytes(b"x")
    run = make_run(tmp_path / "split", config.model_copy(update={"data": data}))
    found = measure(run)
    assert 0 < found.accuracy.total < 39
    assert any("data.val_share = 0.4 keeps" in note for note in found.notes)
    assert any("1 .heic, such as one/a.heic" in note for note in found.notes)
    assert measure(run, tmp_path / "data" / "train") == found


def test_objects_are_measured_alone_in_pairs_by_functions_and_by_name(plain_run: Path, tmp_path: Path) -> None:
    expected = measure(plain_run)
    names = ("one", "two", "three")
    samples = [(data, names.index(name)) for name, data in list_samples(tmp_path / "data" / "val")]
    forms: tuple[Any, ...] = (samples, ([], samples), lambda: ([], samples), lambda: samples)
    for data in forms:
        assert same_counts(measure(plain_run, data), expected)
    two = [(Image.open(io.BytesIO(samples[0][0])), 0), samples[-1]]  # no pair of data sets
    assert measure(plain_run, two).accuracy.total == 2
    with pytest.raises(LockstepError, match=r"^data failed: ZeroDivisionError: division by zero"):
        measure(plain_run, lambda: 1 / 0)
    assert measure(plain_run, "tests.own:open_pictures").accuracy.total == 10
    with pytest.raises(LockstepError, match=r"Sample 0 of the validation data \(list\) has label 3"):
        measure(plain_run, [(samples[0][0], 3)])


def test_a_class_that_the_network_does_not_know_is_a_sentence(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    for name in ("star", "zebra", "yak"):
        shutil.copytree(named_images / "val" / "star", tmp_path / name)
    with pytest.raises(LockstepError, match=r"no class of the name yak, zebra \(2 of 3 in .*\)"):
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
