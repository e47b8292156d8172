"""A stranger in the network of a run: calls every port it finds, and knows the protocol of PyTorch's store.

Run in a network namespace of its own as `python stranger.py WAY`; what it shall attack comes on its standard input. It
says "done" after its first rounds.
"""

import json
import os
import pickle
import random
import select
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

Place = tuple[str, int]
LISTENING = "0A"
MAX_HELD = 200  # lines that are opened and left silent
SAID = 20  # rounds after which it says so; a full pipe must not stop it


class Touch:
    """Unpickled, it leaves a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TOUCHED"],)


def build_values() -> list[str]:
    """Nothing that a rank would leave, and something that nobody should unpickle."""
    return ["", "nonsense", "ÿ" * 4000, "9" * 300, "- 99999 99999 99999 on x", "-1", "x" * 100_000, "-"] + [
        pickle.dumps(Touch(), 0).decode("latin-1")
    ] * 3


OWN = ("place/{}", "agreed/{}", "pulse/{}", "lost", "left", "heard")


def find_open(address: str, ports: range = range(1, 65536)) -> list[int]:
    """The ports that answer, by knocking at every one of them."""
    found = []
    for start in range(0, len(ports), 500):
        poll, lines = select.epoll(), {}
        for port in ports[start : start + 500]:
            line = socket.socket()
            line.setblocking(False)
            line.connect_ex((address, port))
            lines[line.fileno()] = line, port
            poll.register(line.fileno(), select.EPOLLOUT | select.EPOLLERR)
        waiting = set(lines)
        while waiting and (ready := poll.poll(2)):
            for number in {number for number, _ in ready} & waiting:
                waiting.discard(number)
                poll.unregister(number)
                if lines[number][0].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append(lines[number][1])
        for line, _ in lines.values():
            line.close()
        poll.close()
    return found


def list_places(nodes: dict[str, int]) -> list[Place]:
    """All that the ranks listen on, as their own systems tell: a scan would find the same, later."""
    found = []
    for address, pid in nodes.items():
        try:
            lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        except OSError:
            continue
        found += [(address, int(line.split()[1][-4:], 16)) for line in lines if line.split()[3] == LISTENING]
    return found


def send_garbage(place: Place, held: list[socket.socket]) -> None:
    """A line that stays silent, one with nonsense on it, or one that is hung up amid a word."""
    # Not the small numbers that Gloo's ranks greet each other with: those it would believe (SECURITY.md).
    words = [os.urandom(5000), b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n", b"\x3c\x85\xf7\xce"]
    line = socket.create_connection(place, timeout=0.5)
    line.setblocking(False)
    if random.random() < 0.8:
        line.send(random.choice(words))
    if random.random() < 0.5 and len(held) < MAX_HELD:
        held.append(line)
    else:
        line.close()


def open_store(place: Place) -> Any:
    from torch.distributed import TCPStore

    socket.create_connection(place, timeout=0.5).close()  # the store's own client would take its time
    return TCPStore(*place, None, False, timedelta(seconds=5), wait_for_workers=False)


def spoil_store(store: Any) -> None:
    """Overwrite, delete and count up what the ranks left for each other, and now and then all there is."""
    names = [f"lockstep/attempt-0/lockstep/{name.format(rank)}" for name in OWN for rank in range(2)]
    if random.random() < 0.3:
        names = store.list_keys()
    for name in names:
        if random.random() < 0.3:
            store.delete_key(name)
        else:
            store.set(name, random.choice(build_values()))


def main() -> None:
    way = sys.argv[1]
    if way == "store":
        import torch.distributed  # noqa: F401  # before there is a hurry
    print("begun", flush=True)
    wanted = json.loads(sys.stdin.readline())
    if way == "scan":
        print(*find_open(wanted["address"]), flush=True)
        return
    held: list[socket.socket] = []
    store, num_rounds = None, 0
    while True:  # until somebody ends it
        try:
            if way == "garbage":
                for place in list_places(wanted["nodes"]):
                    send_garbage(place, held)
                time.sleep(0.02)
            else:
                store = store or open_store(tuple(wanted["store"]))
                spoil_store(store)
            num_rounds += 1
            if num_rounds <= SAID:
                print("done", flush=True)
        except (OSError, RuntimeError):
            store = None
            time.sleep(0.005)


if __name__ == "__main__":
    main()
