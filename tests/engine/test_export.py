"""A network for other programs: read back by them, with its own logits, or not written at all."""

import contextlib
import importlib.util
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.config import to_toml
from lockstep.engine import export as module
from lockstep.engine.build import build_network
from lockstep.engine.export import TOLERANCE, export, hide_places, parse_formats
from lockstep.engine.inference import TrainedNetwork, load_run, predict
from lockstep.errors import LockstepError
from lockstep.events import read_events
from lockstep.recipes.read import load_recipe
from lockstep.report.model_card import Subject, build_card
from tests.engine.conftest import make_run, tiny_config

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def load(run: Path) -> TrainedNetwork:
    return load_run(run, device="cpu", compute="fp32")


def write_card(run: Path, folder: Path, files: dict[str, str]) -> str:
    trained = load_run(run)
    subject = Subject(run.name, trained.step, trained.classes, trained.config, "1.2.3", files)
    text = build_card(subject, read_events(run) if (run / "events.jsonl").exists() else [])
    (folder / "model.md").write_text(text)
    return text


def follow_card(card: str, folder: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What each block of the card's code says of an image, run as it stands in the folder of the files."""
    Image.open(image).resize((57, 41)).save(folder / "image.jpeg", "PNG")  # which every decoder reads alike
    monkeypatch.chdir(folder)
    reading, *blocks = CODE.findall(card)
    answers = []
    for block in blocks:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(reading + block, "card", "exec"), {"__name__": "card"})
        pairs = (line.rpartition(": ") for line in said.getvalue().splitlines())
        answers.append({name: float(chance.removesuffix(" %")) / 100 for name, _, chance in pairs})
    return answers


def agree(answers: list[dict[str, float]], trained: TrainedNetwork, image: Path) -> bool:
    (expected,) = predict(trained, [image])
    return all(
        list(answer) == [guess.name for guess in expected.guesses]
        and np.allclose(list(answer.values()), [guess.probability for guess in expected.guesses], atol=6e-4)
        for answer in answers
    )


