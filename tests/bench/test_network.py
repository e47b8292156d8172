"""The links of a virtual cluster, as its own ranks measure them."""

import re

import pytest

from lockstep.bench.network import parse_slow, run_parent
from lockstep.bench.virtual import VirtualCluster
from lockstep.errors import LockstepError


def test_every_nodes_link_is_measured_at_its_own_limit(capfd: pytest.CaptureFixture[str]) -> None:
    if VirtualCluster.open(1, 1).is_pretended:
        pytest.skip("needs the rights to create network namespaces")
    run_parent(nodes=3, gbit_per_s=0.5, slow={1: 0.1})
    said = capfd.readouterr().out
    found = [[float(number) for number in re.findall(r"[\d.]+", line)] for line in said.splitlines() if "│" in line]
    assert [(row[0], row[1]) for row in found] == [(0, 0.5), (1, 0.1), (2, 0.5)]
    for _, limit, sent, received, latency_us in found:
        assert 0 < sent < 1.3 * limit  # a busy machine may stay far below the limit, but nothing passes it
        assert 0 < received < 1.3 * limit
        assert latency_us > 0
    assert found[1][2] < min(found[0][2], found[2][2])


def test_slow_nodes_are_read_from_the_command_line() -> None:
    assert parse_slow(["2=0.1", "0=3"]) == {2: 0.1, 0: 3.0}
    with pytest.raises(LockstepError, match="NODE=GBIT_PER_S"):
        parse_slow(["2"])


def test_one_node_has_no_network() -> None:
    with pytest.raises(LockstepError, match="at least 2 nodes"):
        run_parent(nodes=1)
