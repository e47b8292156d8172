"""Frozen parts: which parameters, and batch norm that stays as it is."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import LockstepError
from lockstep.models import build_model, initialize, set_fused
from lockstep.models.freeze import freeze
from lockstep.models.resnet import BasicBlock, Bottleneck, ResNet


def small() -> nn.Module:
    model = build_model("resnet50", 5, image_size=32, width=8)
    initialize(model, seed=1)
    return model


def test_prefixes_are_whole_parts_of_names() -> None:
    model = nn.ModuleDict({"layer1": nn.Linear(2, 2), "layer10": nn.Linear(2, 2)})
    freeze(model, ["layer1"])
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_norms_of_frozen_parts_stay_in_evaluation_whatever_is_asked_of_the_network() -> None:
    model = small()
    freeze(model, ["conv1", "bn1", "layer1"])
    model.eval()
    model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(4, 3, 32, 32))
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    frozen = {name for name in before if name.startswith(("bn1.", "layer1."))}
    assert changed == before.keys() - frozen


def test_a_frozen_part_gives_the_same_in_training_as_in_evaluation() -> None:
    model = small()
    freeze(model, ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"])
    images = torch.randn(4, 3, 32, 32)
    assert torch.equal(model.train()(images), model.eval()(images))


@pytest.mark.parametrize(
    ("prefixes", "sentence"),
    [
        (["layr1"], r"names 'layr1', and the network has no parameter there; did you mean layer1\?"),
        (["qqq"], "its parts are conv1, bn1, layer1"),
        (["layer"], "no parameter there"),
        (["conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"], "leaves nothing to train"),
    ],
)
def test_a_mistake_is_one_sentence(prefixes: list[str], sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        freeze(small(), prefixes)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_fused_it_trains_alike(block: Any) -> None:
    """A norm that is frozen beside one that is not, in one block, and whole stages."""
    pytest.importorskip("triton")
    models = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = ResNet(block, (1, 1, 1, 1), 10, "cifar", 8, zero_init_residual=False)
        freeze(model, ["conv1", "bn1", "layer2", "layer3.0.downsample"])
        set_fused(model, fused)
        models.append(model.to(memory_format=torch.channels_last).train())  # type: ignore[call-overload]
    images = torch.randn(3, 3, 8, 8).to(memory_format=torch.channels_last)
    logits = [model(images) for model in models]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
    for values in logits:
        values.square().sum().backward()
    plain, fused_model = models
    for name, parameter in plain.named_parameters():
        own = fused_model.get_parameter(name).grad
        assert (own is None) == (parameter.grad is None) == (not parameter.requires_grad), name
        if own is not None and parameter.grad is not None:
            assert (own - parameter.grad).norm() < 0.1 * parameter.grad.norm(), name
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(fused_model.get_buffer(name), buffer, rtol=1e-3, atol=1e-4)
