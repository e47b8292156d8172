"""A run on one machine, seen from outside it: nothing to connect to."""

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.engine.test_launch import slurm_variables
from tests.ranks import find_port
from tests.sockets import find_outside_address, list_listeners


@pytest.fixture
def listeners(images: Path, tmp_path: Path) -> Iterator[list[tuple[str, int]]]:
    """What the launcher and two ranks listen on while they train."""
    settings = [*tiny_settings(images), "train.duration=4000st", "optim.warmup=0st", "train.eval_every=0st"]
    process = commands.start(
        "train", "quickstart", *[f"--set={setting}" for setting in settings], "--ranks=2", f"--out={tmp_path / 'run'}"
    )
    try:
        commands.wait_for_step(tmp_path / "run", 2, process)
        yield list_listeners([process.pid, *commands.list_children(process.pid)])
    finally:
        commands.kill_all(process)


def test_all_processes_of_a_run_listen_on_the_loopback_alone_and_no_other_address_answers(
    listeners: list[tuple[str, int]],
) -> None:
    assert len(listeners) >= 3  # the store's and each rank's
    assert [place for place in listeners if not ipaddress.ip_address(place[0]).is_loopback] == []
    address = find_outside_address()
    if address is None:
        pytest.skip("this machine has no address but the loopback's")
    for _, port in listeners:
        with socket.socket() as caller, pytest.raises(ConnectionRefusedError):
            caller.connect((address, port))


def test_ranks_that_srun_starts_listen_on_the_address_they_were_told_and_on_no_other(
    images: Path, tmp_path: Path
) -> None:
    address = find_outside_address()
    if address is None:
        pytest.skip("this machine has no address but the loopback's")
    settings = [*tiny_settings(images), "train.duration=4000st", "optim.warmup=0st", "train.eval_every=0st"]
    wanted = ["train", "quickstart", *[f"--set={setting}" for setting in settings], f"--out={tmp_path / 'run'}"]
    port = find_port()
    ranks = [
        commands.start(*wanted, **slurm_variables(rank, port), MASTER_ADDR=address, LOCKSTEP_SECRET="shared")
        for rank in range(2)
    ]
    try:
        commands.wait_for_step(tmp_path / "run", 2, ranks[0])
        listeners = list_listeners([rank.pid for rank in ranks])
    finally:
        for rank in ranks:
            commands.kill_all(rank)
    assert (address, port) in listeners
    assert {host for host, number in listeners if number != port} == {"127.0.0.1"}
