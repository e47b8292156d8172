"""Costs against steps and bytes counted by hand, and fits against curves with known noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comm.cost import LARGE_BYTES, NAMES, Choice, Fit, Timing, fit_cost, predict_seconds
from lockstep.comm.topology import Link, Topology, find_topology, group_sizes
from lockstep.errors import LockstepError

SIZES = [1024 * 4**power for power in range(9)]  # 1 KiB … 64 MiB
FLAT, DOUBLING = Choice("flat"), Choice("doubling")


def lay_out(sizes: list[int], intra: Link, inter: Link) -> Topology:
    hosts = [f"node{node}" for node, size in enumerate(sizes) for _ in range(size)]
    return Topology(find_topology(hosts).nodes, intra, inter)


def count_steps(choice: Choice, sizes: list[int]) -> float:
    """Seconds over links that take a second a step and nothing for the bytes."""
    step = Link(1.0, math.inf)
    return predict_seconds(choice, 1e9, lay_out(sizes, step, step))


@pytest.mark.parametrize(
    ("choice", "steps"),
    [
        (FLAT, {64: 126, 256: 510, 1024: 2046, 2048: 4094}),
        # Once to the masters, halving and doubling among them, once back.
        (Choice("hierarchical", 8), {64: 8, 256: 12, 1024: 16, 2048: 18}),
        (Choice("hierarchical", 16), {64: 6, 256: 10, 1024: 14, 2048: 16}),
        (Choice("torus", 16), {64: 6, 256: 10, 1024: 14, 2048: 16}),
        (DOUBLING, {64: 12, 256: 16, 1024: 20, 2048: 22}),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_steps_of_a_long_message_are_those_the_algorithms_take(
    choice: Choice, steps: dict[int, int], ranks_per_node: int
) -> None:
    for num_ranks, expected in steps.items():
        assert count_steps(choice, [ranks_per_node] * (num_ranks // ranks_per_node)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_ranks", "steps"), [(1, 0), (2, 2), (3, 4), (4, 4), (6, 6), (7, 6), (8, 6), (9, 8), (12, 8)]
)
def test_doubling_pays_two_steps_for_ranks_beyond_a_power_of_two(num_ranks: int, steps: int) -> None:
    assert count_steps(DOUBLING, [num_ranks]) == steps


def sum_among(num_ranks: int, num_bytes: float, is_short: bool, link: Link) -> float:
    """Seconds of doubling, or halving and doubling, by the textbook; a count that is no power of two pays two more."""
    rounds = int(math.log2(num_ranks))
    whole = link.latency_s + num_bytes / link.bytes_per_s
    extra = 0.0 if num_ranks == 2**rounds else 2 * whole
    if is_short:
        return rounds * whole + extra
    return 2 * rounds * link.latency_s + 2 * (1 - 0.5**rounds) * num_bytes / link.bytes_per_s + extra


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1e8))
def test_over_links_all_alike_the_textbook_formulas_hold(k: int, num_groups: int, num_bytes: float) -> None:
    p, link = k * num_groups, Link(2e-6, 3e9)
    topology = lay_out([1] * p, link, link)
    masters = 2 if num_bytes >= 2 * 2**20 and k > 1 else 1
    expected = {
        FLAT: 2 * (p - 1) * link.latency_s + 2 * (p - 1) / p * num_bytes / link.bytes_per_s,
        DOUBLING: sum_among(p, num_bytes, num_bytes <= 2**18, link),
    }
    for choice, pieces in ((Choice("hierarchical", k), masters), (Choice("torus", k), k)):
        piece = num_bytes / pieces
        inside = link.latency_s + (k - 1) * piece / link.bytes_per_s if k > 1 else 0.0
        expected[choice] = 2 * inside + sum_among(num_groups, piece, piece <= 2**18, link)
    for choice, seconds in expected.items():
        assert predict_seconds(choice, num_bytes, topology) == pytest.approx(seconds, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("choice", "latency", "transfer"),
    [
        # Round the ring: six steps inside nodes, one between, twice; 2 · 7/8 · 64 bytes over the slow link.
        (FLAT, 2 * (6 + 10), 112),
        # Three messages of 64 bytes into each master and out again; between two masters 64 bytes.
        (Choice("hierarchical", 4), 1 + 10 + 1, 48 + 64 + 48),
        # Masters 0, 2, 4, 6 double: with the neighbour inside, then two of each node across its link.
        (Choice("hierarchical", 2), 1 + 1 + 10 + 1, 16 + 16 + 128 + 16),
        # One group over both nodes, and a single master: four messages cross the slow link.
        (Choice("hierarchical", 8), 10 + 10, 256 + 256),
        # Three messages of 16 bytes from each rank, twice; four columns of 16 bytes share the slow link.
        (Choice("torus", 4), 1 + 10 + 1, 12 + 4 * 16 + 12),
        # Two columns of four ranks: 32 bytes inside, then four times 32 across the slow link.
        (Choice("torus", 2), 1 + 1 + 10 + 1, 8 + 8 + 128 + 8),
        # 64 bytes inside, twice, then four times 64 between.
        (DOUBLING, 1 + 1 + 10, 16 + 16 + 256),
    ],
    ids=str,
)
def test_two_nodes_of_four_by_hand(choice: Choice, latency: float, transfer: float) -> None:
    free, slow = math.inf, 0.0
    assert predict_seconds(choice, 64, lay_out([4, 4], Link(1, free), Link(10, free))) == pytest.approx(latency)
    assert predict_seconds(choice, 64, lay_out([4, 4], Link(slow, 4), Link(slow, 1))) == pytest.approx(transfer)


@pytest.mark.parametrize(
    ("choice", "latency", "transfer"),
    [
        (FLAT, 2 * (2 + 10), 2 * 3 / 4 * 48),
        (Choice("hierarchical", 3), 1 + 10 + 1, 24 + 48 + 24),  # the lone rank waits for the other group
        # Groups 01, 2, 3: master 2 folds into 0, which doubles with 3.
        (Choice("hierarchical", 2), 1 + (1 + 10 + 1) + 1, 12 + (12 + 48 + 12) + 12),
        # The lone rank owns all three pieces of 16 bytes and sums them one after another.
        (Choice("torus", 3), 1 + 3 * 10 + 1, 8 + 3 * 16 + 8),
        # Two pieces of 24 bytes, columns 0-2-3 and 1-2-3, of which 2 and 3 take turns.
        (Choice("torus", 2), 1 + 2 * (1 + 10 + 1) + 1, 6 + 2 * (6 + 24 + 6) + 6),
    ],
    ids=str,
)
def test_uneven_nodes_of_three_and_one_by_hand(choice: Choice, latency: float, transfer: float) -> None:
    assert predict_seconds(choice, 48, lay_out([3, 1], Link(1, math.inf), Link(10, math.inf))) == pytest.approx(latency)
    assert predict_seconds(choice, 48, lay_out([3, 1], Link(0, 4), Link(0, 1))) == pytest.approx(transfer)


def test_a_long_message_is_halved_on_the_way_there_and_doubled_on_the_way_back() -> None:
    topology = lay_out([4, 4], Link(0, 4), Link(0, 1))
    # Of 64 MiB: 32 and 16 inside, 8 of each of four ranks between, and back.
    assert predict_seconds(DOUBLING, 64 << 20, topology) == pytest.approx(2 * (8 + 4 + 32) * 2**20)
    # Two masters with half the message each: three halves in, half of a half across from both, and back.
    expected = 2 * (3 * 32 / 4 + 2 * 16) * 2**20
    assert predict_seconds(Choice("hierarchical", 4), 64 << 20, topology) == pytest.approx(expected)


def test_a_ring_over_interleaved_ranks_crosses_nodes_at_every_hop() -> None:
    nodes = find_topology(["a", "b", "a", "b"]).nodes
    assert predict_seconds(FLAT, 0, Topology(nodes, Link(1, 1), Link(10, 1))) == 2 * 3 * 10
    # Each node sends from two ranks at once: 2 · 3/4 · 8 bytes from each.
    assert predict_seconds(FLAT, 8, Topology(nodes, Link(0, 1e9), Link(0, 1))) == pytest.approx(24)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(1, 12),
    st.floats(0, 1e5) | st.floats(1e7, 1e8),  # on either side of what makes the algorithms change their ways
)
def test_every_choice_has_a_price_that_rises_with_the_message(sizes: list[int], k: int, num_bytes: float) -> None:
    topology = lay_out(sizes, Link(1e-6, 1e10), Link(1e-5, 1e9))
    for name in NAMES:
        choice = Choice(name, k) if name in ("hierarchical", "torus") else Choice(name)
        price, more = (predict_seconds(choice, size, topology) for size in (num_bytes, num_bytes + 1e5))
        assert (price == more == 0) if sum(sizes) == 1 else (0 < price < more < math.inf)


def test_slow_links_between_nodes_make_groups_worth_while_for_short_messages_only() -> None:
    """The paper's hybrid rule: hierarchical for small tensors, a ring for large ones."""
    topology = lay_out([16] * 64, Link(5e-6, 12.5e9), Link(5e-6, 12.5e9))
    short, long = 2**20, 2**28
    grouped = Choice("hierarchical", 16)
    assert 16 in group_sizes(topology)
    assert predict_seconds(grouped, short, topology) < predict_seconds(FLAT, short, topology) / 3
    assert predict_seconds(grouped, long, topology) > predict_seconds(FLAT, long, topology)


