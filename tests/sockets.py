"""Who listens where, as the system itself tells it in /proc."""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # for UDP: takes what anybody sends


def list_listeners(pids: Iterable[int | str]) -> list[tuple[str, int]]:
    """Address and port of every TCP or UDP socket that one of these processes listens on."""
    own = set().union(*(_list_sockets(pid) for pid in pids))
    found = []
    for table in LISTENING:
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == LISTENING[table] and fields[9] in own:
                host, _, port = fields[1].partition(":")
                found.append((_read_address(host), int(port, 16)))
    return found


def _list_sockets(pid: int | str) -> set[str]:
    """The numbers of the sockets that a process holds."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _read_address(text: str) -> str:
    """The kernel writes addresses as words in the machine's own byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def find_outside_address() -> str | None:
    """An address of this machine that others could reach; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing: it only chooses an address
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if ipaddress.ip_address(address).is_loopback else address
