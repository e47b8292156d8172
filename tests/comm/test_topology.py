import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.cluster_file import read_cluster
from lockstep.comm.topology import (
    GUESSED_INTER,
    GUESSED_INTRA,
    Link,
    Topology,
    find_topology,
    group_sizes,
    plan_groups,
)
from lockstep.errors import LockstepError

node_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def lay_out(sizes: list[int]) -> Topology:
    return find_topology([f"node{node}" for node, size in enumerate(sizes) for _ in range(size)])


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_host_names_become_nodes_in_order_of_appearance() -> None:
    topology = find_topology(["b", "b", "a", "a", "a"])
    assert topology.nodes == ((0, 1), (2, 3, 4))
    assert (topology.num_ranks, topology.num_nodes) == (5, 2)
    assert [topology.node_of(rank) for rank in range(5)] == [0, 0, 1, 1, 1]


def test_ranks_dealt_out_to_hosts_in_turn_keep_their_node() -> None:
    topology = find_topology(["a", "b", "a", "b"])
    assert topology.nodes == ((0, 2), (1, 3))
    assert plan_groups(topology, 2) == ((0, 2), (1, 3))


def test_no_host_and_no_such_rank_are_sentences() -> None:
    with pytest.raises(LockstepError, match="at least one rank"):
        find_topology([])
    with pytest.raises(LockstepError, match=r"no rank 2.*1x2"):
        find_topology(["a", "a"]).node_of(2)


@pytest.mark.parametrize(
    ("sizes", "key"),
    [([8] * 4, "4x8"), ([8, 8, 4], "2x8+1x4"), ([1], "1x1"), ([4, 8, 4], "1x4+1x8+1x4")],
)
def test_the_key_counts_nodes_and_ranks(sizes: list[int], key: str) -> None:
    assert lay_out(sizes).key() == key


def test_the_key_tells_interleaved_ranks_from_consecutive_ones() -> None:
    assert find_topology(["a", "b", "a", "b"]).key() == "2x2-interleaved"


@pytest.mark.parametrize("nodes", [(), ((0,), ()), ((0, 2),), ((0, 1), (1, 2))])
def test_nodes_that_do_not_hold_each_rank_once_are_refused(nodes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(LockstepError, match="nodes"):
        Topology(nodes)


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1e-6, 1e9), (0.0, 0.0), (float("nan"), 1e9), (0, float("nan"))])
def test_an_impossible_link_is_refused(latency: float, bandwidth: float) -> None:
    with pytest.raises(LockstepError, match="no link"):
        Link(latency, bandwidth)


def test_equal_topologies_hash_alike() -> None:
    assert len({lay_out([2, 2]), lay_out([2, 2]), lay_out([4])}) == 2


