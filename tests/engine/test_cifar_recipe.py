"""The recipe cifar10-resnet18 beside what everyone does: images by brute force, network and steps in plain PyTorch."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from lockstep.config import RunConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.engine.averaged import build_way
from lockstep.engine.build import (
    assemble,
    build_eval_pipeline,
    build_network,
    build_train_pipeline,
    open_sources,
    plan_input,
)
from lockstep.engine.step import LOSS, train_step
from lockstep.optim.schedule import Schedule
from lockstep.recipes.read import load_recipe
from tests.engine.small import alone

SIDE, PAD = 32, 4
MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])


def draw_images(folder: Path, num_train: int = 60, num_val: int = 20) -> dict[str, NDArray[np.uint8]]:
    """Noise of two classes, so that no two places of an image are alike; what lies in the files, by split."""
    drawn = {}
    for split, count in (("train", num_train), ("val", num_val)):
        images = np.random.default_rng(count).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
        for number, image in enumerate(images):
            path = folder / split / ("cat" if number < count // 2 else "dog") / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
        drawn[split] = images
    return drawn


def load(folder: Path, *settings: str) -> RunConfig:
    return load_recipe("cifar10-resnet18", [f"data.path={folder}", "train.global_batch=25", *settings])[1]


def normalize(images: NDArray[np.uint8]) -> Tensor:
    return ((torch.from_numpy(images).float() / 255 - MEAN) / STD).permute(0, 3, 1, 2)


def find_view(image: Tensor, original: NDArray[np.uint8]) -> tuple[int, int, bool]:
    """How far an image is moved down and across its original, padded by reflection, and whether it is mirrored."""
    padded = np.pad(original, ((PAD, PAD), (PAD, PAD), (0, 0)), "reflect")
    for flipped in (False, True):
        # A flip comes before the padding or behind it: with reflection the views are the same.
        source = padded[:, ::-1] if flipped else padded
        windows = np.lib.stride_tricks.sliding_window_view(source, (SIDE, SIDE), axis=(0, 1))
        views = normalize(windows.transpose(0, 1, 3, 4, 2).reshape(-1, SIDE, SIDE, 3).copy())
        found = (views - image).abs().amax(dim=(1, 2, 3)) < 1e-5
        if found.any():
            (place,) = found.nonzero().flatten().tolist()
            return place // (2 * PAD + 1), place % (2 * PAD + 1), flipped
    raise AssertionError("the image is no view of its original")


def test_every_image_is_its_original_moved_and_mirrored(tmp_path: Path) -> None:
    """To the last level: nothing is blurred, cut or shifted otherwise; each in one of two epochs is mirrored."""
    originals, world = draw_images(tmp_path), alone()
    config = load(tmp_path, "augment.erase=0")
    sources = open_sources(config.data)
    flips: dict[int, list[bool]] = {}
    moves = []
    with build_train_pipeline(config, world, sources.train, Cursor(), plan_input(config, world)) as pipeline:
        for batch in pipeline:
            for sample, image, label in zip(batch.samples, batch.images, batch.labels, strict=True):
                down, across, flipped = find_view(image, originals["train"][sample])
                assert label == (sample >= 30)
                moves.append((down, across))
                flips.setdefault(int(sample), []).append(flipped)
            if batch.cursor.epoch == 2:
                break
    assert all(sorted(seen) == [False, True] for seen in flips.values())
    assert {down for down, _ in moves} == {across for _, across in moves} == set(range(2 * PAD + 1))
    with build_eval_pipeline(config, world, sources.val) as evaluation:
        seen = torch.cat([batch.images for batch in evaluation])
    torch.testing.assert_close(seen, normalize(originals["val"]), rtol=0, atol=1e-5)


class Block(nn.Module):
    """The basic block as pytorch-cifar has it."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Published(nn.Module):
    """ResNet-18 for CIFAR-10 as pytorch-cifar has it, of any width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        before = width
        for stage in range(4):
            after = width << stage
            blocks = nn.Sequential(Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1))
            setattr(self, f"layer{stage + 1}", blocks)
            before = after
        self.fc = nn.Linear(before, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(functional.avg_pool2d(x, 4).flatten(1))
        return logits


def test_steps_of_the_recipe_are_those_of_plain_pytorch() -> None:
    """Its network, rule, decay, smoothing, schedule and average, over batches of two sizes: weights and statistics."""
    config = load(Path("unused"), "model.width=4", "train.global_batch=16", "precision.compute=fp32")
    model = build_network(config, 2)
    plain = Published(4)
    plain.load_state_dict(model.state_dict())
    warmup, total, peak = 3, 12, config.optim.lr / 10
    schedule = Schedule(config.optim.schedule, peak, total, warmup)  # type: ignore[arg-type]
    parts = assemble(config, alone(), model, schedule)
    matrices = [parameter for parameter in plain.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in plain.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 5e-4}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=peak, momentum=0.9, nesterov=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    average = {name: value.clone() for name, value in plain.state_dict().items() if value.is_floating_point()}
    generator = torch.Generator().manual_seed(5)
    for step in range(total):
        count = 5 if step % 4 == 3 else 16  # the last batch of an epoch is smaller
        images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
        labels = torch.randint(0, 2, (count,), generator=generator)
        decayed = 0.5 * (1 + np.cos(np.pi * (step - warmup) / (total - 1 - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = peak * (step / warmup if step < warmup else decayed)
        batch = Batch(images, labels, count, 0, np.arange(count), Cursor(0, count))
        side = train_step(parts, batch, schedule.lr_at(step))
        optimizer.zero_grad()
        loss = criterion(plain(images), labels)
        loss.backward()
        optimizer.step()
        assert side[LOSS].item() == np.float32(loss.item()) or abs(side[LOSS].item() - loss.item()) < 1e-4
        decay = min(config.optim.average, 1 - 9 / (10 + step))
        for name, value in average.items():
            value.lerp_(plain.state_dict()[name], 1 - decay)
    found = dict(model.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name].float(), value.float(), rtol=1e-3, atol=1e-4, msg=name)
    assert parts.average is not None
    with build_way(parts, parts.average, alone())():
        for name, value in average.items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)
