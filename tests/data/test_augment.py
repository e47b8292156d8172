"""Crops, resizing and normalisation against Pillow, NumPy and plain statistics."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lockstep.data.augment import (
    Box,
    Draw,
    central_crop,
    draw_crops,
    normalize,
    normalize_into,
    random_crop,
    resize_central,
    resize_crop,
)

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(height: int, width: int) -> np.ndarray:
    rough = np.random.default_rng(0).integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), dtype=np.uint8)
    return np.array(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC))


def draws(count: int, seed: int = 0, epoch: int = 0) -> list[Draw]:
    return draw_crops(seed, epoch, np.arange(count), AREA, RATIO, True)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 99))
def test_a_crop_lies_within_the_image(height: int, width: int, seed: int) -> None:
    for draw in draws(8, seed):
        box = random_crop(height, width, draw, RATIO)
        assert box.height >= 1
        assert box.width >= 1
        assert 0 <= box.top <= height - box.height
        assert 0 <= box.left <= width - box.width


def test_a_draw_depends_on_the_sample_and_not_on_its_company() -> None:
    assert draw_crops(3, 1, np.array([17]), AREA, RATIO, True) == [draws(20, 3, 1)[17]]
    assert len({str(draws(1, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_crops_follow_the_usual_distribution() -> None:
    # The same rejection sampling by NumPy's own generator is the oracle: compare quantiles of area, ratio and place.
    random = np.random.default_rng(1)

    def reference() -> tuple[float, float, float, float]:
        while True:
            area, ratio = random.uniform(*AREA) * 300 * 400, np.exp(random.uniform(*np.log(RATIO)))
            width, height = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if width <= 400 and height <= 300:
                return random.integers(0, 301 - height), random.integers(0, 401 - width), height, width

    count = 8000
    expected = np.array([reference() for _ in range(count)], dtype=float)
    drawn = np.array([random_crop(300, 400, draw, RATIO) for draw in draws(count)], dtype=float)
    for values in (lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 3] / b[:, 2], lambda b: b[:, 0], lambda b: b[:, 1]):
        quantiles = [np.quantile(values(boxes), np.linspace(0.1, 0.9, 9)) for boxes in (expected, drawn)]
        spread = np.ptp(values(expected))
        assert np.abs(quantiles[0] - quantiles[1]).max() < 0.03 * spread


def test_flips_are_even_and_can_be_switched_off() -> None:
    assert abs(np.mean([draw.flip for draw in draws(4000)]) - 0.5) < 0.04
    assert not any(draw.flip for draw in draw_crops(0, 0, np.arange(100), AREA, RATIO, False))


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 300, (0, 143, 10, 13)), (300, 10, (143, 0, 13, 10)), (90, 100, (0, 0, 90, 100))],
)
def test_where_no_crop_fits_the_largest_central_one_is_taken(
    height: int, width: int, box: tuple[int, int, int, int]
) -> None:
    assert random_crop(height, width, Draw([[4.0, 1.0, 0.0, 0.0]], False), RATIO) == Box(*box)


@pytest.mark.parametrize(("shape", "size"), [((375, 500), 224), ((48, 48), 32), ((60, 31), 64)])
def test_a_resized_crop_is_within_a_level_of_pillow(shape: tuple[int, int], size: int) -> None:
    image = picture(*shape)
    box = Box(3, 5, shape[0] - 10, shape[1] - 9)
    out = np.empty((size, size, 3), np.uint8)
    resize_crop(image, box, out, flip=False)
    cropped = Image.fromarray(image[3 : shape[0] - 7, 5 : shape[1] - 4])
    expected = np.asarray(cropped.resize((size, size), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(out - expected).max() <= 1


def test_a_flip_mirrors_left_and_right() -> None:
    image, box = picture(48, 60), Box(2, 3, 40, 50)
    straight, mirrored = np.empty((2, 32, 32, 3), np.uint8)
    resize_crop(image, box, straight, flip=False)
    resize_crop(image, box, mirrored, flip=True)
    assert np.array_equal(mirrored, straight[:, ::-1])


@pytest.mark.parametrize(("height", "width"), [(384, 480), (512, 256), (300, 300)])
def test_the_central_crop_equals_resizing_and_then_cropping(height: int, width: int) -> None:
    image = picture(height, width)
    out = np.empty((224, 224, 3), np.uint8)
    resize_central(image, central_crop(height, width, 256, 224), out)
    # Sides for which the two steps need no rounding: the long side and the crop's place are whole pixels.
    short = min(height, width)
    resized = Image.fromarray(image).resize((width * 256 // short, height * 256 // short), Image.Resampling.BILINEAR)
    top, left = (resized.height - 224) // 2, (resized.width - 224) // 2
    expected = resized.crop((left, top, left + 224, top + 224))
    assert np.abs(out.astype(int) - np.asarray(expected)).max() <= 1


def test_normalisation_is_the_formula_on_both_paths() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)
    expected = (images / 255 - np.array(MEAN)) / np.array(STD)
    out = np.empty(images.shape, np.float32)
    normalize_into(images, MEAN, STD, out)
    tensor = normalize(torch.from_numpy(images), MEAN, STD)
    assert np.abs(out - expected).max() < 2e-6
    assert np.abs(tensor.permute(0, 2, 3, 1).numpy() - expected).max() < 2e-6
    assert tensor.shape == (3, 3, 8, 6)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous(memory_format=torch.channels_last)
