"""examples/journey.py, the way of a user from images to a network in use: it runs, and what it promises holds."""

import importlib
import json
import sys
from pathlib import Path

import onnx
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_whole_way_from_images_to_a_network_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    found = importlib.import_module("journey").main(tmp_path)
    # 480 images in batches of 32, ten times over, whatever number of steps was taken before it was stopped.
    assert 0 < found["stopped_at"] < 150 == found["steps"]
    assert found["val"] > 0.75
    assert found["test"] > 0.75
    assert found["named"] >= 3  # of four
    assert found["difference"] < 1e-4
    assert found["tuned"] > found["scratch"] + 0.05
    run = tmp_path / "runs" / "shapes"
    assert json.loads((run / "summary.json").read_text())["N"] == 2
    # Not by the word of the library that ran it: the file's own words on what it holds.
    model = onnx.load(run / "export" / "model.onnx")
    onnx.checker.check_model(model)
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(said["classes"]) == ["bar", "disc", "square", "triangle"]
