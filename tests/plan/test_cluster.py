"""Clusters to plan for: presets, files of a run's own grammar, and devices on them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.cluster_file import read_cluster, read_cluster_file
from lockstep.comm.topology import Link
from lockstep.errors import LockstepError
from lockstep.plan.cluster import Cluster, list_clusters, place_devices, read_planned

LINKS = "[intra]\nlatency_us = 3\ngbit_per_s = 400\n[inter]\nlatency_us = 20\ngbit_per_s = 100\n"


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_presets_are_those_that_the_docs_name() -> None:
    found = {cluster.name: cluster for cluster in list_clusters()}
    assert set(found) == {
        "dgx-h100",
        "dgx-h200",
        "dgx-a100",
        "dgx1-v100",
        "p40-100g",
        "eth-25g",
        "eth-10g",
        "laptop",
    }
    assert all(cluster.summary and cluster.machine.device for cluster in found.values())
    hopper = found["dgx-h100"]
    assert hopper.devices_per_node == 8
    assert hopper.intra.bytes_per_s == pytest.approx(370e9)
    assert hopper.machine.nvls is not None
    assert found["p40-100g"].machine.dollars_per_device_hour is None  # nobody publishes it


def test_a_runs_file_and_a_planners_file_are_one_grammar(tmp_path: Path) -> None:
    text = f'nodes = 4\nranks_per_node = 8\ndevice = "H100"\ncores_per_node = 112\njitter = 0.02\n{LINKS}'
    path = write(tmp_path, text)
    topology, planned = read_cluster(path), read_planned(path)
    assert topology.key() == "4x8"
    assert (topology.intra, topology.inter) == (planned.intra, planned.inter)
    assert planned.inter.latency_s == pytest.approx(20e-6)
    assert planned.inter.bytes_per_s == pytest.approx(12.5e9)
    assert (planned.num_nodes, planned.devices_per_node, planned.machine.cores_per_node) == (4, 8, 112)
    assert read_cluster_file(path).machine.jitter == 0.02


def test_a_planners_file_need_not_count_nodes_but_a_runs_must(tmp_path: Path) -> None:
    path = write(tmp_path, f"ranks_per_node = 8\n{LINKS}")
    assert place_devices(read_planned(path), 800).num_nodes == 100
    with pytest.raises(LockstepError, match="lacks nodes"):
        read_cluster(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ranks_per_node = 8\n[intra]\nlatency_us = 3\ngbit_per_s = 400\n", r"lacks \[inter\]"),
        ("ranks_per_node = 8\n[inter]\nlatency_us = 3\n", r"in \[inter\], lacks gbit_per_s"),
        (f"ranks_per_node = 8\n{LINKS}".replace("100", "-100"), r"gbit_per_s = -100; give more than 0"),
        (f"ranks_per_node = 8\n{LINKS}".replace("100", "0"), "give more than 0"),
        (f"ranks_per_node = 8\n{LINKS}".replace("100", "nan"), "give a number"),
        (f"ranks_per_node = 8\n{LINKS}".replace("100", "1e-300"), "slower than any"),
        (f"ranks_per_node = [8, 4]\n{LINKS}", "several sizes"),
        (f"ranks_per_node = 8\nwatts_per_device = -3\n{LINKS}", "watts_per_device = -3; give 0 or more"),
        (f"ranks_per_node = 8\nstorage_gbyte_per_s = 0\n{LINKS}", "storage_gbyte_per_s = 0; give more than 0"),
        (f"ranks_per_node = 8\njitter = 2\n{LINKS}", "share from 0 to 1"),
        (f"ranks_per_node = 8\nnccl = ['rings']\n{LINKS}", "list some of ring, tree"),
        (f"ranks_per_node = 8\nnccl = ['nvls']\n{LINKS}", r"no table \[nvls\]"),
        (f"ranks_per_node = 8\nbackend = 'mpi'\n{LINKS}", "give nccl or gloo"),
        (f"ranks_per_node = 8\nnics_per_node = 1.5\n{LINKS}", "give a whole number from 1"),
        (f"ranks_per_node = 8\ndevice = '[red]'\n{LINKS}", "short name"),
        (f"ranks_per_node = 8\ncore_per_node = 12\n{LINKS}", "did you mean cores_per_node"),
        (f"ranks_per_node = 100000\nnodes = 100000\n{LINKS}", "at most 1,000,000"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(LockstepError, match=says):
        read_planned(write(tmp_path, text))


def test_an_unknown_cluster_is_a_sentence_that_names_the_nearest() -> None:
    with pytest.raises(LockstepError, match="did you mean dgx-h100"):
        read_planned("dgx-h10")
    with pytest.raises(LockstepError, match="no cluster file"):
        read_planned("no/such.toml")


@given(st.integers(1, 5000), st.integers(1, 16))
def test_devices_fill_nodes_evenly_or_are_refused(count: int, per_node: int) -> None:
    cluster = Cluster("c", "", per_node, None, Link(1e-6, 1e9), Link(1e-6, 1e9), read_planned("laptop").machine)
    if count % -(-count // per_node):
        with pytest.raises(LockstepError, match="evenly"):
            place_devices(cluster, count)
        return
    shape = place_devices(cluster, count)
    assert shape.num_devices == count
    assert shape.per_node <= per_node
    assert shape.num_nodes == -(-count // per_node)


def test_more_devices_than_a_cluster_has_are_refused() -> None:
    with pytest.raises(LockstepError, match="has 8 devices, not 16"):
        place_devices(read_planned("laptop"), 16)
