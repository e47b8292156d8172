"""AlexNet: the one-column network of 62 M parameters, and where batch norm stands in it."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import LockstepError
from lockstep.models.alexnet import AlexNet, build_alexnet
from lockstep.models.norm import BatchNorm, BatchNormRelu


def build_on_meta(**settings: Any) -> AlexNet:
    with torch.device("meta"):
        return build_alexnet(1000, **settings)


def kinds(model: AlexNet) -> str:
    letters = {
        nn.Conv2d: "C",
        BatchNorm: "B",
        BatchNormRelu: "BR",
        nn.ReLU: "R",
        nn.MaxPool2d: "P",
        nn.Linear: "F",
        nn.Dropout: "D",
    }
    return "".join(letters[type(module)] for module in (*model.features, *model.classifier))


def test_without_batch_norm_it_has_the_textbook_parameters() -> None:
    model = build_on_meta(batch_norm=False)
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1]
    convolutions = [(96, 3, 11, 11), (256, 96, 5, 5), (384, 256, 3, 3), (384, 384, 3, 3), (256, 384, 3, 3)]
    assert shapes == [*convolutions, (4096, 256 * 6 * 6), (4096, 4096), (1000, 4096)]
    assert sum(parameter.numel() for parameter in model.parameters()) == 62_378_344


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_norm": False}, "CRPCRPCRCRCRPFRDFRDF"),
        ({"batch_norm": False, "pool5_batch_norm": False}, "CRPCRPCRCRCRPFRDFRDF"),
        ({"pool5_batch_norm": False}, "CBRPCBRPCBRCBRCBRPFRDFRDF"),
        ({}, "CBRPCBRPCBRCBRCBRPBFRDFRDF"),
    ],
)
def test_batch_norm_follows_every_convolution_and_pool5_when_asked(settings: dict[str, bool], expected: str) -> None:
    assert kinds(build_on_meta(**settings)) == expected


@pytest.mark.parametrize("batch_norm", [True, False])
def test_a_convolution_has_a_bias_only_where_no_batch_norm_follows(batch_norm: bool) -> None:
    convolutions = [m for m in build_on_meta(batch_norm=batch_norm).features if isinstance(m, nn.Conv2d)]
    assert [m.bias is None for m in convolutions] == [batch_norm] * 5


def test_dropout_is_the_share_asked_for() -> None:
    assert [m.p for m in build_on_meta(dropout=0.25).classifier if isinstance(m, nn.Dropout)] == [0.25, 0.25]


@pytest.mark.parametrize("image_size", [63, 64, 96, 224, 227])
def test_logits_come_out_for_any_image_size_it_accepts(image_size: int) -> None:
    model = build_on_meta(image_size=image_size)
    with torch.device("meta"):
        assert model(torch.empty(2, 3, image_size, image_size)).shape == (2, 1000)


def test_images_too_small_for_pool5_are_refused() -> None:
    with pytest.raises(LockstepError, match="at least 63 pixels, not 62"):
        build_on_meta(image_size=62)


def test_activations_stay_channels_last() -> None:
    model = build_alexnet(3, image_size=63).features.to(memory_format=torch.channels_last)
    features = model(torch.randn(2, 3, 127, 127).to(memory_format=torch.channels_last))
    assert features.is_contiguous(memory_format=torch.channels_last)