def test_an_unknown_algorithm_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match="no all-reduce 'star'; choose one of flat, hierarchical"):
        predict_seconds(Choice("star"), 1, find_topology(["a", "b"]))


@pytest.mark.parametrize("choice", [FLAT, DOUBLING, Choice("hierarchical", 8), Choice("torus", 1)])
def test_a_choice_is_written_and_read_back(choice: Choice) -> None:
    assert Choice.parse(str(choice)) == choice


def test_a_choice_is_written_for_people() -> None:
    assert [str(choice) for choice in (FLAT, Choice("hierarchical", 8))] == ["flat", "hierarchical/8"]


@pytest.mark.parametrize("text", ["", "ring", "torus", "torus/", "torus/0", "torus/-2", "torus/x", "torus/²", "flat/4"])
def test_a_choice_that_does_not_exist_is_a_sentence(text: str) -> None:
    with pytest.raises(LockstepError, match="all-reduce"):
        Choice.parse(text)


@st.composite
def curves(draw: st.DrawFn, steepest: float) -> Fit:
    """One line, or two whose second is up to `steepest` times as steep as the first."""
    latency = 10 ** draw(st.floats(-5, -1))
    slope = latency / 10 ** draw(st.floats(3, 7.5))
    if draw(st.booleans()):
        return Fit(latency, slope)
    return Fit(latency, slope * draw(st.floats(1 / 30, steepest)), 10 ** draw(st.floats(4.2, 6.6)), slope)