def test_weights_and_program_come_back_and_the_cards_code_uses_them(
    trained_run: Path, named_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = export(load(trained_run), "safetensors", tmp_path / "model.safetensors")
    program = export(load(trained_run), "torch-export", tmp_path / "model.pt2")
    assert weights.num_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert program.difference <= TOLERANCE
    saved = load_file(trained_run / "checkpoints" / "step-00000010" / "model.safetensors")
    arrays = load_file(tmp_path / "model.safetensors")
    assert arrays.keys() == saved.keys()
    assert all(torch.equal(arrays[name], saved[name]) for name in saved)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        facts = opened.metadata()
    assert tuple(json.loads(facts["classes"])) == load(trained_run).classes
    assert (json.loads(facts["mean"]), facts["image_size"], facts["step"]) == ([0.5, 0.5, 0.5], "32", "10")
    assert str(named_images.parent) not in facts["recipe"]
    assert 'path = "shapes"' in facts["recipe"]

    card = write_card(trained_run, tmp_path, {"model.safetensors": "safetensors", "model.pt2": "torch-export"})
    image = next((named_images / "val" / "star").iterdir())
    answers = follow_card(card, tmp_path, image, monkeypatch)
    assert len(answers) == 2
    assert agree(answers, load(trained_run), tmp_path / "image.jpeg")


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnx and onnxruntime")
def test_onnx_gives_the_networks_logits_for_any_batch(
    trained_run: Path, named_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx
    import onnxruntime

    written = export(load(trained_run), "onnx", tmp_path / "model.onnx")
    assert written.difference <= TOLERANCE
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    network = build_network(load(trained_run).config, 10).double().eval()
    network.load_state_dict(load_file(trained_run / "checkpoints" / "step-00000010" / "model.safetensors"))
    images = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        expected = network(images.double()).numpy()
    (found,) = session.run(["logits"], {"images": images.numpy()})
    assert np.abs(found - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max())

    card = write_card(trained_run, tmp_path, {"model.onnx": "onnx"})
    image = next((named_images / "val" / "star").iterdir())
    answers = follow_card(card, tmp_path, image, monkeypatch)
    assert agree(answers, load(trained_run), tmp_path / "image.jpeg")


def test_a_fixed_batch_is_that_batch(trained_run: Path, tmp_path: Path) -> None:
    export(load(trained_run), "torch-export", tmp_path / "model.pt2", 4)
    back = torch.export.load(tmp_path / "model.pt2").module()
    assert back(torch.zeros(4, 3, 32, 32)).shape == (4, 10)
    with pytest.raises((AssertionError, RuntimeError)):
        back(torch.zeros(3, 3, 32, 32))


def test_what_gives_other_logits_is_an_error_and_leaves_no_file(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spoiled:
        def module(self) -> Any:
            return lambda images: trained.network(images) + 0.01

    trained = load(trained_run)
    monkeypatch.setattr(module.torch.export, "load", lambda file: Spoiled())
    with pytest.raises(LockstepError, match=r"gives other logits than the network: by .* nothing was written"):
        export(trained, "torch-export", tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "spoil",
    [lambda logits: logits * torch.nan, lambda logits: [1.0], lambda logits: logits[:1], lambda logits: -logits],
)
def test_logits_that_are_none_or_not_of_each_image_are_no_agreement(spoil: Callable[[Tensor], Any]) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    assert module._compare(network, lambda images: network(images) + 5e-5, 2, None, "it") <= TOLERANCE
    with pytest.raises(LockstepError, match="logits"):
        module._compare(network, lambda images: spoil(network(images)), 2, None, "it")


def test_a_network_that_no_format_has_words_for_is_a_sentence(trained_run: Path, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1)[:, : int(images.abs().sum().item()) % 7 + 2]

    trained = load(trained_run)
    odd = TrainedNetwork(**{**vars(trained), "network": Odd()})
    for batch, advice in ((None, r"give a batch of a fixed size \(batch\), or choose"), (2, r"\); choose")):
        sentence = rf"cannot be written as torch-export \(.*{advice} another format\.$"
        with pytest.raises(LockstepError, match=sentence):
            export(odd, "torch-export", tmp_path / "model.pt2", batch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnx and onnxruntime")
def test_the_reason_is_the_networks_and_not_the_exporters(trained_run: Path, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise ValueError("no day for this")

    odd = TrainedNetwork(**{**vars(load(trained_run)), "network": Odd()})
    with pytest.raises(LockstepError, match=r"cannot be written as onnx \(no day for this\); "):
        export(odd, "onnx", tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("weights", "told"),
    [("/home/somebody/nets/resnet.pth", "resnet.pth"), ("timm:hf_hub:org/net", "timm:hf_hub:org/net"), ("", "")],
)
def test_where_things_lay_is_nobodys_business(weights: str, told: str) -> None:
    _, config = load_recipe(
        "quickstart", [f"model.weights={weights}", "data.source=folder", "data.path=/home/somebody/images"]
    )
    hidden = hide_places(config)
    assert hidden.model.weights == told
    assert "somebody" not in to_toml(hidden)


def test_what_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LockstepError, match="install with: pip install onnx onnxscript onnxruntime"):
        parse_formats("safetensors,onnx")
    assert parse_formats("safetensors, torch-export,safetensors") == ["safetensors", "torch-export"]
    with pytest.raises(LockstepError, match="no format 'tflite'; choose among safetensors, onnx, torch-export"):
        parse_formats("tflite")


def test_a_file_that_cannot_be_written_is_a_sentence(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "model.safetensors", tmp_path):
        with pytest.raises(LockstepError, match="cannot be written"):
            export(load(trained_run), "safetensors", target)


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_the_cards_code_loads_the_weights_into_torchvision(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stem: str
) -> None:
    pytest.importorskip("torchvision")
    config = tiny_config(images, "model.width=64", f"model.stem={stem}")
    run = make_run(tmp_path / "run", config)
    export(load(run), "safetensors", tmp_path / "model.safetensors")
    card = write_card(run, tmp_path, {"model.safetensors": "safetensors"})
    assert "torchvision.models.resnet18(num_classes=len(classes))" in card
    image = next((images / "val" / "star").iterdir())
    answers = follow_card(card, tmp_path, image, monkeypatch)
    assert len(answers) == 1
    assert agree(answers, load(run), tmp_path / "image.jpeg")
