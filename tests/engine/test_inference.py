"""A trained network, loaded from its run: by name, as it was evaluated, and nothing that is not as it was written."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from lockstep.config import to_toml
from lockstep.engine import checkpoint
from lockstep.engine.build import build_network
from lockstep.engine.checkpoint import list_checkpoints, read_checkpoint, save_checkpoint
from lockstep.engine.inference import Prediction, choose_device, load_run, predict
from lockstep.engine.run import run_rank
from lockstep.errors import LockstepError
from lockstep.events import RunStarted, read_events
from lockstep.recipe_values import Duration
from lockstep.report.run import SilentSink
from tests.engine.conftest import STRANGE


@pytest.fixture
def copied(trained_run: Path, tmp_path: Path) -> Path:
    """A run to damage."""
    return Path(shutil.copytree(trained_run, tmp_path / "copied"))


def look_by_hand(run: Path, file: Path) -> torch.Tensor:
    """Probabilities by Pillow, NumPy in FP64 and a network whose weights were loaded by PyTorch."""
    return torch.softmax(answer_by_hand(run, Image.open(file).convert("RGB")), dim=1)[0]


def answer_by_hand(run: Path, image: Image.Image) -> torch.Tensor:
    """The logits of one image."""
    side = min(image.size) * 32 / 36
    left, top = (image.width - side) / 2, (image.height - side) / 2
    image = image.resize((32, 32), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    pixels = (np.asarray(image, np.float64) / 255 - 0.5) / 0.25
    config = load_run(run).config
    network = build_network(config, 10).double().eval()
    network.load_state_dict(load_file(list_checkpoints(run / "checkpoints")[0] / "model.safetensors"))
    with torch.no_grad():
        logits: torch.Tensor = network(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    return logits


def test_an_image_gets_the_probabilities_worked_out_by_hand(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    source = next((named_images / "val" / "star").iterdir())
    Image.open(source).resize((57, 41)).save(tmp_path / "star.png")  # which every decoder reads alike
    expected = look_by_hand(trained_run, tmp_path / "star.png")
    trained = load_run(trained_run)
    (answer,) = predict(trained, [tmp_path / "star.png"], top=10)
    chances = [guess.probability for guess in answer.guesses]
    assert chances == sorted(chances, reverse=True)
    for guess in answer.guesses:
        assert guess.probability == pytest.approx(float(expected[guess.label]), abs=1e-5)
        assert trained.classes[guess.label] == guess.name
    assert {guess.name for guess in answer.guesses} >= set(STRANGE.values())


def test_with_its_mirror_image_an_image_gets_the_mean_of_both_logits(
    copied: Path, named_images: Path, tmp_path: Path
) -> None:
    config = load_run(copied).config
    mirrored = config.model_copy(update={"data": config.data.model_copy(update={"eval_flip": True})})
    (copied / "config.toml").write_text(to_toml(mirrored))
    image = Image.open(next((named_images / "val" / "star").iterdir())).convert("RGB").resize((57, 41))
    image.save(tmp_path / "star.png")
    sides = [answer_by_hand(copied, image), answer_by_hand(copied, ImageOps.mirror(image))]
    assert not torch.allclose(*sides, atol=1e-3)
    expected = torch.softmax((sides[0] + sides[1]) / 2, dim=1)[0]
    (answer,) = predict(load_run(copied), [tmp_path / "star.png"], top=10)
    assert len(answer.guesses) == 10
    for guess in answer.guesses:
        assert guess.probability == pytest.approx(float(expected[guess.label]), abs=1e-5)


def test_names_lie_in_every_checkpoint_and_in_the_records(trained_run: Path, named_images: Path) -> None:
    expected = sorted(folder.name for folder in (named_images / "val").iterdir())
    for path in list_checkpoints(trained_run / "checkpoints"):
        assert json.loads((path / "manifest.json").read_text())["state"]["classes"] == expected
    start = next(event for event in read_events(trained_run) if isinstance(event, RunStarted))
    assert start.class_names == expected
    assert list(load_run(trained_run).classes) == expected


def test_names_survive_a_resume(copied: Path) -> None:
    names, config = load_run(copied).classes, load_run(copied).config
    longer = config.model_copy(update={"train": config.train.model_copy(update={"duration": Duration(11, "st")})})
    run_rank(longer, "tiny", copied, resume=True, membership=None, open_sink=lambda world, folder: SilentSink())
    trained = load_run(copied)
    assert (trained.step, trained.classes) == (11, names)
    assert read_checkpoint(trained.checkpoint).state["classes"] == list(names)


def test_a_run_that_left_no_names_with_its_weights_has_them_in_its_records(copied: Path) -> None:
    names = load_run(copied).classes
    newest = list_checkpoints(copied / "checkpoints")[0]
    held = read_checkpoint(newest)
    state = {key: value for key, value in held.state.items() if key != "classes"}
    save_checkpoint(newest.parent, 10, held.files, state, keep=1)
    assert load_run(copied).classes == names


def test_files_bytes_and_what_is_broken_come_back_in_order(
    trained_run: Path, named_images: Path, tmp_path: Path
) -> None:
    good = sorted((named_images / "val" / "cross").iterdir())[:2]
    broken = tmp_path / "broken.jpeg"
    broken.write_bytes(good[0].read_bytes()[:40])
    given = [good[0], broken, good[1].read_bytes(), tmp_path / "missing.png", b"no image", good[1]]
    heard: list[tuple[int, int]] = []
    answers = predict(load_run(trained_run), given, top=3, progress=lambda done, total: heard.append((done, total)))
    assert [answer.name for answer in answers] == [
        str(good[0]),
        str(broken),
        "image 2",
        str(tmp_path / "missing.png"),
        "image 4",
        str(good[1]),
    ]
    assert [bool(answer.failure) for answer in answers] == [False, True, False, True, True, False]
    assert [len(answer.guesses) for answer in answers] == [3, 0, 3, 0, 0, 3]
    assert answers[2].guesses == answers[5].guesses
    assert answers[3].failure == "No such file or directory"
    assert heard[-1] == (6, 6)
    assert predict(load_run(trained_run), []) == []


def test_many_images_in_batches_are_answered_as_each_alone(trained_run: Path, named_images: Path) -> None:
    files = sorted((named_images / "train").rglob("*.jpeg"))
    assert len(files) == 130  # more than a batch
    trained = load_run(trained_run)
    together = predict(trained, files, top=1)
    for place in (0, 64, 129):
        (alone,) = predict(trained, [files[place]], top=1)
        assert alone.guesses[0].label == together[place].guesses[0].label
        assert alone.guesses[0].probability == pytest.approx(together[place].guesses[0].probability, abs=1e-6)


def test_it_works_from_any_directory_and_on_a_checkpoint(
    trained_run: Path, named_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = next((named_images / "val" / "star").iterdir())

    def ask(path: str | Path) -> list[Prediction]:
        return predict(load_run(path), [image])

    expected = ask(trained_run)
    monkeypatch.chdir(trained_run.parent)
    assert ask(trained_run.name) == expected
    monkeypatch.chdir(trained_run / "checkpoints" / "step-00000010")
    assert ask(".") == expected
    assert ask("../step-00000009") != expected
    assert load_run("../step-00000009").step == 9
    # A folder that has the name of a packaged recipe is still the run.
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_run, "quickstart")
    assert ask("quickstart") == expected


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ('[execution]\nkernels = "own"', True),
        ('[execution]\nkernels = "torch"', False),
        ("[execution", False),
        ("", False),
    ],
)
def test_a_run_with_own_kernels_is_asked_as_it_was_evaluated(copied: Path, plan: str, expected: bool) -> None:
    (copied / "plan.toml").write_text(plan)
    assert load_run(copied).network.fused is expected


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_a_gpu_answers_as_the_cpu_does(copied: Path, named_images: Path, compute: Any) -> None:
    files = sorted((named_images / "val").rglob("*.jpeg"))
    expected = predict(load_run(copied, device="cpu", compute="fp32"), files, top=10)
    for one, other in zip(
        predict(load_run(copied, device="cuda", compute=compute), files, top=10), expected, strict=True
    ):
        chances = {guess.label: guess.probability for guess in other.guesses}
        for guess in one.guesses:
            # A CPU rounds a resized image to whole levels, as Pillow does; a GPU does not.
            assert guess.probability == pytest.approx(chances[guess.label], abs=1e-3 if compute == "fp32" else 1e-2)


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_half_precision_computes_in_the_runs_format_but_fp16_on_a_cpu_in_fp32(copied: Path, compute: str) -> None:
    config = load_run(copied).config
    half = config.model_copy(update={"precision": config.precision.model_copy(update={"compute": compute})})
    (copied / "config.toml").write_text(to_toml(half))
    trained = load_run(copied, device="cpu")
    assert trained.config.precision.compute == compute
    assert trained.compute == ("fp32" if compute == "fp16" else "bf16")
    assert load_run(copied, device="cpu", compute="fp16").dtype == torch.float16


def test_a_damaged_checkpoint_is_passed_over_and_said(copied: Path) -> None:
    newest = list_checkpoints(copied / "checkpoints")[0]
    model = newest / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-4] + b"\0\0\0\1")
    heard: list[str] = []
    assert load_run(copied, warn=heard.append).step == 9
    assert "step-00000010 is damaged" in heard[0]
    with pytest.raises(LockstepError, match=r"step-00000010 is damaged \(model.safetensors does not match its hash\)"):
        load_run(newest)


def test_the_optimiser_is_not_read(copied: Path) -> None:
    (list_checkpoints(copied / "checkpoints")[0] / "optimizer.safetensors").unlink()
    assert load_run(copied).step == 10


def test_a_network_that_is_not_the_configured_one_is_refused(copied: Path) -> None:
    text = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(text.replace("width = 8", "width = 16"))
    with pytest.raises(LockstepError, match=r"does not fit the run's config\.toml"):
        load_run(copied)


def test_a_forged_number_of_classes_builds_nothing(copied: Path) -> None:
    newest = list_checkpoints(copied / "checkpoints")[0]
    held = read_checkpoint(newest)
    many = [f"class {place}" for place in range(200_000)]
    for names, words in ((many, "does not tell 200,000 classes apart"), (["a"], r"fc\.\w+ is .* of another shape")):
        save_checkpoint(newest.parent, 10, held.files, held.state | {"classes": names}, keep=1)
        with pytest.raises(LockstepError, match=words):
            load_run(newest)
    for wrong in (["a", "a"], ["a", ""], [1], "ab", {"a": 1}):
        save_checkpoint(newest.parent, 10, held.files, held.state | {"classes": wrong}, keep=1)
        with pytest.raises(LockstepError, match="nothing possible of classes"):
            load_run(newest)


def test_what_is_no_run_is_a_sentence(trained_run: Path, tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="does not exist; name a run's folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(LockstepError, match="is not a run's folder"):
        load_run(trained_run / "checkpoints")
    shutil.copy(trained_run / "config.toml", tmp_path)
    with pytest.raises(LockstepError, match="has no checkpoint yet"):
        load_run(tmp_path)
    lost = shutil.copytree(trained_run / "checkpoints" / "step-00000010", tmp_path / "lost" / "a" / "step-00000010")
    with pytest.raises(LockstepError, match="lies in no run's folder"):
        load_run(lost)
    for device in ("tpu9", "meta", "cuda:99"):
        with pytest.raises(LockstepError, match=r"device|cpu"):
            choose_device(device)


def test_arrays_of_another_program_are_refused(copied: Path) -> None:
    newest = list_checkpoints(copied / "checkpoints")[0]
    held = read_checkpoint(newest)
    arrays = dict(held.files["model"])
    arrays["conv1.weight"] = arrays["conv1.weight"][:4]
    save_checkpoint(newest.parent, 10, {**held.files, "model": arrays}, held.state, keep=1)
    with pytest.raises(LockstepError, match=r"conv1.weight is missing, unknown or of another shape"):
        load_run(newest)
    save_file({"a": torch.zeros(1)}, newest / "model.safetensors")
    (newest / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    with pytest.raises(LockstepError, match="is damaged"):
        load_run(newest)


def test_a_manifest_with_many_names_is_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand long names are more than the megabyte that once was the limit."""
    newest = list_checkpoints(copied / "checkpoints")[0]
    held = read_checkpoint(newest)
    names = [f"{place} {'x' * 80}" for place in range(20_000)]
    save_checkpoint(newest.parent, 10, held.files, held.state | {"classes": names}, keep=1)
    assert read_checkpoint(newest).state["classes"] == names
    assert (newest / checkpoint.MANIFEST).stat().st_size > 1 << 20