@pytest.mark.parametrize(
    ("sizes", "group_size", "expected"),
    [
        ([4, 4], 1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ([4, 4], 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([4, 4], 3, [[0, 1, 2], [3], [4, 5, 6], [7]]),
        ([4, 4], 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([2, 2, 2], 4, [[0, 1, 2, 3], [4, 5]]),
        ([2, 2, 2], 5, [[0, 1, 2, 3], [4, 5]]),
        ([3, 1, 1], 3, [[0, 1, 2], [3, 4]]),
        ([1, 4, 1], 2, [[0], [1, 2], [3, 4], [5]]),
        ([2, 3], 99, [[0, 1, 2, 3, 4]]),
    ],
)
def test_groups_are_parts_of_a_node_or_whole_nodes(
    sizes: list[int], group_size: int, expected: list[list[int]]
) -> None:
    assert [list(group) for group in plan_groups(lay_out(sizes), group_size)] == expected


@given(node_sizes, st.integers(1, 40))
def test_groups_hold_every_rank_once_and_never_split_a_node_needlessly(sizes: list[int], group_size: int) -> None:
    topology = lay_out(sizes)
    groups = plan_groups(topology, group_size)
    assert [rank for group in groups for rank in group] == list(range(sum(sizes)))
    for group in groups:
        assert 1 <= len(group) <= group_size
        for node in {topology.node_of(rank) for rank in group}:
            ranks = set(topology.nodes[node])
            assert set(group) <= ranks if len(ranks) > group_size else ranks <= set(group)


def test_a_group_size_below_one_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match="group size of 0"):
        plan_groups(lay_out([2]), 0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([8] * 4, [4, 8, 16]),  # the node, half of it, two of them; √32 lies between 4 and 8
        ([8] * 128, [4, 8, 16, 32]),  # the paper's 1024 ranks: 16, and √1024
        ([8, 8, 4], [2, 4, 8]),
        ([7], [2, 4]),  # a prime: nothing divides it
        ([2], []),
        ([1], []),
    ],
)
def test_the_group_sizes_worth_measuring_are_few(sizes: list[int], expected: list[int]) -> None:
    assert group_sizes(lay_out(sizes)) == expected


@given(node_sizes)
def test_a_group_size_worth_measuring_makes_two_groups_or_more(sizes: list[int]) -> None:
    found = group_sizes(lay_out(sizes))
    assert found == sorted(set(found))
    assert len(found) <= 6
    assert all(1 < size < sum(sizes) and len(plan_groups(lay_out(sizes), size)) > 1 for size in found)
    if sum(sizes) > 3:
        assert found


CLUSTER = """
nodes = 2
ranks_per_node = 3
[intra]
latency_us = 2.5
gbit_per_s = 400
[inter]
latency_us = 20
gbit_per_s = 100
"""


def test_a_cluster_file_is_read_in_its_units(tmp_path: Path) -> None:
    topology = read_cluster(write(tmp_path, CLUSTER))
    assert topology.nodes == ((0, 1, 2), (3, 4, 5))
    assert topology.intra.latency_s == pytest.approx(2.5e-6)
    assert topology.intra.bytes_per_s == pytest.approx(50e9)
    assert topology.inter.latency_s == pytest.approx(20e-6)
    assert topology.inter.bytes_per_s == pytest.approx(12.5e9)


def test_a_list_describes_uneven_nodes_and_links_may_be_left_out(tmp_path: Path) -> None:
    topology = read_cluster(write(tmp_path, "ranks_per_node = [2, 1]"))
    assert topology == Topology(((0, 1), (2,)), GUESSED_INTRA, GUESSED_INTER)
    assert read_cluster(write(tmp_path, "nodes = 2\nranks_per_node = [2, 1]")) == topology


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nodes = ", "not valid TOML"),
        ("nodes = 2", "lacks ranks_per_node"),
        ("ranks_per_node = 2", "lacks nodes"),
        ("nodes = 2\nranks_per_nodes = 2", "unknown key ranks_per_nodes; did you mean ranks_per_node?"),
        ("nodes = 2\nranks_per_node = 2\nzebra = 1", "unknown key zebra; it may have nodes"),
        ("nodes = 0\nranks_per_node = 2", "nodes = 0"),
        ("nodes = true\nranks_per_node = 2", "nodes = True"),
        ("nodes = 2.0\nranks_per_node = 2", "nodes = 2.0"),
        ("nodes = 9999999999999\nranks_per_node = 2", "nodes = 9999999999999"),
        ("nodes = 2\nranks_per_node = '8'", "ranks_per_node = '8'"),
        ("ranks_per_node = []", "ranks_per_node = \\[\\]"),
        ("ranks_per_node = [8, 0]", "ranks_per_node = \\[8, 0\\]"),
        ("nodes = 3\nranks_per_node = [8, 4]", "nodes = 3, but ranks_per_node lists 2"),
        ("nodes = 2\nranks_per_node = 2\nintra = 5", "make it a table \\[intra\\]"),
        (CLUSTER.replace("latency_us = 2.5", ""), "in \\[intra\\], lacks latency_us"),
        (CLUSTER.replace("gbit_per_s = 100", ""), "in \\[inter\\], lacks gbit_per_s"),
        (CLUSTER.replace("gbit_per_s = 100", "gb_per_s = 100"), "in \\[inter\\], has an unknown key gb_per_s; did you"),
        (CLUSTER.replace("2.5", "-1"), "latency_us = -1; give 0 or more"),
        (CLUSTER.replace("= 100", "= 0"), "gbit_per_s = 0; give more than 0"),
        (CLUSTER.replace("= 100", "= inf"), "gbit_per_s = inf; give a number"),
        (CLUSTER.replace("= 100", "= nan"), "gbit_per_s = nan; give a number"),
        (CLUSTER.replace("= 100", f"= 1{'0' * 400}"), "gbit_per_s = 1000"),
        (CLUSTER.replace("= 100", "= 'fast'"), "gbit_per_s = 'fast'; give a number"),
        (CLUSTER.replace("= 100", "= true"), "gbit_per_s = True; give a number"),
    ],
)
def test_each_mistake_in_a_cluster_file_is_a_sentence_that_names_it(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence) as caught:
        read_cluster(write(tmp_path, text))
    assert "cluster.toml" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "nodes = " + "[" * 5000,
        "nodes = " + "{a=" * 3000 + "1" + "}" * 3000,
        "nodes = " + "9" * 5000,
        "nodes = 0x" + "f" * 5000,
        f"nodes = '{'z' * 5000}'",
        f"{'z' * 5000} = 1",
        '"a\\nb" = 1',
        f"ranks_per_node = [{'0, ' * 5000}]",
    ],
)
def test_a_cluster_file_without_measure_is_a_short_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(LockstepError, match="luster file") as caught:
        read_cluster(write(tmp_path, f"ranks_per_node = 2\n{text}" if "ranks" not in text else text))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_pipe_in_a_cluster_files_place_is_a_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cluster.toml")
    with pytest.raises(LockstepError, match="not a plain file"):
        read_cluster(tmp_path / "cluster.toml")


def test_a_cluster_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="There is no cluster file"):
        read_cluster(tmp_path / "none.toml")
    with pytest.raises(LockstepError, match="Cannot read the cluster file"):
        read_cluster(tmp_path)
    (tmp_path / "cluster.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LockstepError, match="not text in UTF-8"):
        read_cluster(tmp_path / "cluster.toml")
