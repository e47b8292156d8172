"""What a user might bring, in a module that ranks can import: tiny pictures of two colours, a network, losses."""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

SETTINGS: dict[str, Any] = {
    "data.image_size": 16,
    "data.eval_resize": 16,
    "train.global_batch": 8,
    "train.duration": "2ep",
    "train.log_every": 1,
    "train.eval_every": "1ep",
    "train.checkpoint_every": "1ep",
    "optim.warmup": "0ep",
    "comm.tune_s": 0,
}


def draw(seed: int, number: int, label: int) -> bytes:
    """A JPEG, red or blue."""
    pixels = np.random.default_rng([seed, number]).integers(0, 120, (20, 20, 3), np.uint8)
    pixels[:, :, 2 * label] += 80
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "JPEG")
    return written.getvalue()


class Pictures:
    """As simple as a data set can be."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        return draw(self.seed, number, number % 2), number % 2


class Broken(Pictures):
    """Sample 5 is a mistake in the code."""

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(count, seed)
        self.labels = [number % 2 for number in range(count)]

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        if number == 5:
            raise KeyError("nothing there")
        return super().__getitem__(number)


def open_pictures() -> tuple[Pictures, Pictures]:
    return Pictures(40), Pictures(10, seed=1)


def open_broken() -> tuple[Pictures, Pictures]:
    return Broken(40), Pictures(10, seed=1)


def build_net(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """What the built-in loss computes, sample by sample."""
    return functional.cross_entropy(logits, labels, reduction="none")


def broken_loss(logits: Tensor, labels: Tensor) -> Tensor:
    raise ValueError(f"{len(labels)} labels\nare too many")


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels)
