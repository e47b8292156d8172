"""Networks by name, and the sizes they refuse."""

import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.models import build_model
from lockstep.models.alexnet import AlexNet
from lockstep.models.resnet import ResNet


@pytest.mark.parametrize(
    ("name", "kind"), [("alexnet", AlexNet), *((f"resnet{d}", ResNet) for d in (18, 34, 50, 101, 152))]
)
def test_every_name_builds_its_network(name: str, kind: type) -> None:
    with torch.device("meta"):
        assert isinstance(build_model(name, 10, image_size=224), kind)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        LockstepError, match=r"no model 'resnet51': choose linear, alexnet, resnet18, .* or resnet152, or"
    ):
        build_model("resnet51", 10, image_size=224)


@pytest.mark.parametrize(("stem", "smallest"), [("imagenet", 32), ("cifar", 8)])
def test_images_smaller_than_the_stride_are_refused(stem: str, smallest: int) -> None:
    build_model("resnet18", 10, image_size=smallest, stem=stem, width=8)
    with pytest.raises(LockstepError, match=f"at least {smallest} pixels, not {smallest - 1}"):
        build_model("resnet18", 10, image_size=smallest - 1, stem=stem, width=8)