def measure(curve: Fit, seed: int, noise: float, choice: Choice = FLAT) -> list[Timing]:
    """Five samples a size, up to two of them disturbed to as much as ten times their length."""
    rng = np.random.default_rng(seed)
    samples = []
    for size in SIZES:
        factors = rng.uniform(1 - noise, 1 + noise, 5)
        factors[: rng.integers(0, 3)] *= rng.uniform(2, 10)
        samples += [Timing(choice, size, curve.predict(size) * factor) for factor in factors.tolist()]
    return samples


def worst_error(fit: Fit, curve: Fit, sizes: list[int]) -> float:
    return max(abs(fit.predict(size) / curve.predict(size) - 1) for size in sizes)


@settings(deadline=None, max_examples=60)
@given(curves(steepest=10), st.integers(0, 2**32))
def test_a_noisy_curve_is_fitted_within_20_percent_of_the_truth_from_256_kib(curve: Fit, seed: int) -> None:
    fit = fit_cost(measure(curve, seed, noise=0.1))[FLAT]
    assert worst_error(fit, curve, [size for size in SIZES if size >= LARGE_BYTES]) < 0.2
    assert fit.median_error <= fit.max_error < 0.25  # of noisy samples, not of the truth


@settings(deadline=None, max_examples=60)
@given(curves(steepest=1), st.integers(0, 2**32))
def test_a_fit_holds_between_the_sizes_that_were_measured(curve: Fit, seed: int) -> None:
    fit = fit_cost(measure(curve, seed, noise=0.05))[FLAT]
    assert worst_error(fit, curve, [2 * size for size in SIZES if LARGE_BYTES <= size < SIZES[-1]]) < 0.2


