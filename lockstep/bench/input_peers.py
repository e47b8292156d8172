"""Who takes part in the input benchmark: Lockstep, PyTorch's DataLoader with Pillow, and with torchvision.

Each can decode bytes, crop decoded images, and open a pipeline; all draw from the same distribution of crops.
"""

import io
import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.augment import Normalizer, draw_crops, mirror_into, random_crops, resize_crop
from lockstep.data.decode import decode
from lockstep.data.order import Cursor
from lockstep.data.pipeline import TrainPipeline
from lockstep.data.sources import Source

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Setting:
    """What everybody is asked for."""

    source: Source
    image_size: int
    batch: int
    threads: int
    device: torch.device


@dataclass(frozen=True)
class Contestant:
    """One way to feed a training loop."""

    name: str
    decode: Callable[[bytes], Any]  # bytes -> a decoded image of its own kind
    crop: Callable[[list[Any]], object]  # decoded images -> network input
    # Batches prepared ahead -> a fresh pipeline: how many images each batch holds, as it arrives.
    open: Callable[[int], AbstractContextManager[Iterator[int]]]


def build_contestants(setting: Setting) -> list[Contestant]:
    """Lockstep first, then the peers that are installed."""
    contestants = [_build_lockstep(setting), _build_pillow(setting)]
    if find_spec("torchvision") is not None:
        contestants.append(_build_torchvision(setting))
    return contestants


def _build_lockstep(setting: Setting) -> Contestant:
    """The pipeline a run uses, and its parts: the one place here that knows how they are called."""

    normalizer = Normalizer(MEAN, STD, setting.image_size)

    def crop(images: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
        square, mirrored = np.empty((2, setting.image_size, setting.image_size, 3), np.uint8)
        out = np.empty((len(images), *square.shape), np.float32)
        draws = draw_crops(0, 0, np.arange(len(images)), AREA, RATIO, True)
        boxes = random_crops(np.array([image.shape[:2] for image in images]), draws.crops, RATIO)
        for image, box, flip, row in zip(images, boxes, draws.flips, out, strict=True):
            resize_crop(image, box, square)
            if flip:
                mirror_into(square, mirrored)
            normalizer.normalize_into(mirrored if flip else square, row)
        return out

    @contextmanager
    def open_pipeline(depth: int) -> Iterator[Iterator[int]]:
        with TrainPipeline(
            setting.source,
            global_batch=setting.batch,
            rank=0,
            world_size=1,
            seed=0,
            image_size=setting.image_size,
            crop_area=AREA,
            crop_ratio=RATIO,
            flip=True,
            mean=MEAN,
            std=STD,
            threads=setting.threads,
            prefetch_batches=depth,
            device=setting.device,
            start=Cursor(),
            bad_share=1.0,
            resident="off",  # the peers decode each image each time
        ) as pipeline:
            yield (len(batch.labels) for batch in pipeline)

    return Contestant("lockstep", decode, crop, open_pipeline)


def _build_pillow(setting: Setting) -> Contestant:
    """What torchvision's ImageFolder and transforms do with Pillow, call by call, without needing torchvision."""

    def decode_image(data: bytes) -> Image.Image:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")

    def transform(image: Image.Image) -> Tensor:
        left, top, width, height = draw_box(image.width, image.height)
        side = setting.image_size
        square = image.crop((left, top, left + width, top + height)).resize((side, side), Image.Resampling.BILINEAR)
        if torch.rand(1) < 0.5:
            square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous().float().div_(255)
        return pixels.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))

    return _build_loader("dataloader-pillow", setting, decode_image, transform)


def draw_box(width: int, height: int) -> tuple[int, int, int, int]:
    """left, top, width and height of a random crop, drawn as torchvision's RandomResizedCrop does."""
    log_ratio = [math.log(bound) for bound in RATIO]
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(*AREA).item()
        aspect = math.exp(torch.empty(1).uniform_(*log_ratio).item())
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(torch.randint(0, height - crop_height + 1, (1,)))
            left = int(torch.randint(0, width - crop_width + 1, (1,)))
            return left, top, crop_width, crop_height
    crop_width, crop_height = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


def _build_torchvision(setting: Setting) -> Contestant:
    """torchvision's own decoder and its second generation of transforms, on tensors throughout."""
    from torchvision import io as images
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(setting.image_size, scale=AREA, ratio=RATIO, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )

    def decode_image(data: bytes) -> Tensor:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        decoded: Tensor = images.decode_image(encoded, mode=images.ImageReadMode.RGB)
        return decoded

    return _build_loader("dataloader-torchvision", setting, decode_image, transform)


class Photos(Dataset[Tensor]):
    """Decoded and transformed one by one, as a DataLoader wants them."""

    def __init__(self, source: Source, load: Callable[[bytes], Tensor]) -> None:
        self._source, self._load = source, load

    def __getitem__(self, index: int) -> Tensor:
        return self._load(self._source.read(index))


class Endless(Sampler[int]):
    """Epoch after epoch in random order, so that a loader never has to start again."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self._count).tolist()


def _build_loader(
    name: str, setting: Setting, decode_image: Callable[[bytes], Any], transform: Callable[[Any], Tensor]
) -> Contestant:
    """A DataLoader with as many worker processes as Lockstep has threads."""
    dataset = Photos(setting.source, lambda data: transform(decode_image(data)))

    def load(depth: int) -> Generator[int, None, None]:
        loader = DataLoader(
            dataset,
            batch_size=setting.batch,
            sampler=Endless(setting.source.num_samples),
            num_workers=setting.threads,
            prefetch_factor=depth,
            pin_memory=setting.device.type == "cuda",
            # Where processes are not forked, they could not be given functions made here.
            multiprocessing_context="fork" if os.name == "posix" else None,
        )
        for batch in loader:
            yield len(batch.to(setting.device, non_blocking=True))

    def open_loader(depth: int) -> AbstractContextManager[Iterator[int]]:
        return closing(load(depth))  # closing it stops the workers

    return Contestant(name, decode_image, lambda images: [transform(image) for image in images], open_loader)
