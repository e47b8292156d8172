"""The commands that use a trained network, as a user types them: files, words and exit status."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.config import to_toml
from lockstep.engine.checkpoint import save_checkpoint
from lockstep.errors import LockstepError
from lockstep.events import Evaluated, read_events
from lockstep.recipes.read import load_recipe
from tests.engine import commands
from tests.engine.conftest import STRANGE, make_run, tiny_config
from tests.own import build_net

RUNNER = CliRunner()


def lockstep(*arguments: object) -> str:
    """What a command prints; its failure is raised."""
    result = RUNNER.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refuse(*arguments: object) -> str:
    """The sentence of a command that fails."""
    with pytest.raises(LockstepError) as caught:
        RUNNER.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return str(caught.value)


def test_predict_names_classes_and_writes_json_and_a_sheet(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    strange = named_images / "val" / STRANGE["ring"]
    told = lockstep(
        "predict", trained_run, named_images / "val" / "star", strange, "--top", 2,
        "--json", tmp_path / "p.json", "--html", tmp_path / "p.html",
    )  # fmt: skip
    lines = told.splitlines()
    assert len(lines) == 12  # ten images, two files
    assert "\x1b" not in told
    found = json.loads((tmp_path / "p.json").read_text())
    assert [Path(image["file"]).parent for image in found["images"]] == [named_images / "val" / "star"] * 5 + [
        strange
    ] * 5
    for line, image in zip(lines, found["images"], strict=False):
        best, second = image["top"]
        assert best["probability"] >= second["probability"]
        assert f"{100 * best['probability']:.1f} %, " in line
        assert found["class_names"][best["label"]] == best["class"]
    assert found["unreadable"] == []
    page = (tmp_path / "p.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 10
    assert "<b onclick" not in page


def test_predict_skips_broken_images_names_them_and_says_so_by_its_status(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    shutil.copytree(named_images / "val" / "star", tmp_path / "in" / "deep")
    (tmp_path / "in" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    status, out, err = commands.run("predict", str(trained_run), "in", "--json=p.json", cwd=tmp_path)
    assert status == 1
    assert "in/broken.png: could not be read (its header is damaged)" in out
    assert "1 of 6 images could not be read" in err
    assert "Traceback" not in err
    found = json.loads((tmp_path / "p.json").read_text())
    assert len(found["images"]) == 5
    assert found["unreadable"] == [{"file": "in/broken.png", "reason": "its header is damaged"}]


def test_evaluate_says_what_the_run_said_and_writes_every_pair(trained_run: Path, tmp_path: Path) -> None:
    told = lockstep("evaluate", trained_run, "--json", tmp_path / "e.json", "--ranks", 1)
    last = [event for event in read_events(trained_run) if isinstance(event, Evaluated)][-1]
    assert f"({last.correct1} of 50)" in told
    assert f"({last.correct5} of 50)" in told
    assert "Classes, the worst first" in told
    found = json.loads((tmp_path / "e.json").read_text())
    assert (found["correct1"], found["correct5"], found["total"]) == (last.correct1, last.correct5, 50)
    assert sum(pair["count"] for pair in found["confusion"]) == 50
    assert sum(one["correct"] for one in found["classes"]) == last.correct1
    assert {one["class"] for one in found["classes"]} == set(found["class_names"])


def test_evaluate_says_whether_it_looked_at_mirror_images(trained_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained_run, tmp_path / "run")
    assert "mirror" not in lockstep("evaluate", run, "--ranks", 1)
    recipe = (run / "config.toml").read_text()
    assert "eval_flip = false" in recipe
    (run / "config.toml").write_text(recipe.replace("eval_flip = false", "eval_flip = true"))
    assert ": 50 images, each with its mirror image\n" in lockstep("evaluate", run, "--ranks", 1)


def test_evaluate_on_some_of_the_classes_says_which_are_absent(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    shutil.copytree(named_images / "val" / "star", tmp_path / "star")
    told = lockstep("evaluate", trained_run, tmp_path, "--ranks", 1)
    assert "9 of the network's 10 classes have no image here: " in told
    assert f"on {tmp_path}: 5 images" in told


def test_what_is_left_out_or_serves_for_something_else_is_said(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    shutil.copytree(named_images / "val" / "star", tmp_path / "test" / "star")
    for name in ("a.heic", "b.avif", "c.txt"):
        (tmp_path / "test" / "star" / name).write_bytes(b"x")
    told = lockstep("evaluate", trained_run, tmp_path, "--ranks", 1, "--json", tmp_path / "e.json")
    assert "test/ serves as the validation split" in told
    assert "3 files in" in told
    assert len(json.loads((tmp_path / "e.json").read_text())["notes"]) == 2
    status, out, err = commands.run("predict", str(trained_run), "test", "--json=p.json", cwd=tmp_path)
    assert (status, len(out.splitlines())) == (0, 6)  # five images, one file
    assert err.startswith("lockstep: 3 of the files there are left out")
    assert all(f"1 {kind}" in err for kind in (".heic", ".avif", ".txt"))
    assert json.loads((tmp_path / "p.json").read_text())["notes"] == [err.strip().removeprefix("lockstep: ")]


def test_several_ranks_evaluate_a_set_that_has_to_be_packed_first(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    make_run(tmp_path / "run", tiny_config(images))
    (tmp_path / "set").mkdir()
    for split in ("train", "val"):
        labels = ["one", "two", "three"] * 4
        photos = [file.read_bytes() for file in sorted((images / split / "star").iterdir())[:3]] * 4
        columns = {"image": [{"bytes": photo, "path": None} for photo in photos], "label": labels}
        parquet.write_table(arrow.table(columns), tmp_path / "set" / f"{split}-0.parquet")
    status, out, err = commands.run("evaluate", "run", "set", "--ranks=2", cwd=tmp_path)
    assert status == 0, err
    assert "on set: 12 images" in out
    status, out, err = commands.run("evaluate", "run", "cache", "--ranks=2", cwd=tmp_path)
    assert status == 1
    assert err.count("The network knows no class of the name") == 1


def test_a_network_of_ones_own_is_found_from_anywhere_by_pythonpath(tmp_path: Path) -> None:
    """And not by itself: what a run's folder names is code, which may lie anywhere."""
    for name in ("nets", "elsewhere", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "nets" / "mynets.py").write_text("from tests.own import build_net\n")
    settings = ["model.name=mynets:build_net", "data.image_size=16", "data.eval_resize=16"]
    (tmp_path / "run" / "config.toml").write_text(to_toml(load_recipe("quickstart", settings)[1]))
    files = {"model": build_net(num_classes=2).state_dict()}
    save_checkpoint(tmp_path / "run" / "checkpoints", 1, files, {"classes": ["0", "1"]}, keep=1)
    asked = ("evaluate", "../run", "tests.own:open_pictures", "--ranks=1")
    status, _, err = commands.run(*asked, cwd=tmp_path / "elsewhere")
    assert status == 1
    assert "start from the folder that holds mynets" in err
    assert "add that folder to PYTHONPATH" in err
    places = os.pathsep.join((commands.MODULES["PYTHONPATH"], str(tmp_path / "nets")))
    status, out, err = commands.run(*asked, cwd=tmp_path / "elsewhere", PYTHONPATH=places)
    assert (status, err) == (0, "")
    assert "10 images" in out


