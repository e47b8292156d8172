"""The noise scale against gradients whose noise is known."""

import numpy as np
import pytest

from lockstep.engine.noise import NoiseScale


def test_it_finds_the_noise_that_gradients_were_drawn_with() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(0, 1, 200)
    deviation = 3.0  # of every sample's gradient in every dimension: tr(Σ) = 200 · 9
    shares = [5, 6, 5]
    noise = NoiseScale()
    estimates = []
    for _ in range(400):
        samples = truth + rng.normal(0, deviation, (sum(shares), len(truth)))
        means = [part.mean(axis=0) for part in np.split(samples, np.cumsum(shares)[:-1])]
        noise.add(
            small_square=float(np.mean([mean @ mean for mean in means])),
            small_inverse=float(np.mean([1 / share for share in shares])),
            big_square=float(samples.mean(axis=0) @ samples.mean(axis=0)),
            big=sum(shares),
        )
        estimates.append(noise.samples)
    expected = len(truth) * deviation**2 / (truth @ truth)
    assert np.mean([value for value in estimates[20:] if value]) == pytest.approx(expected, rel=0.05)
    assert estimates[0] == pytest.approx(expected, rel=0.6)  # the first is no smaller for the averages' zero start


def test_nothing_is_known_before_the_first_estimate_or_of_one_rank() -> None:
    noise = NoiseScale()
    assert noise.samples is None
    noise.add(small_square=2.0, small_inverse=1 / 16, big_square=2.0, big=16)
    assert noise.samples is None


def test_chance_that_makes_the_noise_negative_is_not_a_number() -> None:
    noise = NoiseScale()
    noise.add(small_square=1.0, small_inverse=1 / 8, big_square=2.0, big=16)
    assert noise.samples is None
