"""Choosing from measurements, and remembering; the measuring itself on real ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.comm.cost import Choice, Sample
from lockstep.comm.fusion import Buffer, ReductionPlan
from lockstep.comm.hybrid import FLAT, Hybrid
from lockstep.comm.topology import Topology, find_topology
from lockstep.comm.tuner import (
    Trial,
    Tuning,
    assign_choices,
    list_choices,
    list_sizes,
    measure_choices,
    pick_choice,
    read_tuning,
    tuning_name,
    write_tuning,
)
from lockstep.comm.wire import Wire
from lockstep.comm.world import World
from lockstep.layout import ParameterSpec, plan_layout
from tests.ranks import run_ranks

DOUBLING = Choice("doubling")
SAMPLES = (
    Sample(FLAT, 1024, 0.010),
    Sample(FLAT, 4096, 0.011),
    Sample(FLAT, 1 << 20, 0.020),
    Sample(DOUBLING, 1024, 0.001),
    Sample(DOUBLING, 4096, 0.003),
    Sample(DOUBLING, 1 << 20, 0.100),
    Sample(Choice("torus", 2), 1024, 0.0005),  # given up after the first size
)


def test_sizes_go_up_by_four_to_the_whole_gradient() -> None:
    assert list_sizes(300_000) == [1024, 4096, 16384, 65536, 262144]
    assert list_sizes(600_000) == [1024, 4096, 16384, 65536, 262144, 600_000]
    assert list_sizes(10) == [1024]


def test_every_algorithm_is_a_candidate_and_pytorchs_own_comes_first() -> None:
    choices = list_choices(find_topology(["a"] * 4 + ["b"] * 4))
    assert choices[0] == FLAT
    assert {choice.algorithm for choice in choices} == {"flat", "doubling", "hierarchical", "torus"}
    assert Choice("hierarchical", 4) in choices


def test_the_quickest_choice_wins_at_each_size() -> None:
    assert pick_choice(SAMPLES, 4096) == (DOUBLING, 0.003)
    assert pick_choice(SAMPLES, 1 << 20) == (FLAT, 0.020)


def test_times_between_measured_sizes_lie_on_a_line() -> None:
    choice, seconds = pick_choice(SAMPLES, 2560)
    assert choice == DOUBLING
    assert seconds == pytest.approx(0.002)


def test_beyond_the_largest_size_time_is_proportional() -> None:
    assert pick_choice(SAMPLES, 4 << 20) == (FLAT, pytest.approx(0.080))


def test_each_buffer_gets_its_own_choice() -> None:
    plan = assign_choices([Buffer(0, 1024, 0, 3), Buffer(1024, 1024 + (1 << 18), 3, 9)], SAMPLES, overlap=True)
    assert plan.choices == (DOUBLING, FLAT)


def test_half_gradients_count_half_the_bytes() -> None:
    buffer = Buffer(0, 1 << 18, 0, 3)
    assert assign_choices([buffer], SAMPLES, overlap=True).choices == (FLAT,)
    halves = replace(buffer, end=2048, element_bytes=2)
    assert assign_choices([halves], SAMPLES, overlap=True).choices == (DOUBLING,)
    assert (buffer.num_bytes, halves.num_bytes) == (1 << 20, 4096)


def test_a_tuning_of_half_gradients_has_a_name_of_its_own() -> None:
    names = set()
    for half in (False, True):
        layout = plan_layout([ParameterSpec("w", (8, 8), True, True, half)])
        names.add(tuning_name(Topology(((0, 1),)), "gloo", layout, ""))
    assert len(names) == 2


def test_a_tuning_survives_its_file(tmp_path: Path) -> None:
    buffers = (Buffer(0, 64, 0, 2, element_bytes=2), Buffer(64, 96, 2, 3))
    plan = ReductionPlan(buffers, (Choice("hierarchical", 8), FLAT), overlap=False)
    tuning = Tuning("4x8-gloo-2x64", "4x8", "gloo", "2 gradients", 1.5, SAMPLES, (Trial("merged", 0.2),), plan)
    write_tuning(tmp_path / "deep" / "t.toml", tuning)
    assert read_tuning(tmp_path / "deep" / "t.toml") == tuning


@pytest.mark.parametrize("content", ["", "nonsense [", 'topology = "4x8"'])
def test_an_unusable_file_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.toml").write_text(content)
    assert read_tuning(tmp_path / "t.toml") is None
    assert read_tuning(tmp_path / "missing.toml") is None


def measure(world: World, budget_s: float) -> list[Sample]:
    topology = Topology(((0, 1), (2,)))
    hybrid = Hybrid(topology, world.rank, world.device, Wire("fp32", "before"))
    samples = measure_choices(hybrid, world, torch.ones(65536), list_choices(topology), [1024, 4096, 65536], budget_s)
    hybrid.close()
    return samples


def test_all_ranks_get_the_same_measurements() -> None:
    first, *others = run_ranks(measure, 3, 5.0)
    assert all(other == first for other in others)
    assert {sample.num_bytes for sample in first} == {1024, 4096, 65536}
    assert FLAT in {sample.choice for sample in first}
    assert all(0 < sample.seconds < 5 for sample in first)


def test_no_time_means_only_the_smallest_size() -> None:
    samples = run_ranks(measure, 3, 1e-9)[0]
    assert {sample.num_bytes for sample in samples} == {1024}
