"""Runs in network namespaces, and a stranger in another one: at worst a run ends, with a sentence.

The stranger (`stranger.py`) calls every port, leaves lines half open, and writes to the store as whoever knows PyTorch
can. It never has code run, nor weights altered through what Lockstep leaves in the store.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.bench.virtual import DEFAULTS, INTERFACE, VirtualCluster
from tests.engine import commands
from tests.engine.conftest import tiny_settings

TIMEOUT_S = 8  # two processes may be this far apart when they start on a busy machine
GRACE_S = 15
START_S = 60  # for ranks to begin, on a machine that does much else
STRANGER = str(Path(__file__).parent / "stranger.py")
Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    """Two nodes for ranks, one for the stranger."""
    if VirtualCluster.open(1, 1).is_pretended:
        pytest.skip("needs the rights to create network namespaces")
    with VirtualCluster(3, 1) as opened:
        yield opened


def start_in(cluster: VirtualCluster, node: int, *argv: str, **variables: str) -> Process:
    return subprocess.Popen(
        ["ip", "netns", "exec", cluster._namespace(node), sys.executable, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | DEFAULTS | {"PYTHONPATH": str(commands.ROOT)} | variables,
    )


class Run:
    """Two ranks, each in a node of its own, as `srun` or a Kubernetes job would start them."""

    def __init__(self, cluster: VirtualCluster, images: Path, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.port = cluster._choose_port()
        wanted = [*tiny_settings(images), f"comm.timeout_s={TIMEOUT_S}", "train.duration=3ep", "train.eval_every=0st"]
        arguments = ["train", "quickstart", f"--out={folder}", *(f"--set={setting}" for setting in wanted)]
        variables = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": cluster.address(0),
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "LOCKSTEP_SECRET": "known to the ranks alone",
        }
        self.ranks = [
            start_in(cluster, rank, "-m", "lockstep", *arguments, RANK=str(rank), LOCKSTEP_NODE=str(rank), **variables)
            for rank in range(2)
        ]

    def describe(self) -> str:
        """What a stranger could find out."""
        nodes = {self.cluster.address(node): rank.pid for node, rank in enumerate(self.ranks)}
        return json.dumps({"store": [self.cluster.address(0), self.port], "nodes": nodes})

    def finish(self) -> list[tuple[int, str]]:
        """Exit status and words of each rank; none may take longer than it should."""
        try:
            return [
                (rank.returncode, err)
                for rank in self.ranks
                for _, err in [rank.communicate(timeout=START_S + TIMEOUT_S + GRACE_S)]
            ]
        finally:
            for rank in self.ranks:
                rank.kill()


class Stranger:
    """The stranger, ready to begin."""

    def __init__(self, cluster: VirtualCluster, way: str, touched: Path) -> None:
        self.process = start_in(cluster, 2, STRANGER, way, TOUCHED=str(touched))

    def begin(self, wanted: str) -> None:
        """Tell it whom to attack, as soon as it is ready."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "begun\n"
        self.process.stdin.write(wanted + "\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Stop; what it has said."""
        self.process.kill()
        return self.process.communicate()[0]


@pytest.fixture(scope="module")
def undisturbed(
    cluster: VirtualCluster, images: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """The weights of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert Run(cluster, images, folder).finish() == [(0, "")] * 2
    return commands.last_weights(folder)


def check_end(run: Run, outcomes: list[tuple[int, str]], expected: dict[str, torch.Tensor]) -> None:
    """A run either finishes with the weights that it should have, or each of its ranks says why not, in one line."""
    if all(status == 0 for status, _ in outcomes):
        weights = commands.last_weights(run.folder)
        assert all(torch.equal(weights[name], array) for name, array in expected.items())
        return
    for status, words in outcomes:
        assert status >= 0, f"ended by signal {-status}: {words}"
        assert "Traceback" not in words
        assert "frame #" not in words
        if status:
            # Gloo's own log, which no setting of ours reaches once torch is there, may come before it.
            lines = [line for line in words.strip().splitlines() if not line.startswith(("[E", "[W"))]
            assert len(lines) == 1, words
            assert lines[0].startswith("lockstep: ")


@pytest.mark.parametrize(("way", "when"), [("store", "early"), ("store", "late"), ("garbage", "early")])
def test_a_stranger_can_at_worst_end_a_run_with_a_sentence(
    way: str,
    when: str,
    cluster: VirtualCluster,
    images: Path,
    undisturbed: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    stranger = Stranger(cluster, way, tmp_path / "touched")
    run = Run(cluster, images, tmp_path / "run")
    if when == "late":
        commands.wait_for_step(run.folder, 1, run.ranks[0])
    stranger.begin(run.describe())
    begun = time.monotonic()
    outcomes = run.finish()
    assert time.monotonic() - begun < START_S + TIMEOUT_S + GRACE_S
    said = stranger.end()
    assert "done" in said, "the stranger came too late"
    check_end(run, outcomes, undisturbed)
    assert not (tmp_path / "touched").exists(), "what the stranger left was unpickled"
    if when == "late":  # once ranks have met, the store is for naming the dead
        assert [status for status, _ in outcomes] == [0, 0], outcomes


OPEN = "import socket, time; s = socket.create_server(('0.0.0.0', 23456)); print('ready', flush=True); time.sleep(600)"


def test_a_scan_of_a_machine_finds_no_port_of_its_run(cluster: VirtualCluster, images: Path, tmp_path: Path) -> None:
    stranger = Stranger(cluster, "scan", tmp_path / "touched")
    settings = [*tiny_settings(images), "train.duration=4000st", "optim.warmup=0st", "train.eval_every=0st"]
    arguments = ["train", "quickstart", *[f"--set={setting}" for setting in settings], f"--out={tmp_path / 'run'}"]
    process: Any = start_in(cluster, 0, "-m", "lockstep", *arguments, "--ranks=2")
    other = start_in(cluster, 0, "-c", OPEN)  # so that there is something to be found
    try:
        commands.wait_for_step(tmp_path / "run", 2, process)
        stranger.begin(json.dumps({"address": cluster.address(0)}))
        found, _ = stranger.process.communicate(timeout=60)
        assert process.poll() is None
    finally:
        commands.kill_all(process)
        commands.kill_all(other)
    assert found.split() == ["23456"]
