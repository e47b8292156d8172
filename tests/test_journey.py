"""examples/journey.py, the way of a user from images to a network in use: it runs, and what it promises holds."""

import importlib
import json
import sys
from pathlib import Path

import onnx
import pytest
import torch

from lockstep.events import Notice, read_events

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_whole_way_from_images_to_a_network_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    found = importlib.import_module("journey").main(tmp_path)
    # 480 images in batches of 32, ten times over, whatever number of steps was taken before it was stopped.
    assert 0 < found["stopped_at"] < 150 == found["steps"]
    assert found["val"] > 0.75
    assert found["test"] > 0.75
    assert found["test"] == found["val"]  # the same images: test/ serves as val/, and that is said
    assert any("test/ serves as the validation split" in note for note in found["notes"])
    assert found["named"] >= 3  # of four
    assert found["difference"] < 1e-4
    assert found["tuned"] > found["scratch"] + 0.05
    # The names of torchvision's own resnet18, and another number of classes than there are now.
    weights = torch.load(found["weights"], weights_only=True)
    assert weights["fc.weight"].shape[0] == 4
    assert {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer4.0.downsample.1.bias"} < weights.keys()
    told = [event.text for event in read_events(tmp_path / "runs" / "tuned") if isinstance(event, Notice)]
    assert any("the classifier fc is fresh, for 3 classes, as the weights are for 4" in text for text in told)
    run = tmp_path / "runs" / "shapes"
    assert json.loads((run / "summary.json").read_text())["N"] == 2
    # Not by the word of the library that ran it: the file's own words on what it holds.
    model = onnx.load(run / "export" / "model.onnx")
    onnx.checker.check_model(model)
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(said["classes"]) == ["bar", "disc", "square", "triangle"]
