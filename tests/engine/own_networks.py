"""Networks as a user writes them, named in recipes as `tests.engine.own_networks:NAME`."""

import os

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.scale * self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Patches(nn.Module):
    """A transformer over patches: positions, a class token, an unused layer, and buffers of every kind."""

    def __init__(self, num_classes: int, width: int = 16, depth: int = 2, size: int = 32) -> None:
        super().__init__()
        self.fused = "somebody else's word"
        self.input_channels = 77
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (size // 8) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        self.unused = nn.Linear(width, width)
        self.register_buffer("order", torch.arange(3))
        self.register_buffer("table", torch.arange(5, dtype=torch.int16))
        self.register_buffer("drawn", torch.from_numpy(np.random.default_rng().normal(size=3)))  # by no seed
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("bias", torch.full((3,), -torch.inf), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class Shared(nn.Module):
    """Modules that share arrays: a weight under two names, a norm that is used twice, and a bare matrix as the head."""

    def __init__(self, num_classes: int, width: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.norm1 = self.norm2 = nn.BatchNorm2d(width)
        self.there, self.back = nn.Linear(width, width), nn.Linear(width, width)
        self.back.weight = self.there.weight
        self.classes = nn.Parameter(0.1 * torch.randn(width, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm2(self.norm1(self.patches(images)).relu()).mean((2, 3))
        return self.back(self.there(x).relu()) @ self.classes


class Waiting(nn.Module):
    """A network whose forward pass asks a device for a number."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images.mean((2, 3))
        logits: Tensor = self.head(x / max(1.0, x.abs().max().item()))
        return logits


class Failing(nn.Module):
    """A network that one of two ranks cannot run, once steps are under way."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        self.count += 1
        if self.count > 2 and os.environ.get("RANK") == "1":
            raise LockstepError("The disk of nobody’s images is full; free some.")
        logits: Tensor = self.head(images.mean((2, 3)))
        return logits


class Unbuilt(nn.Linear):
    """A network that one of two ranks cannot even build, as where its node lacks a file."""

    def __init__(self, num_classes: int) -> None:
        if os.environ.get("RANK") == "1":
            raise FileNotFoundError("no backbone.pth\nanywhere")
        super().__init__(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.mean((2, 3)))


class Mistaken(Unbuilt):
    """A network with a mistake that one of two ranks meets, in steps that are under way."""

    def __init__(self, num_classes: int) -> None:
        nn.Linear.__init__(self, 3, num_classes)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        self.count += 1
        if self.count > 2 and os.environ.get("RANK") == "1":
            raise KeyError("backbone")
        return super().forward(images)
