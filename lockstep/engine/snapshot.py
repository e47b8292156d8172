"""A run's newest state in the memory of every node, for ranks that are started again (step 10 on the walk).

A rank that is lost takes its memory along; a node's memory stays. Where ranks can be started again, one rank of each
node now and then writes a checkpoint there: as often as it costs no more than a given share of the time. Ranks that
start again take the newest one that any node holds, or the disk's if that is newer. It is an ordinary checkpoint,
verified as such; it goes when the run ends. Its folder is named for the run's path and identity, and its manifest has
the identity too: those of other runs are neither taken up nor removed.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.comm.world import World
from lockstep.engine.build import Parts
from lockstep.engine.checkpoint import MANIFEST, MAX_MANIFEST_BYTES, list_checkpoints, save_checkpoint
from lockstep.engine.state import State, gathered_state
from lockstep.files import read_small
from lockstep.private import is_private, make_private
from lockstep.restarts import can_restart, count_restarts, read_agent_start

MEMORY = Path("/dev/shm")  # a file system in memory on every Linux
OLD_S = 3600.0  # a run that goes on writes more often; what is older was left by one that was killed with all its ranks
IDENTITY = "run"  # the key of the run's identity in a manifest
CLOCK_S = 1.0  # by which the file system's clock may differ from that of processes


class Snapshots:
    """Takes them when they are due; every rank has one of these, and all decide alike."""

    def __init__(self, run_folder: Path, run: str, world: World, share: float) -> None:
        """`run` is its identity; one without has no snapshots."""
        self.folder = find_memory(run_folder, run)
        self._run = run
        self._share = share if run and can_restart(os.environ) and MEMORY.is_dir() else 0.0
        self._writes = world.local_rank == 0 and bool(run)
        self._due_step = 0
        self._last = 0, time.perf_counter()  # step, when

    def begin(self, step: int) -> None:
        """The run starts, or goes on, from this step."""
        self._due_step, self._last = step + 1, (step, time.perf_counter())
        if self._writes:
            sweep_memory()
            if not step:
                clear_memory(self.folder)  # of no use, or the run would not begin anew

    def is_due(self, step: int) -> bool:
        return self._share > 0 and step >= self._due_step

    def take(self, disk: Path, state: State, parts: Parts, world: World, order: Mapping[str, Any]) -> str:
        """Every rank must call it. Why this node cannot keep one, the first time that is so; empty otherwise."""
        failure, begun_s = "", time.perf_counter()
        with gathered_state(disk, state, parts, world, order) as (collect, counters):
            if self._writes:
                try:
                    make_private(self.folder)
                    told = counters | {IDENTITY: self._run}
                    save_checkpoint(self.folder, state.step, collect(), told, keep=1, drop_later=True)
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
                return int(path.name.rpartition("-")[2]) if _may_be_of(path, self._run) else -1
        return -1

    def clear(self) -> None:
        """Give the memory back."""
        if self._writes:
            clear_memory(self.folder)


def find_memory(run_folder: Path, run: str) -> Path:
    """Where the snapshots of a run lie on this node: by its folder, which may be a copy, and its identity."""
    return MEMORY / f"{_prefix()}{_hash_path(run_folder)}-{run}"


def has_begun_here(run_folder: Path) -> bool:
    """Whether a run in this folder took a step on this node before its ranks were started again, by its snapshots."""
    if not count_restarts(os.environ):
        return False
    # Those that are older were left by a run of another agent.
    since_s = read_agent_start() - CLOCK_S
    return any(_read_time(folder) >= since_s for folder in MEMORY.glob(f"{_prefix()}{_hash_path(run_folder)}-*"))


def _read_time(folder: Path) -> float:
    """When a snapshot was last written there, by the clock; below any time where it cannot be one of ours."""
    with contextlib.suppress(OSError):
        return folder.lstat().st_mtime if is_private(folder) else -math.inf
    return -math.inf


def _hash_path(run_folder: Path) -> str:
    # Two nodes may be two names for one machine, as in tests.
    name = f"{os.environ.get('LOCKSTEP_NODE', '')}:{run_folder.absolute()}"
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:20]


def _may_be_of(snapshot: Path, run: str) -> bool:
    """Whether its manifest has the run's identity; of a damaged one, whoever reads it says what is wrong."""
    try:
        state = json.loads(read_small(snapshot / MANIFEST, MAX_MANIFEST_BYTES))["state"]
        return bool(state[IDENTITY] == run)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def _prefix() -> str:
    return f"lockstep-{os.getuid()}-"


def clear_memory(folder: Path) -> None:
    """Remove the snapshots in one folder."""
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
