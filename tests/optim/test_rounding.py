"""Rounding to a few bits: unbiased, within the range, and the same whoever draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.optim.rounding import FORMATS, MASK, draw_uniform, mix32, round_sum, split_seed

COUNT = 1 << 14
every_width = pytest.mark.parametrize("bits", FORMATS)


def mix_by_hand(word: int) -> int:
    """The hash in Python's own integers."""
    word ^= word >> 16
    word = word * 0x7FEB352D % 2**32
    word ^= word >> 15
    word = word * 0x846CA68B % 2**32
    return word ^ (word >> 16)


def draw_by_hand(seed: int, step: int, position: int) -> float:
    low = mix_by_hand((seed + 0x9E3779B9) % 2**32)
    high = mix_by_hand(low ^ (seed >> 32) % 2**32)
    first = mix_by_hand((low + step) % 2**32)
    second = mix_by_hand(high ^ first)
    return (mix_by_hand((mix_by_hand(position % 2**32 ^ first) + second) % 2**32) >> 8) / 2**24


def draw(seed: int, step: int, count: int = COUNT) -> torch.Tensor:
    return draw_uniform(split_seed(seed), torch.tensor(step), torch.arange(count))


def round_to_bits(x: torch.Tensor, uniform: torch.Tensor, bits: int) -> torch.Tensor:
    return round_sum(torch.zeros_like(x), x, uniform, bits)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 2**34), min_size=1, max_size=20))
def test_chance_is_the_hash_of_seed_step_and_position(seed: int, step: int, positions: list[int]) -> None:
    found = draw_uniform(split_seed(seed), torch.tensor(step), torch.tensor(positions))
    assert found.tolist() == [draw_by_hand(seed, step, position) for position in positions]


@settings(max_examples=50)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**30), st.sampled_from(list(FORMATS)), st.floats(-1.2, 1.2))
def test_rounding_is_unbiased_and_never_leaves_the_range(seed: int, step: int, bits: int, share: float) -> None:
    """Over many draws the mean is the number itself, or the end of the range that it lies beyond."""
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    x = torch.tensor(share * most, dtype=torch.float32)
    found = round_to_bits(x.expand(COUNT), draw(seed, step), bits)
    assert found.dtype == FORMATS[bits]
    whole = found.double()
    assert least <= whole.min()
    assert whole.max() <= most
    expected = min(max(x.item(), least), most)
    assert set(whole.tolist()) <= {math.floor(expected), math.ceil(expected)}
    fraction = expected - math.floor(expected)
    # Six deviations of a mean over so many draws: one example of a billion would fail by chance.
    assert abs(whole.mean().item() - expected) <= 6 * math.sqrt(fraction * (1 - fraction) / COUNT) + 1e-6 + 2**-23


@settings(max_examples=50)
@given(st.integers(0, 2**30), st.sampled_from(list(FORMATS)), st.data())
def test_a_move_from_anywhere_on_the_grid_is_unbiased_and_stays_on_it(
    step: int, bits: int, data: st.DataObject
) -> None:
    """As an offset moves: whole already, and by a number of any size, near the ends of the range too."""
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    start = data.draw(st.one_of(st.integers(least, most), st.sampled_from([least, least + 1, -1, 0, most - 1, most])))
    move = torch.tensor(data.draw(st.floats(-1.5, 1.5) | st.floats(2.0 * least, 2.0 * most)), dtype=torch.float32)
    stored = torch.full((COUNT,), start, dtype=FORMATS[bits])
    found = round_sum(stored, move.expand(COUNT), draw(11, step), bits)
    assert found.dtype == FORMATS[bits]
    target = start + move.item()
    low, high = (min(max(bound, least), most) for bound in (math.floor(target), math.ceil(target)))
    assert set(found.tolist()) <= {low, high}
    if least <= target <= most:
        fraction = target - math.floor(target)
        spread = 6 * math.sqrt(fraction * (1 - fraction) / COUNT) + 1e-6 + 2**-23
        assert abs(found.double().mean().item() - target) <= spread


@every_width
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_any_number_ends_within_the_range(bits: int, numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    found = round_to_bits(x, draw(3, 5, len(numbers)), bits).tolist()
    most = 2 ** (bits - 1) - 1
    for number, whole in zip(numbers, found, strict=True):
        inside = min(max(number, -most - 1), most)
        assert math.floor(inside) <= whole <= math.ceil(inside)


@every_width
def test_whole_numbers_stay(bits: int) -> None:
    x = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).float()
    assert torch.equal(round_to_bits(x, draw(0, 0, len(x)), bits).float(), x)


def test_draws_are_even_and_unlike_those_of_other_steps_seeds_and_places() -> None:
    draws = {key: draw(*key) for key in [(0, 0), (0, 1), (1, 0), (2**40, 0), (0, 2)]}
    for uniform in draws.values():
        counts = np.histogram(uniform.numpy(), bins=64, range=(0, 1))[0]
        assert ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum() < 120  # chi-squared of 63: above by chance 1 in 1e5
    rows = torch.stack(list(draws.values())).double()
    related = torch.corrcoef(torch.cat([rows, rows[:1].roll(1, dims=1)])) - torch.eye(len(rows) + 1)
    assert related.abs().max() < 6 / math.sqrt(COUNT)


def test_the_hash_is_a_bijection_of_words() -> None:
    words = torch.arange(1 << 16) * 65_521 & MASK
    mixed = mix32(words)
    assert len(mixed.unique()) == len(words.unique())
    assert [mix_by_hand(word) for word in words[:100].tolist()] == mixed[:100].tolist()
