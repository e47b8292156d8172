"""The processes of a run, found by a mark in their environment: launchers, ranks, all that is left. Torch-free."""

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

MARKER = "LOCKSTEP_CHAOS"
NAME = "lockstep:"  # how the name of a rank begins that was forked, followed by its rank
POLL_S = 0.02


def find_processes(marker: str) -> list[int]:
    """Processes that were started, however indirectly, with this marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARKER}={marker}".encode() in _read_environment(int(folder.name)) and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def find_ranks(marker: str) -> dict[int, int]:
    """The process of each rank that is there: one that was forked says its rank by its name, others were told it."""
    found: dict[int, int] = {}
    for pid in sorted(find_processes(marker)):
        with contextlib.suppress(OSError, ValueError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name.startswith(NAME):
                found[int(name.removeprefix(NAME))] = pid
                continue
            told = [item for item in _read_environment(pid) if item.startswith(b"RANK=")]
            if told and int(told[0].removeprefix(b"RANK=")) not in found:  # whatever a rank has started came later
                found[int(told[0].removeprefix(b"RANK="))] = pid
    return found


def find_rank(marker: str, rank: int) -> int | None:
    """The process of a rank; None while there is none."""
    return find_ranks(marker).get(rank)


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def wait_until_gone(marker: str, seconds: float = 5.0) -> list[int]:
    """Processes of a run that are still there after a while; they are ended."""
    end = time.monotonic() + seconds
    while (left := find_processes(marker)) and time.monotonic() < end:
        time.sleep(POLL_S)
    kill(left)
    return left


def kill(pids: Collection[int]) -> None:
    """End them by force."""
    for pid in pids:
        send(pid, signal.SIGKILL)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _read_environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
