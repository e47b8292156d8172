"""TrivialAugment against Pillow's own functions, level by level, and its draws against what the paper says of them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from lockstep.data.policy import (
    NUM_OPERATIONS,
    STRENGTHS,
    Operations,
    apply_operation,
    apply_operations,
    draw_operations,
    plan_amounts,
)
from tests.data.pictures import picture

# In the paper's order of magnitudes: strength 0…30 and sign → what Pillow is asked for.
ORACLE: list[Callable[[Image.Image, float, int], Image.Image]] = [
    lambda image, part, sign: image,
    lambda image, part, sign: image.transform(image.size, Image.Transform.AFFINE, (1, sign * 0.99 * part, 0, 0, 1, 0)),
    lambda image, part, sign: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, sign * 0.99 * part, 1, 0)),
    lambda image, part, sign: image.transform(
        image.size, Image.Transform.AFFINE, (1, 0, sign * int(32 * part), 0, 1, 0)
    ),
    lambda image, part, sign: image.transform(
        image.size, Image.Transform.AFFINE, (1, 0, 0, 0, 1, sign * int(32 * part))
    ),
    lambda image, part, sign: image.rotate(sign * 135 * part),
    lambda image, part, sign: ImageEnhance.Brightness(image).enhance(1 + sign * 0.99 * part),
    lambda image, part, sign: ImageEnhance.Color(image).enhance(1 + sign * 0.99 * part),
    lambda image, part, sign: ImageEnhance.Contrast(image).enhance(1 + sign * 0.99 * part),
    lambda image, part, sign: ImageEnhance.Sharpness(image).enhance(1 + sign * 0.99 * part),
    lambda image, part, sign: ImageOps.posterize(image, 8 - round(6 * part)),
    lambda image, part, sign: ImageOps.solarize(image, 255 - 8.5 * round(30 * part)),
    lambda image, part, sign: ImageOps.autocontrast(image),
    lambda image, part, sign: ImageOps.equalize(image),
]


def squares_of(size: int) -> list[np.ndarray]:
    """Noise, a photograph, one in few levels, one that is flat but for a pixel, and one of a single level."""
    random = np.random.default_rng(size)
    noise = random.integers(0, 256, (size, size, 3), dtype=np.uint8)
    few = random.integers(100, 104, (size, size, 3), dtype=np.uint8)
    spot = np.full((size, size, 3), 77, np.uint8)
    spot[0, -1] = 200
    return [noise, picture(size, size), few, spot, np.full((size, size, 3), 31, np.uint8)]


@pytest.mark.parametrize("size", [1, 2, 33])
def test_every_operation_at_every_strength_gives_pillows_levels(size: int) -> None:
    cases = [(kind, strength, sign) for kind in range(NUM_OPERATIONS) for strength in range(31) for sign in (-1, 1)]
    pictures = squares_of(size)
    squares = np.stack([pictures[number % len(pictures)] for number in range(len(cases))])
    expected = [
        np.asarray(ORACLE[kind](Image.fromarray(square), strength / 30, sign))
        for square, (kind, strength, sign) in zip(squares, cases, strict=True)
    ]
    kinds, strengths, signs = map(np.array, zip(*cases, strict=True))
    operations = Operations(kinds, plan_amounts(kinds, strengths, signs < 0))
    at_once = torch.from_numpy(squares.copy())
    apply_operations(at_once, operations, lambda array: array)
    for case, wanted, found, square, amount in zip(
        cases, expected, at_once.numpy(), squares, operations.amounts, strict=True
    ):
        assert np.array_equal(found, wanted), case
        assert np.array_equal(apply_operation(square, case[0], float(amount)), wanted), case


def test_a_square_is_changed_whatever_its_company() -> None:
    squares = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 9, 9, 3), dtype=np.uint8))
    operations = draw_operations(5, 1, np.arange(40))
    together = squares.clone()
    apply_operations(together, operations, lambda array: array)
    for row in range(40):
        alone = squares[row : row + 1].clone()
        apply_operations(alone, operations.select(slice(row, row + 1)), lambda array: array)
        assert torch.equal(alone[0], together[row])


def test_operations_and_strengths_are_equally_likely() -> None:
    count = 28_000
    operations = draw_operations(0, 0, np.arange(count))
    shares = np.bincount(operations.kinds, minlength=NUM_OPERATIONS) / count
    assert len(shares) == NUM_OPERATIONS
    assert np.abs(shares * NUM_OPERATIONS - 1).max() < 0.1
    angles = operations.amounts[operations.kinds == 5]
    assert abs((angles < 0).mean() - (angles > 0).mean()) < 0.1
    assert np.allclose(np.unique(np.abs(angles)), np.linspace(0, 135, STRENGTHS))
    assert np.abs(np.histogram(np.abs(angles), 5, (0, 135.1))[0] / len(angles) - 0.2).max() < 0.04
    assert set(operations.amounts[operations.kinds == 10]) == {2, 3, 4, 5, 6, 7, 8}


def test_draws_are_those_of_the_sample_in_its_epoch() -> None:
    together = draw_operations(3, 2, np.arange(20))
    alone = draw_operations(3, 2, np.array([17]))
    assert (alone.kinds[0], alone.amounts[0]) == (together.kinds[17], together.amounts[17])
    assert len({str(draw_operations(seed, epoch, np.arange(9))) for seed in range(3) for epoch in range(3)}) == 9
