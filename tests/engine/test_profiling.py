"""What `lockstep profile` measures: layers, what they keep, and the step on this device over batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.bench.profile_command import profile
from lockstep.comm.world import join_world
from lockstep.data.generated import build_generated
from lockstep.data.sources import open_folder
from lockstep.engine.layer_times import Layer, count_kept, list_layers, note_begins, spread, time_backward
from lockstep.engine.profiling import profile_device
from lockstep.errors import LockstepError
from lockstep.models import build_model
from lockstep.plan.device import from_json, to_json
from tests.engine.small import small_config


@pytest.mark.parametrize(("name", "num_layers"), [("resnet50", 50), ("resnet18", 18), ("alexnet", 8)])
def test_every_parameter_is_in_one_layer_in_forward_order(name: str, num_layers: int) -> None:
    with torch.device("meta"):
        model = build_model(name, 10, image_size=224)
    layers = list_layers(model)
    assert len(layers) == num_layers
    assert [slot for layer in layers for slot in layer.slots] == [name for name, _ in model.named_parameters()]


def test_what_a_pass_keeps_is_counted_once_and_parameters_never() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    layers = list_layers(model)
    # The first layer keeps its input (5 × 8) and its activation (5 × 16), which the second one keeps too.
    assert count_kept(model, layers, torch.ones(5, 8)) == (4 * 5 * (8 + 16), [4 * 5 * (8 + 16), 0])
    assert not model[0]._forward_pre_hooks


def test_layers_begin_one_after_the_other_and_last_to_the_end() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers = list_layers(model)
    with note_begins(model, layers, on_gpu=False) as begun:
        model(torch.ones(5, 8))
    begun.moments = {"0": 1.0, "1": 1.5, "": 3.5}
    assert begun.seconds(layers) == [0.5, 2.0]
    assert not model._forward_hooks


def test_the_backward_pass_is_cut_by_gradients_and_adds_up() -> None:
    layers = [Layer("a", ("a.w",)), Layer("b", ("b.w", "b.b")), Layer("c", ("c.w",))]
    ready_s = {"c.w": 1.0, "b.b": 3.0, "b.w": 2.0, "a.w": 6.0}
    assert time_backward(layers, ready_s, 8.0) == [5.0, 2.0, 1.0]
    # A gradient that comes before that of a layer behind it costs nothing more.
    assert time_backward(layers, ready_s | {"b.b": 0.5, "b.w": 0.25}, 8.0) == [7.0, 0.0, 1.0]
    assert spread(6.0, [0.0, 0.0]) == [3.0, 3.0]


def test_a_small_step_is_profiled_on_the_cpu(tmp_path: Path) -> None:
    source = open_folder(build_generated(tmp_path, 130, 50), 60.0)[0]
    config = small_config("fp32")
    said: list[str] = []
    with join_world(None) as world:
        torch.set_num_threads(1)  # which does not wait for a core that others have
        found = profile_device(config, world, source, [4, 2], note="for a test", say=said.append)
    assert [row.batch for row in found.batches] == [2, 4]
    assert sum("images/s" in line for line in said) == 2
    assert (found.source, found.rule, found.precision) == ("measured", "lars", "fp32")
    assert "for a test" in found.note
    model = build_model("resnet18", 10, image_size=64, width=16)
    for row in found.batches:
        assert 0 < row.forward_s + row.backward_s < row.step_s
        assert row.step_s == pytest.approx(row.forward_s + row.backward_s + row.update_s)
        assert sum(layer.forward_s for layer in row.layers) == pytest.approx(row.forward_s)
        assert sum(layer.backward_s for layer in row.layers) == pytest.approx(row.backward_s)
        assert {slot.name: slot.elements for slot in row.slots} == {
            name: parameter.numel() for name, parameter in model.named_parameters()
        }
        assert all(0 < slot.ready_s <= row.backward_s for slot in row.slots)
        # Last to first in the network, that is.
        assert row.slots[0].name.startswith("fc")
        assert row.slots[0].ready_s < row.slots[-1].ready_s
    small, large = found.batches
    # Twice the images keep twice the bytes, but for a few numbers of each norm.
    kept = [sum(layer.activation_bytes for layer in row.layers) for row in (small, large)]
    assert kept[1] == pytest.approx(2 * kept[0], rel=0.02)
    assert large.memory_bytes > small.memory_bytes
    assert found.input is not None
    assert found.input.images_per_core_s > 10
    assert found.input.copy_bytes_s == 0
    text = to_json(found)
    assert to_json(from_json(text)) == text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batches": "4,x"}, "no list of batch sizes"),
        ({"batches": "99999999"}, "more than the"),
        ({"threads": 4096}, "more than the"),
        ({"note": "[/bold]"}, "plain text"),
        ({"json_file": Path("/nowhere/x.json")}, "cannot be written"),
        ({"settings": ["model.name=vgg"]}, "model.name"),
        ({"target": "nothing"}, "nothing"),
    ],
)
def test_a_mistake_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        profile(**{"target": "quickstart"} | options)