@settings(deadline=None, max_examples=40)
@given(curves(steepest=10), st.integers(0, 2**32))
def test_no_message_is_said_to_take_less_than_a_shorter_one(curve: Fit, seed: int) -> None:
    fit = fit_cost(measure(curve, seed, noise=0.3))[FLAT]
    predicted = [fit.predict(size) for size in range(0, 2 * SIZES[-1], SIZES[-1] // 100)]
    assert predicted == sorted(predicted)
    assert predicted[0] >= 0


def test_an_exact_line_is_found_exactly_and_needs_no_knee() -> None:
    fit = fit_cost([Timing(FLAT, size, 3e-4 + 2e-9 * size) for size in SIZES])[FLAT]
    assert (fit.latency_s, fit.seconds_per_byte, fit.knee_bytes) == (pytest.approx(3e-4), pytest.approx(2e-9), 0)
    assert fit.max_error == pytest.approx(0, abs=1e-9)


def test_a_curve_with_a_knee_is_found_to_have_one() -> None:
    truth = Fit(0.17, 3e-8, 3e5, 2.4e-7)  # as Gloo's ring over 32 ranks on two cores
    fit = fit_cost([Timing(FLAT, size, truth.predict(size)) for size in SIZES])[FLAT]
    assert fit.knee_bytes == pytest.approx(3e5, rel=0.1)
    assert fit.seconds_per_byte == pytest.approx(3e-8, rel=0.05)
    assert fit.short_seconds_per_byte == pytest.approx(2.4e-7, rel=0.1)


def test_the_error_is_that_of_the_median_of_each_size() -> None:
    samples = [Timing(FLAT, 2**20 * count, 1.0 + count) for count in (1, 2, 4, 8) for _ in range(2)]
    disturbed = [*samples, Timing(FLAT, 2**20, 4.0)]
    assert fit_cost(disturbed)[FLAT].max_error == pytest.approx(0, abs=1e-9)
    off = [*samples[2:], Timing(FLAT, 2**20, 4.0)]  # now nothing else was measured at 1 MiB
    assert fit_cost(off)[FLAT].max_error > 0.1


def test_the_error_leaves_out_short_messages_unless_there_are_no_others() -> None:
    short = [Timing(FLAT, 1024, 5.0), Timing(FLAT, 2048, 1.0)]
    long = [Timing(FLAT, 2**20 * count, 1.0 + count) for count in (1, 2, 4, 8)]
    fit = fit_cost([*short, *long])[FLAT]
    assert fit.max_error == max(abs(fit.predict(size) / seconds - 1) for _, size, seconds in long)
    assert fit.max_error < abs(fit.predict(1024) / 5.0 - 1)
    alone = fit_cost(short)[FLAT]
    assert alone.max_error == max(abs(alone.predict(size) / seconds - 1) for _, size, seconds in short) > 0


def test_each_choice_gets_its_own_curve() -> None:
    torus = Choice("torus", 4)
    fits = fit_cost([*measure(Fit(1e-3, 1e-9), 0, 0.0), *measure(Fit(1e-4, 5e-9), 1, 0.0, torus)])
    assert set(fits) == {FLAT, torus}
    assert fits[FLAT].latency_s == pytest.approx(1e-3)
    assert fits[torus].seconds_per_byte == pytest.approx(5e-9)
    assert fit_cost([]) == {}


def test_two_sizes_are_enough_and_one_is_a_sentence() -> None:
    fit = fit_cost([Timing(FLAT, 0, 1.0), Timing(FLAT, 100, 3.0)])[FLAT]
    assert (fit.latency_s, fit.seconds_per_byte) == (pytest.approx(1.0), pytest.approx(0.02))
    with pytest.raises(LockstepError, match="flat was measured at one size only"):
        fit_cost([Timing(FLAT, 100, 3.0), Timing(FLAT, 100, 3.0)])


@pytest.mark.parametrize(("num_bytes", "seconds"), [(8, 0.0), (8, -1.0), (8, math.nan), (8, math.inf), (-1, 1.0)])
def test_an_impossible_measurement_is_a_sentence(num_bytes: int, seconds: float) -> None:
    with pytest.raises(LockstepError, match="measure again"):
        fit_cost([Timing(FLAT, num_bytes, seconds), Timing(FLAT, 100, 1.0)])
