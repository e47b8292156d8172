"""What is worth trying and what is taken, from given measurements."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.cost import FLAT, Choice, Timing, predict_seconds
from lockstep.comm.fusion import Buffer, ReductionPlan
from lockstep.comm.topology import Link, Topology, find_topology
from lockstep.config import CommConfig, TrainConfig
from lockstep.layout import Layout, ParameterSpec, plan_layout
from lockstep.plan.choose import (
    MAX_PEERS,
    PLAIN,
    WORTH_MEASURING,
    _draw_curves,
    _pick_seconds,
    assign_choices,
    count_peers,
    default_reduction,
    expect_reduction,
    explain_choice,
    is_worth_compiling,
    keep_affordable,
    list_choices,
    list_executions,
    list_sizes,
    pick_choice,
    pick_trial,
    predict_by_links,
    propose_reductions,
)
from lockstep.plan.plan import Execution
from lockstep.plan.profile import Trial

DOUBLING = Choice("doubling")
MESSAGES = (
    Timing(FLAT, 1024, 0.010),
    Timing(FLAT, 4096, 0.011),
    Timing(FLAT, 1 << 20, 0.020),
    Timing(DOUBLING, 1024, 0.001),
    Timing(DOUBLING, 4096, 0.003),
    Timing(DOUBLING, 1 << 20, 0.100),
    Timing(Choice("torus", 2), 1024, 0.0005),  # given up after the first size
)


def train(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"global_batch": 16, "duration": "1ep", **changes})


def test_sizes_go_up_by_four_to_the_whole_gradient() -> None:
    assert list_sizes(300_000) == [1024, 4096, 16384, 65536, 262144]
    assert list_sizes(600_000) == [1024, 4096, 16384, 65536, 262144, 600_000]
    assert list_sizes(10) == [1024]


def test_between_cpus_every_algorithm_is_a_candidate_and_pytorchs_own_comes_first() -> None:
    choices = list_choices(find_topology(["a"] * 4 + ["b"] * 4), "gloo")
    assert choices[0] == FLAT
    assert {choice.algorithm for choice in choices} == {"flat", "doubling", "hierarchical", "torus"}
    assert Choice("hierarchical", 4) in choices


def test_inside_a_node_nothing_can_win_beside_nccl() -> None:
    assert list_choices(find_topology(["a"] * 8), "nccl") == [FLAT]
    choices = list_choices(find_topology([name for name in "abcd" for _ in range(8)]), "nccl")
    assert set(choices) == {FLAT, DOUBLING, Choice("hierarchical", 8), Choice("torus", 8)}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 8), (1, 512), (512, 8), (8, 128)])
def test_no_candidate_has_more_than_64_peers_a_rank(backend: str, nodes: int, ranks: int) -> None:
    hosts = [f"n{node}" for node in range(nodes) for _ in range(ranks)]
    topology = find_topology(hosts)
    choices = list_choices(topology, backend)
    assert choices[0] == FLAT
    assert all(count_peers(choice, topology) <= MAX_PEERS for choice in choices)


def test_one_group_of_all_ranks_talks_to_all_of_them() -> None:
    assert count_peers(Choice("hierarchical", 512), find_topology(["a"] * 512)) >= 511


def test_the_links_of_a_cluster_file_leave_hopeless_candidates_out() -> None:
    nodes = tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(4))
    slow_inside = Topology(nodes, intra=Link(1e-3, 1e6), inter=Link(1e-6, 1e10))
    kept = list_choices(slow_inside, "gloo")
    everything = list_choices(Topology(nodes), "gloo")
    assert set(kept) < set(everything)
    best = min(predict_seconds(choice, 1024, slow_inside) for choice in everything if choice != FLAT)
    assert any(predict_seconds(choice, 1024, slow_inside) == best for choice in kept)


@pytest.mark.parametrize("nodes", [((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2), (3, 4, 5, 6)), ((0, 2), (1, 3))])
def test_links_promise_what_a_count_of_every_message_says(nodes: tuple[tuple[int, ...], ...]) -> None:
    topology = Topology(nodes, intra=Link(1e-6, 1e10), inter=Link(1e-5, 1e9))
    for choice in [FLAT, DOUBLING, Choice("hierarchical", 3), Choice("hierarchical", 4), Choice("torus", 2)]:
        for size in (1024, 1 << 20, 1 << 26):
            counted = predict_seconds(choice, size, topology)
            assert predict_by_links(choice, size, topology) == pytest.approx(counted, rel=1e-12)


def test_thousands_of_ranks_with_links_are_weighed_at_once() -> None:
    nodes = tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(512))
    topology = Topology(nodes, intra=Link(2e-6, 2e10), inter=Link(1e-5, 1.25e9))
    begun = time.perf_counter()
    choices = list_choices(topology, "gloo")
    assert time.perf_counter() - begun < 1  # 10 ms; every message counted, 7 s
    best = min(predict_by_links(choice, 1 << 26, topology) for choice in choices[1:])
    assert predict_by_links(choices[1], 1 << 26, topology) <= WORTH_MEASURING * best


def test_the_first_candidate_stays_and_others_as_they_fit() -> None:
    seconds = {"plain": 5.0, "long": 3.0, "short": 1.0, "shorter": 0.5}
    assert keep_affordable(seconds, 0.0) == ["plain"]
    assert keep_affordable(seconds, -1.0) == ["plain"]
    assert keep_affordable(seconds, 7.0) == ["plain", "short", "shorter"]
    assert keep_affordable(seconds, 9.5) == list(seconds)


def test_a_reduction_is_expected_to_take_all_its_messages() -> None:
    buffers = (Buffer(0, 1024, 0, 3), Buffer(1024, 1024 + (1 << 18), 3, 9))
    reduction = ReductionPlan(buffers, (DOUBLING, FLAT), overlap=True)
    assert expect_reduction(MESSAGES, reduction) == pytest.approx(0.003 + 0.020)
    # In halves the first is a message of 2 KiB.
    assert expect_reduction(MESSAGES, reduction, 2) < 0.003 + 0.020


def test_the_quickest_choice_wins_at_each_size() -> None:
    assert pick_choice(MESSAGES, 4096) == (DOUBLING, 0.003)
    assert pick_choice(MESSAGES, 1 << 20) == (FLAT, 0.020)


def test_times_between_measured_sizes_lie_on_a_line() -> None:
    choice, seconds = pick_choice(MESSAGES, 2560)
    assert choice == DOUBLING
    assert seconds == pytest.approx(0.002)


def test_beyond_the_largest_size_time_is_proportional() -> None:
    assert pick_choice(MESSAGES, 4 << 20) == (FLAT, pytest.approx(0.080))


@given(
    st.lists(
        st.builds(
            Timing,
            st.sampled_from([FLAT, DOUBLING, Choice("torus", 2)]),
            st.integers(1, 1 << 30),
            st.floats(1e-9, 10.0),
        ),
        min_size=1,
        max_size=12,
        unique_by=lambda timing: (timing.choice, timing.num_bytes),
    ),
    st.lists(st.integers(1, 1 << 32), min_size=1, max_size=20),
)
def test_many_sizes_at_once_are_picked_digit_for_digit_as_one_is(messages: list[Timing], sizes: list[int]) -> None:
    sizes += [timing.num_bytes for timing in messages]
    found = _pick_seconds(_draw_curves(tuple(messages)), np.array(sizes, float))
    assert found.tolist() == [pick_choice(messages, size)[1] for size in sizes]


def test_each_buffer_gets_its_own_choice() -> None:
    plan = assign_choices([Buffer(0, 1024, 0, 3), Buffer(1024, 1024 + (1 << 18), 3, 9)], MESSAGES, overlap=True)
    assert plan.choices == (DOUBLING, FLAT)


def test_half_gradients_count_half_the_bytes() -> None:
    buffer = Buffer(0, 1 << 18, 0, 3)
    assert assign_choices([buffer], MESSAGES, overlap=True).choices == (FLAT,)
    halves = replace(buffer, end=2048, element_bytes=2)
    assert assign_choices([halves], MESSAGES, overlap=True).choices == (DOUBLING,)
    assert (buffer.num_bytes, halves.num_bytes) == (1 << 20, 4096)


def test_pins_leave_only_the_executions_that_were_asked_for() -> None:
    (only,) = list_executions(train(cuda_graph="on", own_kernels="off"), on_gpu=True, has_own_kernels=True)
    assert only == Execution("torch", recorded=True)
    launched, recorded = list_executions(train(compile="block"), on_gpu=True, has_own_kernels=True)
    assert (launched, recorded) == (Execution("torch", False, "block"), Execution("torch", True, "block"))
    assert list_executions(train(cuda_graph="on"), on_gpu=False, has_own_kernels=False) == [Execution()]


@pytest.mark.parametrize(
    ("asked", "can", "kernels"), [("auto", True, "own"), ("auto", False, "torch"), ("on", 0, "own")]
)
def test_own_kernels_are_tried_where_they_can_or_must(asked: str, can: bool, kernels: str) -> None:
    found = list_executions(train(own_kernels=asked), on_gpu=True, has_own_kernels=bool(can))
    assert [(way.kernels, way.recorded) for way in found] == [(kernels, False), (kernels, True)]


def test_only_long_runs_try_to_compile_unasked() -> None:
    assert is_worth_compiling(train(), 100_000, 0.03, on_gpu=True)
    assert not is_worth_compiling(train(), 1000, 0.03, on_gpu=True)
    assert not is_worth_compiling(train(), 100_000, 0.03, on_gpu=False)
    assert not is_worth_compiling(train(compile="off"), 100_000, 0.03, on_gpu=True)


def layout() -> Layout:
    return plan_layout([ParameterSpec(f"w{index}", (256, 256), True, True) for index in range(8)])


def test_reductions_are_cut_for_the_ready_times_of_their_execution() -> None:
    """Gradients that come slowly are worth sending one by one, those that come at once are not."""
    slow = propose_reductions(CommConfig(), layout(), [0.1 * (slot + 1) for slot in range(8)], MESSAGES)
    fast = propose_reductions(CommConfig(), layout(), [1e-9] * 8, MESSAGES)
    assert len(slow["merged"].buffers) == 2  # the last gradient alone is not hidden
    assert "merged" not in fast  # it would be the one buffer that the threshold rule gives as well
    assert {PLAIN, "one buffer"} <= slow.keys()
    assert not slow["one buffer"].overlap
    assert slow[PLAIN].overlap


def test_pinned_reductions_are_the_only_ones_proposed() -> None:
    comm = CommConfig(algorithm="doubling", overlap="on", fusion="two-segments")
    ((name, plan),) = propose_reductions(comm, layout(), [0.1] * 8, MESSAGES[3:6]).items()
    assert name == "two-segments"
    assert plan.overlap
    assert set(plan.choices) == {DOUBLING}


OWN, RECORDED = Execution("own"), Execution("own", recorded=True)


def trial(execution: Execution, rule: str, seconds: float, failure: str = "") -> Trial:
    return Trial(execution, rule, "1 buffer", seconds, failure)


def test_pytorchs_own_stays_unless_something_is_clearly_quicker() -> None:
    plain, close, clear = trial(OWN, PLAIN, 1.0), trial(OWN, "merged", 0.97), trial(OWN, "one buffer", 0.9)
    assert pick_trial([plain, close]) == plain
    assert pick_trial([plain, close, clear]) == clear
    assert pick_trial([close, clear]) == clear


def test_execution_and_reduction_are_picked_together() -> None:
    """The quickest way alone need not be the quickest with its best reduction."""
    trials = [
        trial(OWN, PLAIN, 1.0),
        trial(OWN, "merged", 0.5),
        trial(RECORDED, PLAIN, 0.8),
        trial(RECORDED, "merged", 0.7),
    ]
    assert pick_trial(trials) == trials[1]
    assert pick_trial([*trials, trial(RECORDED, "one buffer", 0.4)]).rule == "one buffer"  # type: ignore[union-attr]


def test_what_failed_is_never_picked_and_all_can_fail() -> None:
    failed = trial(RECORDED, "merged", math.inf, "out of memory (rank 1)")
    assert pick_trial([failed, trial(OWN, PLAIN, 9.0)]) == trial(OWN, PLAIN, 9.0)
    assert pick_trial([failed]) is None


def test_the_rows_of_an_event_mark_the_pick_and_have_no_infinity() -> None:
    failed = trial(RECORDED, "merged", math.inf, "out of memory")
    rows = explain_choice([failed, trial(OWN, PLAIN, 2.0), trial(OWN, "merged", 1.0)])
    assert [(row["rule"], row["seconds"], row["chosen"]) for row in rows] == [
        ("merged", 1.0, True),
        (PLAIN, 2.0, False),
        ("merged", None, False),
    ]


def test_the_links_of_a_cluster_file_choose_where_nothing_is_measured() -> None:
    layout = plan_layout([ParameterSpec(f"layer{index}", (1 << 18,), True, True) for index in range(4)])
    hosts = [f"node{rank // 4}" for rank in range(16)]
    guessed = find_topology(hosts)
    comm = CommConfig(buffer_mb=1.0)
    assert set(default_reduction(comm, layout, guessed, 4, "gloo").choices) == {FLAT}
    given = Topology(guessed.nodes, Link(1e-6, 50e9), Link(1e-3, 1e8))
    plan = default_reduction(comm, layout, given, 4, "gloo")
    for buffer, choice in zip(plan.buffers, plan.choices, strict=True):
        best = min(predict_seconds(c, buffer.num_bytes, given) for c in list_choices(given, "gloo"))
        assert choice != FLAT
        assert predict_seconds(choice, buffer.num_bytes, given) <= 1.05 * best
    # NCCL chooses by its own knowledge of the links, and a recipe's pin is a pin.
    assert set(default_reduction(comm, layout, given, 4, "nccl").choices) == {FLAT}
    pinned = default_reduction(CommConfig(algorithm="doubling"), layout, given, 4, "gloo")
    assert set(pinned.choices) == {DOUBLING}


def test_with_links_the_most_promising_choices_are_measured_first() -> None:
    given = Topology(find_topology([f"node{rank // 4}" for rank in range(16)]).nodes, Link(1e-6, 5e9), Link(1e-4, 1e8))
    choices = list_choices(given, "gloo")
    assert choices[0] == FLAT
    products = [
        math.prod(predict_seconds(choice, size, given) for size in (1024, 2**20, 2**26)) for choice in choices[1:]
    ]
    assert products == sorted(products)
