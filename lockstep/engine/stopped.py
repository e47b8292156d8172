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
def end_stopped_ranks() -> Iterator[set[int]]:
    """While inside, such ranks are ended; yields those that were."""
    ended: set[int] = set()
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(stop, ended), name="lockstep-stopped", daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join(TICK_S)


def _watch(stop: threading.Event, ended: set[int]) -> None:
    """Ticks are counted rather than time: a launcher that was stopped too, as by Ctrl-Z, has seen no time pass."""
    seen: set[int] = set()
    ticks: dict[int, int] = {}
    while not stop.wait(TICK_S):
        states = list_ranks()
        seen |= states.keys()
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


def list_ranks() -> dict[int, str]:
    """The ranks among this process's children that have not ended, and the state each is in, by the system's letter."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            is_rank = int(parent) == os.getpid() and b"\0RANK=" in b"\0" + (folder / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        if is_rank and state not in "ZX":
            found[int(folder.name)] = state
    return found
