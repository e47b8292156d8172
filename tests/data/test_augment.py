"""Crops, resizing and normalisation against Pillow, NumPy and plain statistics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from lockstep.data.augment import (
    Draws,
    Normalizer,
    central_crops,
    choose_factors,
    draw_crops,
    mirror_into,
    random_crops,
    reduce_boxes,
    resize_central,
    resize_crop,
)

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(height: int, width: int) -> np.ndarray:
    rough = np.random.default_rng(0).integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), dtype=np.uint8)
    return np.array(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC))


def draws(count: int, seed: int = 0, epoch: int = 0) -> Draws:
    return draw_crops(seed, epoch, np.arange(count), AREA, RATIO, True)


def sides(height: int, width: int, count: int) -> np.ndarray:
    return np.tile(np.array([height, width], np.int64), (count, 1))


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 99))
def test_a_crop_lies_within_the_image_on_whole_pixels(height: int, width: int, seed: int) -> None:
    images = sides(height, width, 8)
    boxes = random_crops(images, draws(8, seed).crops, RATIO)
    assert (boxes == np.rint(boxes)).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= images).all()


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=6), st.integers(0, 99))
def test_many_crops_at_once_equal_one_at_a_time(images: list[tuple[int, int]], seed: int) -> None:
    crops = draws(len(images), seed).crops

    def plain(height: int, width: int, candidates: np.ndarray) -> list[float]:
        for area, aspect, top, left in candidates.tolist():
            target = area * height * width
            crop_width, crop_height = round((target * aspect) ** 0.5), round((target / aspect) ** 0.5)
            if 0 < crop_width <= width and 0 < crop_height <= height:
                place = int(top * (height - crop_height + 1)), int(left * (width - crop_width + 1))
                return [*place, crop_height, crop_width]
        crop_width = max(1, min(width, round(height * RATIO[1])))
        crop_height = max(1, min(height, round(width / RATIO[0])))
        return [(height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width]

    expected = [plain(*image, candidates) for image, candidates in zip(images, crops, strict=True)]
    assert random_crops(np.array(images), crops, RATIO).tolist() == expected


def test_a_draw_depends_on_the_sample_and_not_on_its_company() -> None:
    alone = draw_crops(3, 1, np.array([17]), AREA, RATIO, True)
    assert np.array_equal(alone.crops[0], draws(20, 3, 1).crops[17])
    assert alone.flips[0] == draws(20, 3, 1).flips[17]
    assert len({str(draws(1, seed, epoch).crops) for seed in range(3) for epoch in range(3)}) == 9


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
    drawn = random_crops(sides(300, 400, count), draws(count).crops, RATIO)
    for values in (lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 3] / b[:, 2], lambda b: b[:, 0], lambda b: b[:, 1]):
        quantiles = [np.quantile(values(boxes), np.linspace(0.1, 0.9, 9)) for boxes in (expected, drawn)]
        spread = np.ptp(values(expected))
        assert np.abs(quantiles[0] - quantiles[1]).max() < 0.03 * spread


def test_flips_are_even_and_can_be_switched_off() -> None:
    assert abs(draws(4000).flips.mean() - 0.5) < 0.04
    assert not draw_crops(0, 0, np.arange(100), AREA, RATIO, False).flips.any()


def test_in_turn_a_sample_is_mirrored_in_every_other_epoch() -> None:
    def flips(epoch: int, flip: bool = True) -> NDArray[np.bool_]:
        return draw_crops(3, epoch, np.arange(2000), AREA, RATIO, flip, flip_in_turn=True).flips

    assert abs(flips(0).mean() - 0.5) < 0.04  # by chance which comes first
    assert np.array_equal(flips(0), draw_crops(3, 0, np.arange(2000), AREA, RATIO, True).flips)
    for epoch in range(5):
        assert np.array_equal(flips(epoch + 1), ~flips(epoch))
    assert not flips(1, flip=False).any()
    crops = draw_crops(3, 4, np.arange(50), AREA, RATIO, True, flip_in_turn=True).crops
    assert np.array_equal(crops, draw_crops(3, 4, np.arange(50), AREA, RATIO, True).crops)  # which stay by chance


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 300, (0, 143, 10, 13)), (300, 10, (143, 0, 13, 10)), (90, 100, (0, 0, 90, 100))],
)
def test_where_no_crop_fits_the_largest_central_one_is_taken(
    height: int, width: int, box: tuple[int, int, int, int]
) -> None:
    too_large = np.array([[[4.0, 1.0, 0.0, 0.0]]])
    assert random_crops(sides(height, width, 1), too_large, RATIO).tolist() == [list(box)]


@pytest.mark.parametrize(("shape", "size"), [((375, 500), 224), ((48, 48), 32), ((60, 31), 64)])
def test_a_resized_crop_is_within_a_level_of_pillow(shape: tuple[int, int], size: int) -> None:
    image = picture(*shape)
    box = np.array([3.0, 5.0, shape[0] - 10, shape[1] - 9])
    out = np.empty((size, size, 3), np.uint8)
    resize_crop(image, box, out)
    cropped = Image.fromarray(image[3 : shape[0] - 7, 5 : shape[1] - 4])
    expected = np.asarray(cropped.resize((size, size), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(out - expected).max() <= 1


def test_a_flip_mirrors_left_and_right() -> None:
    image, out = picture(32, 32), np.empty((32, 32, 3), np.uint8)
    mirror_into(image, out)
    assert np.array_equal(out, image[:, ::-1])


@pytest.mark.parametrize(("height", "width"), [(384, 480), (512, 256), (300, 300)])
def test_the_central_crop_equals_resizing_and_then_cropping(height: int, width: int) -> None:
    image = picture(height, width)
    out = np.empty((224, 224, 3), np.uint8)
    resize_central(image, central_crops(sides(height, width, 1), 256, 224)[0], out)
    # Sides for which the two steps need no rounding: the long side and the crop's place are whole pixels.
    short = min(height, width)
    resized = Image.fromarray(image).resize((width * 256 // short, height * 256 // short), Image.Resampling.BILINEAR)
    top, left = (resized.height - 224) // 2, (resized.width - 224) // 2
    expected = resized.crop((left, top, left + 224, top + 224))
    assert np.abs(out.astype(int) - np.asarray(expected)).max() <= 1


def test_normalisation_is_the_formula() -> None:
    image = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    out = np.empty(image.shape, np.float32)
    Normalizer(MEAN, STD, width=6).normalize_into(image, out)
    assert np.abs(out - (image / 255 - np.array(MEAN)) / np.array(STD)).max() < 2e-6


def test_images_are_reduced_as_far_as_their_crops_allow() -> None:
    extents = np.array([223, 224, 447, 448, 895, 896, 1791, 1792, 9999])
    boxes = np.stack([0 * extents, 0 * extents, extents, extents + 50], axis=1).astype(float)
    bounds = np.tile([1, 8], (len(extents), 1))
    assert choose_factors(boxes, 224, bounds).tolist() == [1, 1, 1, 2, 2, 4, 4, 8, 8]
    assert choose_factors(boxes, 224, bounds.clip(max=1)).tolist() == [1] * 9
    assert choose_factors(boxes, 224, bounds.clip(min=4)).tolist() == [4, 4, 4, 4, 4, 4, 4, 8, 8]


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 2, 4, 8]), st.integers(0, 99))
def test_a_reduced_box_lies_within_the_reduced_image(height: int, width: int, factor: int, seed: int) -> None:
    images = sides(height, width, 4)
    boxes = random_crops(images, draws(4, seed).crops, RATIO)
    small = -(-images // factor)
    reduced = reduce_boxes(boxes, np.full(4, factor), small, whole=True)
    assert (reduced == np.rint(reduced)).all()
    assert (reduced[:, :2] >= 0).all()
    assert (reduced[:, 2:] >= 1).all()
    assert (reduced[:, :2] + reduced[:, 2:] <= small).all()
    assert (np.abs(reduced * factor - boxes) <= 1.5 * factor).all()
