"""A training run over a real, slow network: the node whose link was cut is named."""

import sys
from pathlib import Path

import pytest

from lockstep.bench.virtual import VirtualCluster
from lockstep.data.generated import build_generated
from lockstep.events import RunEnded
from tests.engine import commands
from tests.engine.conftest import tiny_settings


def test_a_node_whose_link_is_cut_to_a_tenth_is_named_with_network(tmp_path: Path) -> None:
    images = build_generated(tmp_path / "cache", 130, 50)
    settings = [*tiny_settings(images), "train.duration=8st", "optim.warmup=0st", "train.eval_every=0st"]
    settings += ["train.log_every=1", "train.checkpoint_every=0st"]
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "lockstep", "train", "quickstart", f"--out={run}"]
    cluster = VirtualCluster.open(3, 1, 0.1, slow={1: 0.01})
    if cluster.is_pretended:
        pytest.skip("needs the rights to create network namespaces")
    with cluster:
        cluster.wait(cluster.start([*argv, *(f"--set={setting}" for setting in settings)]), timeout_s=120)
    ended = commands.events(run)[-1]
    assert isinstance(ended, RunEnded)
    assert ended.straggler.startswith("Node 1 holds the others up: network.")
