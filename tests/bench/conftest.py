"""A stand-in of timm's interface, as far as the benchmarks beside timm use it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.anew import imported_anew

TIMM = {
    "__init__.py": """
from torch import nn

def create_model(name, pretrained=False, num_classes=1000):
    assert (name, pretrained) == ("tiny", False)
    body = nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(8, num_classes))
""",
    "optim.py": """
from torch.optim import AdamW

def create_optimizer_v2(model, opt, lr, weight_decay, **given):
    assert opt == "adamw"
    return AdamW(model.parameters(), lr, weight_decay=weight_decay, **given)
""",
    "scheduler.py": """
import math

class CosineLRScheduler:
    def __init__(self, optimizer, t_initial, lr_min=0.0, warmup_t=0, warmup_lr_init=0.0, warmup_prefix=False,
                 t_in_epochs=True):
        assert t_initial > 0 and warmup_prefix and not t_in_epochs
        self.groups, self.length, self.least = optimizer.param_groups, t_initial, lr_min
        self.most, self.warmup, self.first = self.groups[0]["lr"], warmup_t, warmup_lr_init
        self.step_update(0)
    def step_update(self, num_updates):
        lr, late = self.least, num_updates - self.warmup
        if late < 0:
            lr = self.first + num_updates * (self.most - self.first) / self.warmup
        elif late < self.length:
            lr += 0.5 * (self.most - self.least) * (1 + math.cos(math.pi * late / self.length))
        for group in self.groups:
            group["lr"] = lr
""",
    "data.py": """
import math
from pathlib import Path
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

def create_dataset(name, root, split, is_training):
    assert name == "" and (split, is_training) in (("train", True), ("val", False))
    classes = sorted(folder.name for folder in (Path(root) / split).iterdir())
    return [(str(file), classes.index(file.parent.name)) for file in sorted(Path(root, split).glob("*/*"))]

class Images:
    def __init__(self, files, size, resized, mean, std):
        self.files, self.size, self.resized, self.mean, self.std = files, size, resized, mean, std
    def __len__(self):
        return len(self.files)
    def __getitem__(self, number):
        file, label = self.files[number]
        image = Image.open(file).convert("RGB").resize((self.resized, self.resized))
        start = (self.resized - self.size) // 2
        image = image.crop((start, start, start + self.size, start + self.size))
        pixels = (np.array(image, np.float32) / 255 - self.mean) / self.std
        return torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1), label

def create_loader(dataset, input_size, batch_size, is_training, interpolation, mean, std, num_workers, pin_memory,
                  img_dtype, device, use_prefetcher, scale=None, ratio=None, hflip=0.5, color_jitter=0.4,
                  use_multi_epochs_loader=False, crop_pct=None):
    assert is_training == (crop_pct is None) == (color_jitter is None)
    size = input_size[-1]
    images = Images(dataset, size, math.floor(size / (crop_pct or 1)), mean, std)
    return DataLoader(images, batch_size, shuffle=is_training, drop_last=is_training, num_workers=num_workers,
                      persistent_workers=True)
""",
}


@pytest.fixture
def timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "site" / "timm"
    folder.mkdir(parents=True)
    for name, text in TIMM.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])
    with imported_anew("timm"):
        yield
