"""All-reduces at any scale: formulas against the count of every message, NCCL's table against its printed values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.cluster_file import Machine
from lockstep.comm.cost import Choice, predict_seconds
from lockstep.comm.topology import Link, Topology
from lockstep.errors import LockstepError
from lockstep.plan.cluster import Shape
from lockstep.plan.collectives import (
    is_regular,
    list_group_sizes,
    predict_all_reduce,
    predict_phases,
    predict_scatter,
)
from lockstep.plan.nccl import list_nccl, predict_nccl, predict_nccl_scatter

links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))
sizes = st.one_of(st.integers(1, 1 << 12), st.integers(1 << 17, 1 << 23), st.integers(1 << 24, 1 << 30))
choices = st.one_of(
    st.sampled_from([Choice("flat"), Choice("doubling")]),
    st.builds(Choice, st.sampled_from(["hierarchical", "torus"]), st.integers(1, 120)),
)


def list_ranks(shape: Shape) -> Topology:
    nodes = (tuple(range(node * shape.per_node, (node + 1) * shape.per_node)) for node in range(shape.num_nodes))
    return Topology(tuple(nodes), shape.intra, shape.inter)


@given(st.integers(1, 17), st.integers(1, 9), links, links, choices, sizes)
def test_the_formulas_equal_the_count_of_every_message(
    num_nodes: int, per_node: int, intra: Link, inter: Link, choice: Choice, num_bytes: int
) -> None:
    shape = Shape(num_nodes, per_node, intra, inter)
    if not is_regular(choice, shape):
        with pytest.raises(LockstepError, match="equal groups"):
            predict_phases(choice, num_bytes, shape)
        return
    counted = predict_seconds(choice, num_bytes, list_ranks(shape))
    assert predict_all_reduce(choice, num_bytes, shape) == pytest.approx(counted, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("choice", [Choice("flat"), Choice("doubling"), Choice("hierarchical", 8), Choice("torus", 8)])
def test_the_formulas_equal_the_count_on_a_thousand_ranks(choice: Choice) -> None:
    shape = Shape(129, 8, Link(2e-6, 300e9), Link(5e-6, 50e9))
    counted = predict_seconds(choice, 51.1e6, list_ranks(shape))
    assert predict_all_reduce(choice, 51.1e6, shape) == pytest.approx(counted, rel=1e-12)


@given(st.integers(2, 17), st.integers(1, 8), choices, sizes, st.integers(2, 8))
def test_a_node_with_several_nics_is_never_quicker_than_one_nic_as_wide(
    num_nodes: int, per_node: int, choice: Choice, num_bytes: int, nics: int
) -> None:
    one = Shape(num_nodes, per_node, Link(2e-6, 300e9), Link(5e-6, 50e9))
    several = Shape(num_nodes, per_node, one.intra, one.inter, Machine(nics_per_node=nics))
    if is_regular(choice, one):
        assert predict_all_reduce(choice, num_bytes, several) >= predict_all_reduce(choice, num_bytes, one)


def test_group_sizes_are_regular_and_hold_the_node() -> None:
    for num_nodes in (1, 2, 12, 125, 448, 12500):
        shape = Shape(num_nodes, 8, Link(2e-6, 300e9), Link(5e-6, 50e9))
        assert 8 in list_group_sizes(shape)
        assert all(is_regular(Choice("torus", size), shape) for size in list_group_sizes(shape))


HOPPER = Machine(nccl=("ring", "tree", "nvls", "sharp"), nvls=Link(25e-6, 477e9))


@pytest.mark.parametrize(
    ("devices", "printed"),
    [
        # Latencies in µs of NCCL's tables for 8 devices a node over NVLink, rounded.
        (8, {"ring LL": 15, "ring Simple": 56, "tree LL": 15, "tree LL128": 32, "tree Simple": 64, "NVLS": 25}),
        (16, {"ring LL": 40, "ring Simple": 132, "tree LL": 25, "tree LL128": 49, "tree Simple": 92, "NVLSTree": 53}),
        (128, {"ring LL": 312, "ring Simple": 1190, "tree LL": 55, "tree LL128": 100, "tree Simple": 176}),
        (1024, {"ring LL": 2484, "ring Simple": 9657, "tree LL": 85, "tree LL128": 151, "NVLSTree": 221}),
        (2048, {"ring LL": 4968, "ring Simple": 19334, "tree LL": 95, "NVLS and SHARP": 43, "SHARP": 44}),
    ],
)
def test_nccl_latencies_are_those_of_its_tables(devices: int, printed: dict[str, float]) -> None:
    shape = Shape(devices // 8, 8, Link(2e-6, 370e9), Link(4e-6, 376e9), HOPPER)
    latencies = {name: 1e6 * seconds for seconds, name in list_nccl(0, shape)}
    for name, latency in printed.items():
        assert latencies[name] == pytest.approx(latency, rel=0.002, abs=0.51), name


def test_a_slow_hop_between_nodes_is_nccls_too() -> None:
    """A ring crosses 2 · (nodes − 1) times, a tree twice log2(nodes), switches that add twice."""
    usual, slow = (Shape(16, 8, Link(2e-6, 370e9), Link(s, 376e9), HOPPER) for s in (14e-6, 114e-6))
    added = {
        found.name: 1e6 * (found.seconds - before.seconds)
        for before, found in zip(list_nccl(0, usual), list_nccl(0, slow), strict=True)
    }
    crossings = {"ring": 2 * 15, "tree": 2 * 4, "NVLSTree": 2 * 4, "NVLS": 2, "SHARP": 2}
    assert added == {name: pytest.approx(100 * crossings[name.split()[0]]) for name in added}
    quick = Shape(16, 8, Link(2e-6, 370e9), Link(1e-6, 376e9), HOPPER)
    assert list_nccl(0, quick) == list_nccl(0, usual)


def test_nccl_moves_long_messages_at_the_bus_bandwidth_and_chooses_by_size() -> None:
    node = Shape(1, 8, Link(2e-6, 370e9), Link(4e-6, 376e9), HOPPER)
    # 2 · 7/8 bytes pass each link of a ring for every byte summed.
    assert predict_nccl(1 << 10, node).name == "tree LL" or predict_nccl(1 << 10, node).name == "ring LL"
    best = predict_nccl(1 << 30, node)
    assert best.name == "NVLS"
    assert (1 << 30) / best.seconds == pytest.approx(477e9 * 8 / 14, rel=0.01)
    rings = Shape(1, 8, node.intra, node.inter, Machine(nccl=("ring",)))
    assert (1 << 32) / predict_nccl(1 << 32, rings).seconds == pytest.approx(370e9 * 8 / 14, rel=0.01)


def test_an_all_reduce_by_rings_is_a_reduce_scatter_and_an_all_gather() -> None:
    node = Shape(1, 8, Link(3e-6, 100e9), Link(4e-6, 10e9))
    assert 2 * predict_scatter(1e8, node) == pytest.approx(predict_all_reduce(Choice("flat"), 1e8, node))
    assert predict_scatter(1e8, Shape(4, 1, node.intra, node.inter)) == 0
    assert predict_nccl_scatter(1e8, node) == pytest.approx(1e8 * 7 / 8 / 100e9, rel=0.05)
    assert predict_nccl_scatter(1e8, Shape(4, 1, node.intra, node.inter)) == 0