def test_top5_of_few_classes_is_left_out_with_a_word(images: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for place, name in enumerate(("one", "two", "three")):
            source = images / split / ("bar", "star", "ring")[place]
            shutil.copytree(source, tmp_path / "data" / split / name)
    run = make_run(tmp_path / "run", tiny_config(tmp_path / "data"))
    told = lockstep("evaluate", run, "--json", tmp_path / "e.json", "--ranks", 1)
    assert "top-5  says nothing of 3 classes" in told
    found = json.loads((tmp_path / "e.json").read_text())
    assert "top5" not in found
    assert found["total"] == 15


def test_export_writes_weights_and_card_into_the_runs_folder(trained_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained_run, tmp_path / "run")
    told = lockstep("export", run)
    assert "export/model.safetensors" in told
    assert sorted(os.listdir(run / "export")) == ["model.md", "model.safetensors"]
    card = (run / "export" / "model.md").read_text()
    assert "after step 10" in card
    assert str(trained_run.parent) not in card
    lockstep("export", run / "checkpoints" / "step-00000009", "--out", tmp_path / "deep" / "w.bin", "--no-card")
    assert os.listdir(tmp_path / "deep") == ["w.bin"]


def test_mistakes_are_sentences(trained_run: Path, named_images: Path, tmp_path: Path) -> None:
    image = next((named_images / "val" / "star").iterdir())
    assert "is not a run's folder" in refuse("predict", tmp_path, image)
    assert "cannot be read (No such file" in refuse("predict", trained_run, tmp_path / "no.png")
    assert "holds no images" in refuse("predict", trained_run, tmp_path)
    assert "choose another file" in refuse("predict", trained_run, image, "--json", tmp_path)
    assert "choose another file" in refuse("predict", trained_run, image, "--html", tmp_path / "no" / "p.html")
    assert "There is no device" in refuse("predict", trained_run, image, "--device", "tpu9")
    assert "is not a run's folder" in refuse("evaluate", tmp_path, "--ranks", 1)
    assert "for each class" in refuse("evaluate", trained_run, tmp_path, "--ranks", 1)
    assert "There is no format 'tflite'" in refuse("export", trained_run, "--format", "tflite")
    for batch in ("0", "-1", "many", "1e9", "99999999999"):
        assert "--batch" in refuse("export", trained_run, "--format", "torch-export", f"--batch={batch}")
