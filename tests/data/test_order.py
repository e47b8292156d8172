"""The sample order: a bijection, well mixed, the same for any number of ranks and from any cursor."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import (
    Cursor,
    Ledger,
    expected_ledger,
    mix,
    permute,
    plan_step,
    share,
    step_at,
    steps_per_epoch,
)

MASK = 2**64 - 1


def splitmix_reference(*words: int) -> int:
    """`mix` in plain integers."""
    state = 0
    for word in words:
        state = ((state ^ (word & MASK)) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def whole_epoch(num_samples: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(num_samples), num_samples, seed, epoch)


@given(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=4))
def test_mix_agrees_with_plain_integers(words: list[int]) -> None:
    assert int(mix(*words)) == splitmix_reference(*words)


def test_mix_of_an_array_is_elementwise() -> None:
    values = np.array([0, 1, -1, 2**40])
    assert mix(7, values, 3).tolist() == [splitmix_reference(7, value, 3) for value in values.tolist()]


def test_one_flipped_bit_of_the_input_flips_half_the_output() -> None:
    values = np.arange(4096)
    for bit in (0, 13, 40, 63):
        flipped = mix(values) ^ mix(values.astype(np.uint64) ^ np.uint64(1 << bit))
        assert abs(np.bitwise_count(flipped).mean() - 32) < 0.5


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_every_sample_comes_exactly_once(num_samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(whole_epoch(num_samples, seed, epoch)), np.arange(num_samples))


def test_a_late_position_of_a_huge_set_needs_no_memory() -> None:
    num_samples = 10**12 + 39
    samples = permute(np.arange(num_samples - 1000, num_samples), num_samples, 1, 2)
    assert len(set(samples.tolist())) == 1000
    assert samples.min() >= 0
    assert samples.max() < num_samples


@pytest.mark.parametrize("num_samples", [2, 3, 10, 97])
def test_samples_land_everywhere_alike(num_samples: int) -> None:
    epochs = 2000
    landed = np.stack([whole_epoch(num_samples, 5, epoch) for epoch in range(epochs)])
    for position in (0, num_samples // 2, num_samples - 1):
        counts = np.bincount(landed[:, position], minlength=num_samples)
        chi2 = ((counts - epochs / num_samples) ** 2).sum() / (epochs / num_samples)
        freedom = num_samples - 1
        assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_all_orders_of_a_few_samples_are_about_as_likely() -> None:
    epochs = 4000
    seen = [tuple(whole_epoch(4, 3, epoch).tolist()) for epoch in range(epochs)]
    counts = [seen.count(order) for order in itertools.permutations(range(4))]
    assert min(counts) > 0.75 * epochs / 24
    assert max(counts) < 1.25 * epochs / 24


def test_neighbours_and_epochs_are_uncorrelated() -> None:
    num_samples = 4096
    orders = np.stack([whole_epoch(num_samples, 0, epoch) for epoch in range(50)]).astype(float)
    bound = 5 / np.sqrt(num_samples)
    for first, second in itertools.pairwise(orders):
        assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < bound
        assert abs(np.corrcoef(first, second)[0, 1]) < bound
    adjacent = (np.abs(np.diff(orders, axis=1)) == 1).mean()  # a shuffle leaves 2 / n of neighbours together
    assert adjacent < 4 / num_samples


def test_neighbouring_seeds_give_unrelated_orders() -> None:
    same = [(whole_epoch(1000, seed) == whole_epoch(1000, seed + 1)).sum() for seed in range(50)]
    assert np.mean(same) < 2  # one fixed match is expected by chance


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_shares_are_contiguous_and_even(count: int, world_size: int) -> None:
    slices = [share(count, rank, world_size) for rank in range(world_size)]
    assert slices[0][0] == 0
    assert slices[-1][1] == count
    assert all(left[1] == right[0] for left, right in itertools.pairwise(slices))
    sizes = [stop - start for start, stop in slices]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 9), st.integers(0, 5))
def test_the_global_batch_is_the_same_for_any_number_of_ranks(
    num_samples: int, global_batch: int, world_size: int, seed: int
) -> None:
    cursor = Cursor(2, num_samples // 3)
    alone = plan_step(cursor, num_samples, global_batch, 0, 1, seed)
    plans = [plan_step(cursor, num_samples, global_batch, rank, world_size, seed) for rank in range(world_size)]
    assert np.concatenate([plan.samples for plan in plans]).tolist() == alone.samples.tolist()
    assert {(plan.global_size, plan.next) for plan in plans} == {(alone.global_size, alone.next)}


@given(st.integers(1, 300), st.integers(1, 400))
def test_an_epoch_takes_every_sample_and_then_the_next_begins(num_samples: int, global_batch: int) -> None:
    cursor, seen, steps = Cursor(3, 0), [], 0
    while cursor.epoch == 3:
        plan = plan_step(cursor, num_samples, global_batch, 0, 1, 9)
        seen += plan.samples.tolist()
        cursor, steps = plan.next, steps + 1
    assert sorted(seen) == list(range(num_samples))
    assert steps == steps_per_epoch(num_samples, global_batch)
    assert cursor == Cursor(4, 0)


def test_ledgers_of_the_ranks_add_up_to_the_expected_one() -> None:
    world = Ledger()
    for samples in np.array_split(whole_epoch(70_001, 1, 4), 3):
        rank = Ledger()
        rank.add(4, samples)
        world.merge(rank)
    assert world == expected_ledger(70_001, 4)
    assert world.count == 70_001


@pytest.mark.parametrize(
    "samples",
    [[0, 1, 2, 3], [0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 3], [0, 1, 2, 3, 5]],
    ids=["lost", "doubled", "one for another", "foreign"],
)
def test_the_ledger_tells_a_wrong_epoch(samples: list[int]) -> None:
    ledger = Ledger()
    ledger.add(0, np.array(samples))
    assert ledger != expected_ledger(5, 0)


def test_the_ledger_tells_epochs_apart() -> None:
    assert expected_ledger(5, 0) != expected_ledger(5, 1)


@given(
    st.integers(1, 150),
    st.integers(1, 60),
    st.integers(0, 2**32),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6)), min_size=1, max_size=6),
)
def test_an_epoch_is_complete_whatever_ranks_take_it_up(
    num_samples: int, global_batch: int, seed: int, epoch: int, parts: list[tuple[int, int]]
) -> None:
    """A run is stopped and taken up by other numbers of ranks, each with a ledger of its own from there on."""
    cursor, seen, ledger = Cursor(epoch), [], Ledger()
    for world_size, steps in itertools.cycle(parts):
        ranks = [Ledger() for _ in range(world_size)]
        for _ in range(steps):
            plans = [plan_step(cursor, num_samples, global_batch, rank, world_size, seed) for rank in range(world_size)]
            for own, plan in zip(ranks, plans, strict=True):
                own.add(plan.epoch, plan.samples)
                seen += plan.samples.tolist()
            cursor = plans[0].next
            if cursor.epoch > epoch:
                break
        for own in ranks:  # what a checkpoint does
            ledger.merge(own)
        if cursor.epoch > epoch:
            break
    assert sorted(seen) == list(range(num_samples))
    assert ledger == expected_ledger(num_samples, epoch)


@given(st.integers(1, 200), st.integers(0, 5), st.data())
def test_the_ledger_tells_any_lost_or_doubled_sample(num_samples: int, epoch: int, data: st.DataObject) -> None:
    counts = np.ones(num_samples, np.int64)
    for sample in data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=8)):
        counts[sample] = data.draw(st.integers(0, 3))
    ledger = Ledger()
    ledger.add(epoch, np.repeat(np.arange(num_samples), counts))
    assert (ledger == expected_ledger(num_samples, epoch)) == bool((counts == 1).all())


@given(st.integers(1, 90), st.integers(1, 40), st.integers(0, 2))
def test_steps_are_numbered_from_any_cursor_as_by_counting(num_samples: int, global_batch: int, epochs: int) -> None:
    cursor, step = Cursor(), 0
    while cursor.epoch <= epochs:
        assert step_at(cursor, num_samples, global_batch) == step
        cursor, step = plan_step(cursor, num_samples, global_batch, 0, 1, seed=0).next, step + 1


@given(st.integers(1, 90), st.integers(0, 89), st.integers(1, 40), st.integers(0, 3))
def test_from_any_place_an_epoch_ends_with_its_last_step(
    num_samples: int, position: int, global_batch: int, epoch: int
) -> None:
    cursor = Cursor(epoch, position % num_samples)
    step = step_at(cursor, num_samples, global_batch)
    while cursor.epoch == epoch:
        cursor, step = plan_step(cursor, num_samples, global_batch, 0, 1, seed=0).next, step + 1
    assert step == (epoch + 1) * steps_per_epoch(num_samples, global_batch)
