"""The stops of a plan's sliders: which there are, and that each is what `predict` says of its setting."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.cluster_file import Machine
from lockstep.comm.topology import Link
from lockstep.errors import LockstepError
from lockstep.plan.cluster import Cluster
from lockstep.plan.grid import MOST_SIZES, Grid, build_grid, list_sizes
from lockstep.plan.search import build_case, predict
from lockstep.plan.workload import Workload, describe_workload
from lockstep.recipes.read import load_recipe
from tests.plan.synthetic import synthesize

FOUR = Cluster("four", "", 4, None, Link(5e-6, 10e9), Link(30e-6, 1.2e9), Machine(jitter=0.01))


def read_workload(**changes: object) -> Workload:
    workload = describe_workload(*load_recipe("resnet50-64k", []))
    return replace(workload, **{"global_batch": 256, **changes})  # type: ignore[arg-type]


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=200),
    st.integers(1, 16),
    st.one_of(st.none(), st.integers(1, 10_000)),
    st.integers(1, 1 << 20),
)
def test_sizes_are_few_and_hold_both_ends_of_what_was_asked(
    asked: list[int], per_node: int, num_nodes: int | None, global_batch: int
) -> None:
    sizes = list_sizes(replace(FOUR, devices_per_node=per_node, num_nodes=num_nodes), asked, global_batch)
    assert len(sizes) <= MOST_SIZES
    assert sizes == sorted(set(sizes))
    assert {min(asked), max(asked)} <= set(sizes)
    if len(set(asked)) <= 12:
        assert set(asked) <= set(sizes)


def test_sizes_double_from_a_node_to_four_times_what_was_asked() -> None:
    assert list_sizes(FOUR, [24], 1024) == [4, 8, 16, 24, 32, 64]
    assert list_sizes(FOUR, [24], 30) == [4, 8, 16, 24]
    assert list_sizes(replace(FOUR, num_nodes=2), [1], 1024) == [1, 2, 4]
    assert list_sizes(replace(FOUR, num_nodes=2), [3, 8], 1024) == [3, 4, 8]


PROFILE = synthesize(rates={16: 4803.0, 256: 10751.0})


@pytest.fixture(scope="module")
def grid() -> Grid:
    return build_grid(read_workload(), PROFILE, replace(FOUR, num_nodes=3), [8, 9], 8)


def test_sliders_begin_at_the_largest_size_that_can_run(grid: Grid) -> None:
    assert grid.devices == (4, 8, 9)
    assert grid.strong.sizes == (64, 128, 256, 512, 1024)
    assert grid.weak.sizes == (1, 2, 4, 8)
    assert grid.devices[grid.start_devices] == 9
    assert grid.strong.sizes[grid.strong.start] == 256
    assert grid.weak.sizes[grid.weak.start] == 8
    assert (grid.bandwidths[grid.start_bandwidth], grid.latencies[grid.start_latency]) == (1.2e9, 30e-6)


def test_every_stop_is_what_predict_says_there(grid: Grid) -> None:
    strong, weak = grid.strong.places[1][grid.strong.start], grid.weak.places[2][grid.weak.start]
    assert isinstance(strong, int)
    assert isinstance(weak, int)
    for wider, bandwidth in enumerate(grid.bandwidths):
        for slower, latency in enumerate(grid.latencies):
            cluster = replace(FOUR, num_nodes=3, inter=Link(latency, bandwidth))
            network = wider * len(grid.latencies) + slower
            assert grid.points[strong][network] == predict(build_case(read_workload(), PROFILE, cluster, 8))
            direct = predict(build_case(read_workload(), PROFILE, cluster, 9, 8))
            assert replace(grid.points[weak][network], scaling="weak", notes=direct.notes) == direct


def test_a_single_node_is_simulated_once(grid: Grid) -> None:
    place = grid.strong.places[0][grid.strong.start]
    assert isinstance(place, int)
    assert len(grid.points[place]) == 1
    assert grid.num_settings == sum(1 if point[0].nodes == 1 else 20 for point in grid.points)


def test_a_cluster_of_one_node_varies_its_own_links() -> None:
    alone = build_grid(read_workload(), PROFILE, replace(FOUR, num_nodes=1), [4], 1)
    assert not alone.is_between
    assert alone.bandwidths[alone.start_bandwidth] == 10e9
    place = alone.strong.places[0][0]
    assert isinstance(place, int)
    comm_s = [point.comm_s for point in alone.points[place]]
    assert comm_s[0] > comm_s[-len(alone.latencies)]


def test_what_cannot_run_is_a_sentence_in_its_place() -> None:
    few = read_workload(global_batch=8)
    grid = build_grid(few, PROFILE, replace(FOUR, num_nodes=2), [4, 5], 1)
    assert grid.devices[grid.start_devices] == 4
    assert "do not fill nodes of 4 evenly" in str(grid.strong.places[grid.devices.index(5)][0])
    assert "cannot be shared by 8 devices" in str(grid.strong.places[grid.devices.index(8)][0])
    with pytest.raises(LockstepError, match="cannot be shared by 64 devices"):
        build_grid(few, PROFILE, FOUR, [64], 32)
