"""A run's newest state in the memory of every node, for ranks that are started again (step 10 on the walk).

A rank that is lost takes its memory along; a node's memory stays. Where ranks can be started again, one rank of each
node now and then writes a checkpoint there: as often as it costs no more than a given share of the time. Ranks that
start again take the newest one that any node holds, or the disk's if that is newer. It is an ordinary checkpoint,
verified as such; it goes when the run ends.
"""

import errno
import hashlib
import math
import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.comm.world import World
from lockstep.engine.build import Parts
from lockstep.engine.checkpoint import list_checkpoints, save_checkpoint
from lockstep.engine.state import State, gathered_state
from lockstep.restarts import can_restart

MEMORY = Path("/dev/shm")  # a file system in memory on every Linux
OLD_S = 3600.0  # a run that goes on writes more often; what is older was left by one that was killed with all its ranks


class Snapshots:
    """Takes them when they are due; every rank has one of these, and all decide alike."""

    def __init__(self, run_folder: Path, world: World, share: float) -> None:
        self.folder = find_memory(run_folder)
        self._share = share if can_restart(os.environ) and MEMORY.is_dir() else 0.0
        self._writes = world.local_rank == 0
        self._due_step = 0
        self._last = 0, time.perf_counter()  # step, when

    def begin(self, step: int) -> None:
        """The run starts, or goes on, from this step."""
        self._due_step, self._last = step + 1, (step, time.perf_counter())
        if self._writes:
            sweep_memory()
            if not step:
                clear_memory(self.folder)  # of another run in this folder

    def is_due(self, step: int) -> bool:
        return self._share > 0 and step >= self._due_step

    def take(self, disk: Path, state: State, parts: Parts, world: World, order: Mapping[str, Any]) -> str:
        """Every rank must call it. Why this node cannot keep one, the first time that is so; empty otherwise."""
        failure, begun_s = "", time.perf_counter()
        with gathered_state(disk, state, parts, world, order) as (files, counters):
            if self._writes:
                try:
                    make_private(self.folder)
                    save_checkpoint(self.folder, state.step, files, counters, keep=1, drop_later=True)
                except OSError as error:
                    self._writes = False
                    clear_memory(self.folder)
                    failure = f"No snapshots in memory ({error.strerror or error}: {self.folder})"
        now_s = time.perf_counter()
        step, last_s = self._last
        step_s = max(1e-9, (begun_s - last_s) / max(1, state.step - step))
        # Rank 0's clock counts.
        steps = world.broadcast_value(math.ceil((now_s - begun_s) / (self._share * step_s)))
        self._due_step = state.step + max(1, int(steps))
        self._last = state.step, now_s
        return failure

    def find_newest(self) -> int:
        """The step of the one that this rank can read; -1 for none."""
        if self._writes and is_private(self.folder):
            for path in list_checkpoints(self.folder):
                return int(path.name.rpartition("-")[2])
        return -1

    def clear(self) -> None:
        """Give the memory back."""
        if self._writes:
            clear_memory(self.folder)


def find_memory(run_folder: Path) -> Path:
    """Where the snapshots of a run lie on this node."""
    # Two nodes may be two names for one machine, as in tests.
    name = f"{os.environ.get('LOCKSTEP_NODE', '')}:{run_folder.absolute()}"
    return MEMORY / f"{_prefix()}{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:20]}"


def _prefix() -> str:
    return f"lockstep-{os.getuid()}-"


def make_private(folder: Path) -> None:
    """A folder of ours alone: everybody may write to a machine's shared memory."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise OSError(errno.EPERM, "it is somebody else's", str(folder))


def is_private(folder: Path) -> bool:
    """Whether it is a folder that nobody else can have put something into."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def clear_memory(folder: Path) -> None:
    """Remove the snapshots of one run."""
    if is_private(folder):
        shutil.rmtree(folder, ignore_errors=True)


def sweep_memory() -> None:
    """Remove what runs have left that were killed together with whoever would have started them again."""
    for folder in MEMORY.glob(f"{_prefix()}*"):
        try:
            is_old = time.time() - folder.lstat().st_mtime > OLD_S
        except OSError:
            continue
        if is_old:
            clear_memory(folder)
