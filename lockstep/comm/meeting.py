"""Where ranks meet: a store that listens on one address alone, and interfaces for the backends (before step 0).

Stock stores listen on every address of a machine and believe whoever calls. Here the socket is ours, bound to the one
address the ranks were told; on one machine that is its loopback, which no other machine reaches.
"""

import contextlib
import ipaddress
import os
import resource
import socket
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lockstep.errors import LockstepError

LOOPBACK = "127.0.0.1"
# Of Gloo, NCCL and TensorPipe: which interface they listen on.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
BACKLOG = 4096  # ranks that call at the same time; the system may allow fewer
MAX_FILES = 65536
NOTHING = "-"  # which no rank leaves


def find_loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def stay_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Let backends listen on the loopback interface, unless someone has named another."""
    for variable in INTERFACES:
        environment.setdefault(variable, find_loopback())


def is_loopback(address: str) -> bool:
    """Whether an address says that all ranks are on this machine; a machine's name never does, whatever it means."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_listener(address: str, port: int, *, spans_nodes: bool = False) -> socket.socket:
    """A socket that listens on `address` and no other; a name that other nodes cannot mean is a sentence."""
    meeting = f"Rank 0 could not meet the other ranks at {address}:{port}"
    failure: OSError | None = None
    try:
        for family, place in _resolve(address, port):
            # Some systems give a machine's own name a loopback address: other nodes would knock elsewhere.
            if spans_nodes and not is_loopback(address) and is_loopback(str(place[0])):
                raise LockstepError(
                    f"{meeting}, a name for its loopback there; set MASTER_ADDR to its address in the network."
                )
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(place)
                listener.listen(BACKLOG)
                return listener
            except OSError as error:
                listener.close()
                failure = error
    except OSError as error:  # the name means nothing here
        failure = error
    raise LockstepError(
        f"{meeting} ({failure.strerror if failure else 'no such address'}); "
        "set MASTER_ADDR to an address of its machine and MASTER_PORT to a free port."
    )


def keep_store(listener: socket.socket, size: int, timeout_s: float, *, waits: bool) -> TCPStore:
    """A store behind a socket of ours, which it takes over; with `waits` it returns when all `size` have come."""
    host, port = listener.getsockname()[:2]
    _allow_files()
    # The store holds the number of the socket, not the object: that must not close it.
    number = listener.detach()
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, size, True, timeout, wait_for_workers=waits, master_listen_fd=number)


def join_store(address: str, port: int, rank: int, size: int, timeout_s: float, *, spans_nodes: bool) -> Store:
    """The store that all ranks meet in: rank 0 keeps it, unless the launcher does."""
    if rank == 0 and not is_kept_by_launcher():
        return keep_store(open_listener(address, port, spans_nodes=spans_nodes), size, timeout_s, waits=True)
    return _call_store(address, port, size, timeout_s, waits=not is_kept_by_launcher())


def call_again(address: str, port: int, size: int, timeout_s: float) -> Store:
    """A second line to the store, for one who must not wait behind what others ask of the first."""
    return _call_store(address, port, size, timeout_s, waits=False)


def peek(store: Store, key: str) -> bytes | None:
    """What lies under a key now; None for nothing. `get` would wait for what somebody takes away in between."""
    value = store.compare_set(key, NOTHING, NOTHING)  # where there is nothing, it stays so
    return None if value == NOTHING.encode() else value


def is_kept_by_launcher() -> bool:
    """Whether torchrun's agent, or ours, keeps the store itself."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def separate_attempt(store: Store, place: int = 0) -> Store:
    """The part of a store that belongs to this start of the ranks: a launcher's outlives a restart.

    `place` counts the worlds that these ranks have been in, one after the other. Rank 0's own store does not outlive a
    world, and there the count of restarts would keep ranks apart: a node that has come later counts anew.
    """
    if not is_kept_by_launcher():
        return store
    attempt = f"lockstep/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(f"{attempt}/world-{place}" if place else attempt, store)


def _call_store(address: str, port: int, size: int, timeout_s: float, *, waits: bool) -> TCPStore:
    return TCPStore(address, port, size, False, timedelta(seconds=timeout_s), wait_for_workers=waits)


def _resolve(address: str, port: int) -> list[tuple[int, Any]]:
    """Families and socket addresses of a name, IPv4 first: it is what every machine has."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return sorted(((int(family), place) for family, _, _, _, place in found), key=lambda option: option[0])


def _allow_files() -> None:
    """Room for two lines from each rank, where the system lets us have more open files than the usual 1,024."""
    with contextlib.suppress(OSError, ValueError):
        few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
        if few != resource.RLIM_INFINITY and few < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
