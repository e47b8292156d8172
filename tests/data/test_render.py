"""The rendered pictures: a pure function of (split, number), with edges where geometry puts them."""

import numpy as np
import pytest

from lockstep.data.render import CLASSES, SHAPES, SIDE, render


def test_an_image_does_not_depend_on_its_company() -> None:
    together = render(0, "star", np.arange(20, 40))
    assert np.array_equal(render(0, "star", np.array([33]))[0], together[13])


def test_splits_and_numbers_differ() -> None:
    images = [render(split, "disc", np.array([number]))[0] for split in (0, 1) for number in (0, 1)]
    assert all(np.abs(a.astype(int) - b).mean() > 5 for i, a in enumerate(images) for b in images[:i])


def test_shapes_stay_inside_the_image() -> None:
    for shape in CLASSES:
        axis = np.linspace(-1.5, 1.5, 61, dtype=np.float32)
        distance = SHAPES[shape](*np.meshgrid(axis, axis))
        inside = np.hypot(*np.meshgrid(axis, axis))[distance < 0]
        assert 0.5 < inside.max() < 1.1


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        ("disc", np.pi * 0.8**2),
        ("square", 1.44**2),
        ("ring", np.pi * (0.9**2 - 0.5**2)),
        ("triangle", 3 * np.sqrt(3) / 4),
        ("star", 5 * 0.4 * np.sin(np.pi / 5)),
        ("bar", 1.6 * 0.5 + np.pi * 0.25**2),
    ],
)
def test_a_shape_has_the_area_of_its_geometry(shape: str, area: float) -> None:
    axis = np.linspace(-1.5, 1.5, 601, dtype=np.float32)
    inside = SHAPES[shape](*np.meshgrid(axis, axis)) < 0
    assert inside.mean() * 9 == pytest.approx(area, rel=0.02)


def test_a_picture_uses_the_range_without_saturating() -> None:
    pictures = render(0, "cross", np.arange(50))
    assert pictures.shape == (50, SIDE, SIDE, 3)
    assert 90 < pictures.mean() < 165
    assert ((pictures == 0) | (pictures == 255)).mean() < 0.1
