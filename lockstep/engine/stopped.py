"""Ends ranks of our launcher that are stopped (SIGSTOP) when others have ended already. Torch-free.

While a run goes on, ranks notice a stopped one themselves. Once a rank has ended, nobody is left who waits for the
stopped one but the launcher, which would wait for ever: a stopped process takes no signal but SIGKILL.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

TICK_S = 1.0
STOPPED_S = 15.0  # someone may have stopped it for a look


@contextlib.contextmanager
def end_stopped_ranks(num_ranks: int) -> Iterator[set[int]]:
    """While inside, such ranks are ended; yields those that were."""
    ended: set[int] = set()
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(num_ranks, stop, ended), name="lockstep-stopped", daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join(TICK_S)


def _watch(num_ranks: int, stop: threading.Event, ended: set[int]) -> None:
    """Ticks are counted rather than time: a launcher that was stopped too, as by Ctrl-Z, has seen no time pass."""
    seen: set[int] = set()
    ticks: dict[int, int] = {}
    while not stop.wait(TICK_S):
        if len(seen) < num_ranks:
            seen |= find_ranks()  # asks for every process of the machine, so no longer than it takes to know ours
        states = {pid: state for pid in seen if (state := _read_state(pid))}
        if not states:
            seen.clear()  # all have ended, and may be started again
        if seen <= states.keys():
            ticks.clear()
            continue  # nobody has ended
        stopped = [pid for pid, state in states.items() if state == "T"]
        ticks = {pid: ticks.get(pid, 0) + 1 for pid in stopped}
        for pid, count in ticks.items():
            if count * TICK_S >= STOPPED_S:
                ended.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def find_ranks() -> set[int]:
    """The ranks among this process's children."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"\0RANK=" in b"\0" + (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def _read_state(pid: int) -> str:
    """The system's letter for what a child does; empty for one that has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return ""
    return state if state not in "ZX" and int(parent) == os.getpid() else ""
