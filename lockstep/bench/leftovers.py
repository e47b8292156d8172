"""What a virtual cluster leaves on the machine, and its removal whatever becomes of the process that made it.

A cluster's name holds its owner. Its namespaces begin with that name and its ranks carry it in their environment, so
that both can be found again by anybody: the owner, a watcher that outlives it, or the next cluster. Torch-free.
"""

import contextlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMESPACES = Path("/run/netns")
MARKER = "LOCKSTEP_CLUSTER"  # the variable in which a rank carries the name of its cluster
_NAME = re.compile(r"lockstep-(?P<owner>\d+)-(?P<started>\d+)-\d+")
_numbers = itertools.count()


def name_cluster() -> str:
    """A name of this process's own; with the time it started, because process numbers are used again."""
    return f"lockstep-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"


def start_watcher(name: str) -> "subprocess.Popen[Any] | None":
    """A process that removes the cluster as soon as its owner is dead, however it died."""
    if sys.platform != "linux":
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep.bench.leftovers", name],
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(Path(__file__).parents[2])},
        # Holding none of the owner's pipes, and out of reach of its Ctrl-C.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def remove_leftovers() -> None:
    """Remove the clusters of owners that died, and their watchers with them."""
    namespaces = (_NAME.match(path.name) for path in NAMESPACES.glob("lockstep-*"))
    for name in {match.group() for match in namespaces if match} | set(_find_ranks()):
        if not _is_owned(name):
            remove_cluster(name)


def remove_cluster(name: str) -> None:
    """Kill what runs in a cluster and delete its namespaces; others may be doing the same."""
    deadline = time.monotonic() + 5
    while (ranks := _find_ranks().get(name)) and time.monotonic() < deadline:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for path in NAMESPACES.glob(f"{name}-*"):
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


def _watch(name: str) -> None:
    """Sleep until the owner is dead, then remove the cluster."""
    match = _NAME.fullmatch(name)
    assert match
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(int(match["owner"]))
        # Asked only now that the number is pinned down: before, it might have become somebody else's in between.
        if _is_owned(name):
            select.select([owner], [], [])
    remove_cluster(name)


def _find_ranks() -> dict[str, list[int]]:
    """Living processes by the cluster they were started in."""
    found: dict[str, list[int]] = {}
    marker = f"{MARKER}=".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to read
            for variable in (folder / "environ").read_bytes().split(b"\0"):
                name = variable.removeprefix(marker).decode(errors="replace")
                if variable.startswith(marker) and _NAME.fullmatch(name) and int(folder.name) != os.getpid():
                    found.setdefault(name, []).append(int(folder.name))
    return found


def _is_owned(name: str) -> bool:
    """Whether the process that made this cluster is still alive."""
    match = _NAME.fullmatch(name)
    return match is not None and _start_time(int(match["owner"])) == int(match["started"])


def _start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 for one that does not live, or where nobody can say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


if __name__ == "__main__":
    _watch(sys.argv[1])
