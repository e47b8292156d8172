"""Each mistake a user can make, tried on the real program: one clear sentence, a non-zero exit, no traceback."""

import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lockstep import __version__
from lockstep.cli import app
from lockstep.data.generated import build_generated
from lockstep.data.index import read_index
from lockstep.data.pack import pack_folder
from lockstep.data.shards import open_shards
from lockstep.events import EpochDone, Notice, RunEnded, RunStarted
from tests.engine import commands
from tests.engine.conftest import tiny_settings


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_generated(tmp_path_factory.mktemp("cache"), 130, 50)


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    """A copy of the images to damage."""
    return Path(shutil.copytree(images, tmp_path / "images"))


def train(images: Path, out: Path, *more: str) -> tuple[int, str, str]:
    settings = [f"--set={setting}" for setting in [*tiny_settings(images), *more]]
    return commands.run("train", "quickstart", "--ranks=1", f"--out={out}", *settings)


def refuse(result: tuple[int, str, str]) -> str:
    """The one sentence of a refused command."""
    status, out, err = result
    assert status == 1, out + err
    assert "Traceback" not in out + err
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("lockstep: ")
    return lines[0]


def test_help_and_version_answer() -> None:
    assert "train" in commands.run("--help")[1]
    assert commands.run("--version")[1].strip() == __version__


