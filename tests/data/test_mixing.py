"""Mixed pairs against the papers' formulas, written out pixel by pixel, and their draws against NumPy's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.mixing import Mixing, draw_beta, draw_mixing, mix_labels, mix_pairs, mix_plain


def images_of(count: int, size: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, size, size, 3)).astype(np.float32)


def mix_by_formula(images: np.ndarray, mixing: Mixing) -> np.ndarray:
    """One pixel after the other."""
    mixed = images.astype(np.float64)
    for row in range(2 * len(mixing.shares)):
        top, left, height, width = mixing.boxes[row // 2]
        for y in range(images.shape[1]):
            for x in range(images.shape[2]):
                is_cut = top <= y < top + height and left <= x < left + width
                kept = 0.0 if is_cut else mixing.weights[row // 2]
                mixed[row, y, x] = kept * images[row, y, x].astype(float) + (1 - kept) * images[row ^ 1, y, x]
    return mixed


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.3, 0.0), (0.0, 1.0), (0.8, 1.0)])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_pairs_are_mixed_by_the_papers_formulas(mixup: float, cutmix: float, count: int) -> None:
    images = images_of(count, 6)
    mixing = draw_mixing(3, 1, np.arange(count // 2), 6, mixup, cutmix)
    expected = mix_by_formula(images, mixing)
    plain = images.copy()
    mix_plain(plain, mixing)
    np.testing.assert_allclose(plain, expected, atol=1e-6)
    together = torch.from_numpy(images.copy()).permute(0, 3, 1, 2)
    mix_pairs(together, torch.from_numpy(mixing.weights), torch.from_numpy(mixing.boxes))
    np.testing.assert_allclose(together.permute(0, 2, 3, 1).numpy(), expected, atol=1e-6)
    assert not count or together.is_contiguous(memory_format=torch.channels_last)
    if count % 2:
        assert np.array_equal(plain[-1], images[-1])  # it has nobody


@settings(max_examples=40)
@given(st.integers(1, 40), st.floats(0.01, 20), st.floats(0.01, 20), st.integers(0, 1000))
def test_what_an_image_keeps_is_what_its_label_counts(size: int, mixup: float, cutmix: float, seed: int) -> None:
    mixing = draw_mixing(seed, 0, np.arange(16), size, mixup, cutmix)
    white, black = np.ones((size, size, 3), np.float32), np.zeros((size, size, 3), np.float32)
    images = np.stack([white, black] * 16)
    mix_plain(images, mixing)
    labels = mix_labels(np.arange(32), mixing)
    np.testing.assert_allclose(images[::2].mean((1, 2, 3)), labels[::2, 2], atol=1e-5)
    np.testing.assert_allclose(1 - images[1::2].mean((1, 2, 3)), labels[1::2, 2], atol=1e-5)
    assert (mixing.boxes >= 0).all()
    assert (mixing.boxes[:, :2] + mixing.boxes[:, 2:] <= size).all()


def test_labels_conserve_their_mass_and_the_last_of_an_odd_batch_keeps_its_own() -> None:
    labels = np.array([4, 2, 2, 7, 5])
    mixing = draw_mixing(0, 0, np.array([10, 11]), 8, 1.0, 0.0)
    mixed = mix_labels(labels, mixing)
    assert mixed.dtype == np.float32
    assert mixed[:, 0].tolist() == labels.tolist()
    assert mixed[:, 1].tolist() == [2, 4, 7, 2, 5]
    assert mixed[4].tolist() == [5, 5, 1]
    mass = np.zeros(8)
    np.add.at(mass, mixed[:, 0].astype(int), mixed[:, 2])
    np.add.at(mass, mixed[:, 1].astype(int), 1 - mixed[:, 2])
    np.testing.assert_allclose(mass, np.bincount(labels, minlength=8), atol=1e-6)
    assert mix_labels(labels[:0], draw_mixing(0, 0, labels[:0], 8, 1.0, 1.0)).shape == (0, 3)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 4.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    count = 20_000
    drawn = draw_beta(alpha, 0, 0, np.arange(count))
    expected = np.random.default_rng(0).beta(alpha, alpha, count)
    at = np.linspace(0.02, 0.98, 49)
    found, wanted = (np.searchsorted(np.sort(values), at) / count for values in (drawn, expected))
    assert np.abs(found - wanted).max() < 0.02
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.04)  # the closed formula


@pytest.mark.parametrize("alpha", [5e-324, 1e-3, 1e3])
def test_extreme_alphas_give_numbers(alpha: float) -> None:
    drawn = draw_beta(alpha, 0, 0, np.arange(1000))
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert drawn.mean() == pytest.approx(0.5, abs=0.05)


def test_one_of_the_two_is_chosen_for_each_pair() -> None:
    mixing = draw_mixing(0, 0, np.arange(4000), 32, 1.0, 1.0)
    is_mixup = mixing.weights < 1
    assert is_mixup.mean() == pytest.approx(0.5, abs=0.03)
    assert not mixing.boxes[is_mixup, 2:].any()
    assert mixing.shares[is_mixup].mean() == pytest.approx(0.5, abs=0.03)
    area = mixing.boxes[~is_mixup, 2:].prod(axis=1) / 32**2
    np.testing.assert_allclose(mixing.shares[~is_mixup], 1 - area)


def test_a_draw_is_that_of_the_pairs_first_sample() -> None:
    together, alone = (draw_mixing(2, 1, samples, 32, 0.4, 1.0) for samples in (np.arange(30), np.array([21])))
    assert [values[21].tolist() for values in together] == [values[0].tolist() for values in alone]
    assert len({str(draw_mixing(seed, epoch, np.arange(4), 32, 0.4, 1.0)) for seed in (0, 1) for epoch in (0, 1)}) == 4
