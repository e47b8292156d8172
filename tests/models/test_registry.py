"""Networks that register themselves: their settings, and what is said of wrong ones."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.models import build_model
from lockstep.models.registry import find_network, list_networks

NEW_FILE = """
from torch import nn
from lockstep.models.registry import register

@register("flat")
def build_flat(num_classes: int, *, image_size: int, hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, hidden), nn.Linear(hidden, num_classes))
"""


def test_all_networks_and_their_settings_are_known() -> None:
    names = ["alexnet", "linear", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    assert sorted(list_networks()) == sorted(names)
    assert list(find_network("resnet50").settings) == ["stem", "width", "zero_init_residual", "pooled_shortcuts"]
    assert list(find_network("alexnet").settings) == ["batch_norm", "pool5_batch_norm", "dropout"]


def test_a_new_file_is_all_that_a_new_network_takes(tmp_path: Path) -> None:
    """A folder of such files beside the package's own, in an interpreter of its own."""
    (tmp_path / "flat.py").write_text(NEW_FILE)
    code = f"""
import lockstep.models
lockstep.models.__path__.append({str(tmp_path)!r})
from lockstep.config import ModelConfig
from lockstep.recipes.read import load_recipe
from lockstep.engine.build import build_network
config = load_recipe("quickstart", ["model={{name = 'flat', settings = {{hidden = 3}}}}", "data.image_size=4"])[1]
first, second = build_network(config, 5), build_network(config, 5)
assert [tuple(p.shape) for p in first.parameters()] == [(3, 48), (3,), (5, 3), (5,)]
assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters()))
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"widht": 3}, r"resnet18 has no setting 'widht' \(model\.settings\); did you mean width\?"),
        ({"colour": 3}, "it takes stem, width, zero_init_residual, pooled_shortcuts"),
        ({"width": "3"}, "width = '3', and resnet18 wants a whole number"),
        ({"width": True}, "width = True, and resnet18 wants a whole number"),
        ({"stem": "none"}, "stem = 'none', and resnet18 wants 'imagenet' or 'deep' or 'fine' or 'cifar'"),
        ({"zero_init_residual": 1}, "wants true or false"),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        build_model("resnet18", 5, image_size=32, **settings)
