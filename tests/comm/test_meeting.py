"""The store that ranks meet in listens on the address they were told, and on no other."""

import socket
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from lockstep.comm import meeting
from lockstep.comm.meeting import INTERFACES, is_loopback, keep_store, open_listener, peek, stay_on_loopback
from lockstep.errors import LockstepError
from tests.ranks import find_port
from tests.sockets import find_outside_address, list_listeners


def test_a_store_listens_on_its_address_alone_and_serves_who_calls() -> None:
    listener = open_listener("localhost", 0)
    port = listener.getsockname()[1]
    store = keep_store(listener, 1, 20, waits=False)
    other = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20))
    other.set("key", "value")
    assert store.get("key") == b"value"
    hosts = [host for host, number in list_listeners(["self"]) if number == port]
    assert hosts == ["127.0.0.1"]


def test_what_lies_in_a_store_is_looked_at_without_waiting_for_it() -> None:
    store = keep_store(open_listener("localhost", 0), 1, 20, waits=False)
    assert peek(store, "key") is None
    assert not store.check(["key"])  # and looking leaves nothing there
    store.set("key", "value")
    assert peek(store, "key") == b"value"
    store.delete_key("key")
    begun = time.monotonic()
    assert peek(store, "key") is None
    assert time.monotonic() - begun < 10


def test_who_listens_is_told_for_udp_too() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("0.0.0.0", 0))
        assert ("0.0.0.0", receiver.getsockname()[1]) in list_listeners(["self"])


def test_another_address_of_the_machine_can_be_named(outside: str) -> None:
    with open_listener(outside, 0, spans_nodes=True) as listener:
        assert listener.getsockname()[0] == outside
        with socket.socket() as caller, pytest.raises(ConnectionRefusedError):
            caller.connect(("127.0.0.1", listener.getsockname()[1]))


@pytest.fixture
def outside() -> str:
    address = find_outside_address()
    if address is None:
        pytest.skip("this machine has no address but the loopback's")
    return address


def test_a_taken_port_is_a_sentence() -> None:
    with open_listener("127.0.0.1", 0) as holder, pytest.raises(LockstepError, match="MASTER_PORT to a free port"):
        open_listener("127.0.0.1", holder.getsockname()[1])


@pytest.mark.parametrize("address", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_a_sentence(address: str) -> None:
    with pytest.raises(LockstepError, match="set MASTER_ADDR to an address of its machine"):
        open_listener(address, find_port())


def test_a_name_that_other_nodes_cannot_mean_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems whose hosts file gives a machine's own name 127.0.1.1."""
    monkeypatch.setattr(meeting, "_resolve", lambda address, port: [(socket.AF_INET, ("127.0.1.1", port))])
    with pytest.raises(LockstepError, match="a name for its loopback"):
        open_listener("gpu003", find_port(), spans_nodes=True)
    open_listener("gpu003", find_port()).close()  # all ranks on one node reach it


@pytest.mark.parametrize(
    ("address", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("192.0.2.2", False), ("gpu003", False)],
)
def test_only_an_address_that_says_so_is_the_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_backends_stay_on_the_loopback_unless_an_interface_is_named() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    stay_on_loopback(environment)
    assert environment == dict.fromkeys(INTERFACES, "lo") | {"NCCL_SOCKET_IFNAME": "ib0"}