def list_commands(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from list_commands(each, *words, name)
    yield words


def test_help_tells_arguments_in_capitals() -> None:
    for words in list_commands(typer.main.get_command(app)):
        told = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        usage = next(line for line in told.splitlines() if "Usage:" in line).split("[OPTIONS]")[1]
        assert usage == usage.upper(), words


def test_train_without_a_recipe_asks_for_one() -> None:
    status, out, err = commands.run("train")
    assert status == 2, out
    assert "Missing argument 'RECIPE'" in err
    assert "Traceback" not in err


def test_recipes_are_listed_shown_and_copied(tmp_path: Path) -> None:
    status, out, _ = commands.run("recipes")
    assert status == 0
    for name in ("quickstart", "resnet50-256", "resnet50-8k", "resnet50-64k", "alexnet-64k"):
        assert name in out
    _, text, _ = commands.run("recipes", "show", "resnet50-8k")
    assert text.startswith("# ")
    copy = tmp_path / "mine.toml"
    assert commands.run("recipes", "copy", "resnet50-8k", str(copy))[0] == 0
    assert copy.read_text() == text
    assert "already" in refuse(commands.run("recipes", "copy", "resnet50-8k", str(copy)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstrat"], ["quickstrat", "quickstart"]),
        (["quickstart", "--set=optim.momentun=0.95"], ["optim.momentun", "optim.momentum"]),
        (["quickstart", "--set=optim.lr=fast"], ["optim.lr", "fast"]),
        (["quickstart", "--set=data.eval_resize=20"], ["data.eval_resize", "data.image_size"]),
        (["quickstart", "--set=nonsense"], ["nonsense"]),
        (["quickstart", "--ranks=0"], ["--ranks 0"]),
        (["missing.toml"], ["missing.toml"]),
        (["resnet50-256"], ["data.path", "imagenet"]),
        (["quickstart", "--resume"], ["quickstart", "--resume"]),
        (["quickstart", "--ranks=200", "--set=train.global_batch=100"], ["train.global_batch", "200 ranks"]),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    sentence = refuse(commands.run("train", *arguments, cwd=tmp_path, LOCKSTEP_CACHE=str(tmp_path)))
    for word in words:
        assert word in sentence


def test_a_wrong_data_path_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refuse(train(tmp_path / "nowhere", tmp_path / "run"))


def test_an_empty_class_is_named(folder: Path, tmp_path: Path) -> None:
    for image in (folder / "train" / "star").iterdir():
        image.unlink()
    assert str(folder / "train" / "star") in refuse(train(folder, tmp_path / "run"))


def test_a_class_missing_from_validation_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder / "val" / "star")
    sentence = refuse(train(folder, tmp_path / "run"))
    assert "star" in sentence
    assert str(folder / "val") in sentence


def test_a_truncated_jpeg_is_replaced_and_named(folder: Path, tmp_path: Path) -> None:
    victim = min((folder / "train" / "ring").iterdir())
    victim.write_bytes(victim.read_bytes()[:200])
    run = tmp_path / "run"
    status, out, err = train(folder, run)
    assert status == 0, err
    assert "Traceback" not in out + err
    notices = [event for event in commands.events(run) if isinstance(event, Notice)]
    texts = [event.text for event in notices if event.level == "warning"]
    assert ["neighbour" in text for text in texts if str(victim) in text] == [True]
    assert [event.bad_samples for event in commands.events(run) if isinstance(event, EpochDone)] == [1, 1]


def test_too_many_unreadable_images_stop_the_run(folder: Path, tmp_path: Path) -> None:
    victims = sorted((folder / "train" / "ring").iterdir())[:5]
    for victim in victims:
        victim.write_bytes(b"not an image")
    sentence = refuse(train(folder, tmp_path / "run"))
    assert str(victims[0].parent) in sentence
    assert "data.bad_share" in sentence
    assert commands.summary(tmp_path / "run")["status"] == "failed"


def test_a_run_is_never_overwritten(images: Path, tmp_path: Path) -> None:
    assert train(images, tmp_path / "run", "train.duration=1st", "optim.warmup=0st")[0] == 0
    sentence = refuse(train(images, tmp_path / "run", "train.duration=1st", "optim.warmup=0st"))
    assert "already holds a run" in sentence


def test_a_finished_run_does_not_resume(images: Path, tmp_path: Path) -> None:
    assert train(images, tmp_path / "run", "train.duration=1st", "optim.warmup=0st")[0] == 0
    assert "is finished" in refuse(commands.run("train", str(tmp_path / "run"), "--resume", "--ranks=1"))
    longer = commands.run("train", str(tmp_path / "run"), "--resume", "--ranks=1", "--set=train.duration=2st")
    assert longer[0] == 0, longer


def test_one_command_starts_a_run_goes_on_with_it_and_leaves_a_finished_one_alone(images: Path, tmp_path: Path) -> None:
    """From a directory beside the images, whose path is given as seen from there."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "pictures").symlink_to(images)
    settings = [*tiny_settings(Path("pictures")), "train.duration=400ep", "train.eval_every=0st", "optim.warmup=0st"]
    command = ["train", "quickstart", "--ranks=1", "--out=my run", *[f"--set={setting}" for setting in settings]]
    process = commands.start(*command, "--resume=auto", cwd=work)
    commands.wait_for_step(work / "my run", 2, process)
    os.kill(process.pid, signal.SIGINT)
    status, out, _ = commands.finish(process)
    assert status == 130
    assert "go on with         lockstep train 'my run' --resume --ranks 1\n" in out
    ended = commands.events(work / "my run")[-1]
    assert isinstance(ended, RunEnded)
    assert "settings: train.duration was" in refuse(
        commands.run(*command, "--resume=auto", "--set=train.duration=9st", cwd=work)
    )
    assert "my run is a run's folder; add --resume" in refuse(commands.run("train", "my run", cwd=work))

    # Another directory: the run's folder alone knows where its images are, and what recipe it was.
    longer = f"--set=train.duration={ended.step + 1}st"
    status, out, err = commands.run("train", str(work / "my run"), "--resume", longer, "--ranks=1", cwd=tmp_path)
    assert status == 0, err
    assert f"1 step (step {ended.step + 1:,}, gone on from {ended.step:,})" in out
    names = [event.recipe for event in commands.events(work / "my run") if isinstance(event, RunStarted)]
    assert names == ["quickstart", "quickstart"]
    status, out, err = commands.run(*command, longer, "--resume=auto", cwd=work)
    assert (status, err) == (0, "")
    assert out.startswith("my run is finished, and nothing is left to do")


def test_a_run_killed_before_its_first_checkpoint_is_no_dead_end(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart-20260101-000000"
    settings = [*tiny_settings(images), "train.duration=1000st", "train.checkpoint_every=0st"]
    process = commands.start("train", "quickstart", "--ranks=1", f"--out={run}", *[f"--set={s}" for s in settings])
    commands.wait_for_step(run, 2, process)
    commands.kill_all(process)
    assert "add --resume" in refuse(train(images, run))
    short = ["--set=train.duration=3st", "--set=optim.warmup=0st"]
    status, out, err = commands.run("train", "quickstart", "--resume", "--ranks=1", *short, cwd=tmp_path)
    assert status == 0, err
    assert "has no checkpoint yet; starting it from step 0" in " ".join(out.split())
    assert commands.summary(run)["steps"] == 3


def test_a_diverging_run_says_what_to_change(images: Path, tmp_path: Path) -> None:
    sentence = refuse(train(images, tmp_path / "run", "optim.lr=1e30", "optim.warmup=0st"))
    assert "The loss became" in sentence
    assert "optim.lr" in sentence
    assert "start the run again." in sentence


def test_a_run_that_diverges_names_its_last_good_checkpoint(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(images, run, "train.duration=3st", "optim.warmup=0st")[0] == 0
    hot = [f"--set={setting}" for setting in ("train.duration=9st", "optim.lr=1e30", "train.log_every=1")]
    sentence = refuse(commands.run("train", str(run), "--resume", "--ranks=1", *hot))
    assert "The loss became" in sentence
    assert f"go on from the last good checkpoint, {run / 'checkpoints' / 'step-00000003'}, with --resume." in sentence


def test_a_run_without_its_configuration_is_no_dead_end(images: Path, tmp_path: Path) -> None:
    """The start and the resume say the same thing, and it helps."""
    run = tmp_path / "run"
    settings = ["train.duration=3st", "optim.warmup=0st"]
    assert train(images, run, *settings)[0] == 0
    config = (run / "config.toml").read_text()
    (run / "config.toml").unlink()
    resume = ["train", "quickstart", "--resume", "--ranks=1", f"--out={run}", "--set=train.duration=4st"]
    sentences = {refuse(train(images, run, *settings)), refuse(commands.run(*resume))}
    assert len(sentences) == 1
    assert "config.toml is missing; put that back and add --resume, or choose another --out." in sentences.pop()
    (run / "config.toml").write_text(config)
    status, _, err = commands.run(*resume)
    assert status == 0, err


def test_a_disk_that_takes_no_checkpoint_costs_the_checkpoint_and_not_the_run(images: Path, tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the write fails half-way with a real error."""
    run = tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        process = commands.start_new(
            "train", "quickstart", "--ranks=2", f"--out={run}", *[f"--set={s}" for s in tiny_settings(images)]
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    status, out, err = commands.finish(process)
    assert status == 1
    assert "Traceback" not in out + err
    assert f"could not be written to {run / 'checkpoints'}" in err
    warnings = [event for event in commands.events(run) if isinstance(event, Notice) and event.level == "warning"]
    assert sum("could not be written" in event.text for event in warnings) == 5  # steps 3, 6, 9 and the last, twice
    assert commands.summary(run)["steps"] == 10
    assert commands.summary(run)["status"] == "failed"
    assert [event.reason for event in commands.events(run) if isinstance(event, RunEnded)] == [warnings[-1].text]
    assert list((run / "checkpoints").iterdir()) == []


def test_control_c_on_one_rank_writes_a_checkpoint(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*tiny_settings(images), "train.duration=400ep", "train.checkpoint_every=0st"]
    process = commands.start("train", "quickstart", "--ranks=1", f"--out={run}", *[f"--set={s}" for s in settings])
    commands.wait_for_step(run, 2, process)
    os.kill(process.pid, signal.SIGINT)
    status, out, err = commands.finish(process)
    assert status == 130
    assert "Traceback" not in out + err
    ended = commands.events(run)[-1]
    assert isinstance(ended, RunEnded)
    assert ended.status == "interrupted"
    assert (run / "checkpoints" / f"step-{ended.step:08d}" / "manifest.json").exists()


def test_a_run_leaves_what_it_promises(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(images, run)[0] == 0
    files = {"config.toml", "events.jsonl", "summary.json", "report.html", "plan.toml", "profile.json"}
    assert {path.name for path in run.iterdir()} == {*files, "checkpoints", ".lock", ".identity"}
    summary = commands.summary(run)
    for key in ("top1", "top5", "images_per_second", "T", "S", "N", "e", "steps", "epochs", "world_size", "wall_s"):
        assert isinstance(summary[key], float | int), key
    assert summary["T"] == pytest.approx(summary["S"] * summary["N"] * summary["e"])  # type: ignore[operator]
    assert summary["ledger"]
    replay = commands.run("train", str(run / "config.toml"), "--ranks=1", f"--out={tmp_path / 'again'}")
    assert replay[0] == 0, replay
    first, second = commands.last_weights(run), commands.last_weights(tmp_path / "again")
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("command", ["train", "tune"])
def test_missing_data_is_one_sentence_before_any_rank_starts(command: str, tmp_path: Path) -> None:
    assert "data.path" in refuse(commands.run(command, "resnet50-256", "--ranks=2", cwd=tmp_path))


def test_what_every_rank_finds_wrong_is_said_once(images: Path, tmp_path: Path) -> None:
    overrides = [f"--set={setting}" for setting in tiny_settings(images)]
    more = ("--set=train.duration=3st", "--set=optim.warmup=2ep")
    status, out, err = commands.run("train", "quickstart", "--ranks=2", f"--out={tmp_path / 'run'}", *overrides, *more)
    assert (status, (out + err).count("is longer than the run of 3 steps")) == (1, 1), (out, err)


def test_a_folder_in_use_is_one_sentence_before_any_rank_starts(images: Path, tmp_path: Path) -> None:
    for name in ("events.jsonl", "config.toml"):
        (tmp_path / name).touch()
    settings = [f"--set={setting}" for setting in tiny_settings(images)]
    assert "already holds a run" in refuse(
        commands.run("train", "quickstart", "--ranks=2", f"--out={tmp_path}", *settings)
    )


def test_images_are_packed_verified_described_and_trained_on(images: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    status, out, err = commands.run("data", "pack", str(images), str(pack), "--shard-mb=0.1", "--workers=2")
    assert status == 0, err
    assert "Packing: 180/180 (100.0 %)" in out
    assert f"Packed 180 samples of 10 classes into {len(list(pack.glob('*.tar')))} shards" in out
    status, out, err = commands.run("data", "verify", str(pack), "--decode")
    assert (status, err) == (0, "")
    assert "All 180 samples" in out
    for path, words in ((pack, ["130", "50", "0.1 MB"]), (images, ["130", "50", "folder of images"])):
        status, out, err = commands.run("data", "info", str(path))
        assert (status, err) == (0, "")
        assert all(word in out for word in words), out
    status, out, err = train(pack, tmp_path / "run", "train.duration=1st", "optim.warmup=0st")
    assert status == 0, err


def test_damaged_samples_are_listed_and_counted(images: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    pack_folder(images, pack)
    tar = pack / "train-000000.tar"
    content = bytearray(tar.read_bytes())
    content[600] ^= 1
    tar.write_bytes(content)
    result = commands.run("data", "verify", str(pack))
    assert "1 of 180 samples" in refuse(result)
    number = read_index(pack / "train.index").numbers[0]
    damage = rf"train-000000\.tar  {number:08d}-\d+  sample {number}: its bytes do not match their checksum"
    assert re.search(damage, result[1])


def test_tar_files_of_others_get_an_index(images: Path, tmp_path: Path) -> None:
    pack_folder(images, tmp_path / "pack")
    for index in (tmp_path / "pack").glob("*.index"):
        index.unlink()
    status, out, err = commands.run("data", "index", str(tmp_path / "pack"), "--workers=1")
    assert status == 0, err
    assert "Found 180 samples" in out
    assert open_shards(tmp_path / "pack")[0].num_samples == 130


def test_a_wrong_pack_is_one_sentence(images: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear Sir")
    for source, target, words in (
        (tmp_path / "nowhere", tmp_path / "pack", "nowhere is not a folder"),
        (images, tmp_path / "mine", "is not empty and holds no packed shards"),
        (images, tmp_path / "mine" / "letter.txt", "letter.txt is not a folder"),
        (images, images / "pack", "lies inside"),
        (tmp_path / "mine", tmp_path / "pack", "no folder"),
    ):
        assert words in refuse(commands.run("data", "pack", str(source), str(target)))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert "holds no packed shards; give a folder that" in refuse(commands.run("data", "verify", str(images)))


def test_a_disk_that_is_full_while_packing_is_one_sentence_and_packing_goes_on_later(
    images: Path, tmp_path: Path
) -> None:
    arguments = ["data", "pack", str(images), str(tmp_path / "pack"), "--shard-mb=0.1", "--workers=2"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        process = commands.start_new(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written (File too large)" in refuse(commands.finish(process))
    assert commands.run(*arguments)[0] == 0


def test_a_pack_that_lost_a_shard_is_one_sentence_before_training(images: Path, tmp_path: Path) -> None:
    pack_folder(images, tmp_path / "pack")
    (tmp_path / "pack" / "val-000000.tar").unlink()
    assert "val-000000.tar cannot be read" in refuse(train(tmp_path / "pack", tmp_path / "run"))


def test_a_file_whose_name_is_no_text_is_printed(folder: Path, tmp_path: Path) -> None:
    image = next((folder / "val" / "ring").iterdir())
    image.rename(os.fsdecode(os.fsencode(image.parent) + b"/\xff.jpeg"))
    os.truncate(os.fsencode(image.parent) + b"/\xff.jpeg", 10)
    arguments = ["data", "pack", str(folder), str(tmp_path / "pack"), "--short-side=16", "--skip-bad", "--workers=1"]
    status, out, err = commands.run(*arguments, PYTHONIOENCODING="utf-8")
    assert (status, err) == (0, "")
    assert "left out: " in out
    assert "\\udcff.jpeg" in out


@pytest.mark.parametrize("words", [["--out", ""], ["--out="]])
def test_an_out_without_a_name_is_a_sentence_and_not_the_current_folder(tmp_path: Path, words: list[str]) -> None:
    status, _, err = commands.run("train", "quickstart", *words, cwd=tmp_path)
    assert (status, err) == (1, "lockstep: --out was given no name; name the run's folder, or leave --out away.\n")
    assert list(tmp_path.iterdir()) == []
