"""What of a run lasts: checkpoints on disk, snapshots in memory, the one it goes on from (step 10 on the walk).

A checkpoint is copied between two steps and written by a thread, while steps go on; one at a time:

    steps       100 | copy | 101 | 102 | 103 | … | 200 | wait, if need be | copy | 201
    its thread             | hash, write, flush, rename |                        | hash …

It counts once it is on disk: what a kill leaves of one is removed, and the run goes on from the one before it.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.engine.build import Parts, Sources
from lockstep.engine.checkpoint import Saved, list_checkpoints
from lockstep.engine.identity import share_identity
from lockstep.engine.resume import TakenUp, take_up
from lockstep.engine.snapshot import Snapshots
from lockstep.engine.state import State, prepare_checkpoint
from lockstep.errors import SharedError
from lockstep.events import CheckpointSaved, Event, Notice
from lockstep.restarts import can_restart


class Writing:
    """A checkpoint on its way to the disk."""

    def __init__(self, step: int, write: Callable[[], Saved], begun_s: float) -> None:
        """`begun_s`: since when steps have waited for it, by `time.perf_counter`."""
        self.step = step
        writer = ThreadPoolExecutor(1, "lockstep-checkpoint")
        self._done = writer.submit(lambda: (write(), time.time()))
        writer.shutdown(wait=False)  # its thread ends with this; a process that ends waits for it
        self._held_s = time.perf_counter() - begun_s

    @property
    def is_done(self) -> bool:
        return self._done.done()

    def finish(self) -> CheckpointSaved:
        """Wait until it is on disk; OSError where it cannot be written."""
        begun_s = time.perf_counter()
        saved, done_s = self._done.result()
        held_s = self._held_s + time.perf_counter() - begun_s
        path, num_bytes = str(saved.path), saved.num_bytes
        return CheckpointSaved(
            time_s=done_s, step=self.step, path=path, bytes=num_bytes, seconds=held_s, write_s=saved.seconds
        )


class Keeper:
    """Writes a run's state down and finds it again; every rank has one of these, and all decide alike."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        world: World,
        sources: Sources,
        parts: Parts,
        emit: Callable[[Event], None],
        warn: Callable[[str], None],
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`emit` is for what rank 0 has to say, `warn` for any rank; `is_ours` is whether its folder is in place."""
        self._folder = folder
        self._is_ours = is_ours
        self._disk = folder / "checkpoints"
        self._keep = config.train.keep_checkpoints
        self._counts = {
            "seed": config.train.seed,
            "num_samples": sources.train.num_samples,
            "global_batch": config.train.global_batch,
        }
        self._world = world
        self._train = sources.train
        self._parts = parts
        self._emit = emit
        self._warn = warn
        run = share_identity(folder, world, self._warn_of_identity)
        self._snapshots = Snapshots(folder, run, world, config.train.snapshot_share)
        self._writing: Writing | None = None  # on rank 0, if one is on its way
        self._unsaved = ""  # why the last checkpoint could not be written
        self._is_renumbered = False  # whether steps are counted in other batches than those of the older checkpoints
        self._has_old_snapshots = False  # which would be taken for newer then, by their steps

    def _warn_of_identity(self, failure: str) -> None:
        if can_restart(os.environ):  # else nobody needs it
            self._warn(f"{failure}; ranks that start again go on from the last checkpoint on disk.")

    @cached_property
    def _order(self) -> Mapping[str, Any]:
        """What the data order depends on, and what tells the data from others; first asked for by all ranks at once."""
        fingerprint = self._world.broadcast_value(self._train.fingerprint() if self._world.is_first else {})
        return {**self._counts, "data": fingerprint}

    def begin(self, step: int) -> None:
        """The run starts, or goes on, from this step."""
        self._snapshots.begin(step)

    def take_up(self) -> TakenUp | None:
        """Fill the parts from the newest good state; None where there is none yet."""
        found = take_up(self._disk, self._snapshots, self._parts, self._world, self._order, self._warn)
        self._is_renumbered = self._has_old_snapshots = found is not None and found.is_renumbered
        return found

    def find_good(self) -> Path | None:
        """The last checkpoint on disk."""
        self.settle()
        return next(iter(list_checkpoints(self._disk)), None)

    def save(self, state: State) -> None:
        """Begin to write a checkpoint; a disk that cannot take it costs the checkpoint, not the run."""
        self.settle()
        begun_s = time.perf_counter()
        if self._world.broadcast_value(self._world.is_first and not self._is_ours()):
            # Else it would be written into a new folder, which nobody could go on from.
            raise SharedError(
                f"The run's folder {self._folder} was moved or deleted while the run went on, so step {state.step} was "
                "not saved; put it back, and go on from its last checkpoint with --resume."
            )
        write = prepare_checkpoint(
            self._disk,
            state,
            self._parts,
            self._world,
            self._order,
            keep=self._keep,
            drop_later=self._is_renumbered,
            classes=self._train.classes,
        )
        if write:
            self._writing = Writing(state.step, write, begun_s)
        if self._has_old_snapshots:
            self.settle()
            if not self._world.broadcast_value(self._unsaved):
                self._snapshots.clear()
                self._has_old_snapshots = False

    def look(self) -> None:
        """Say of a checkpoint that it is on disk, or why not, once that is so."""
        if self._writing and self._writing.is_done:
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint that is on its way, if any, and say how it went."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            saved = writing.finish()
        except OSError as error:
            self._unsaved = (
                f"The checkpoint of step {writing.step} could not be written to {self._disk} "
                f"({error.strerror or error}); free some space there."
            )
            self._emit(Notice(level="warning", text=self._unsaved))
            return
        self._unsaved = ""
        self._emit(saved)

    def save_at_last(self, state: State) -> None:
        """If the last checkpoint could not be written: once more, and a run that cannot keep its last steps failed."""
        self.settle()
        if not self._world.broadcast_value(self._unsaved):  # which rank 0 alone knows
            return
        self.save(state)
        self.settle()
        if failure := self._world.broadcast_value(self._unsaved):
            raise SharedError(failure)

    def snap(self, state: State) -> None:
        """Keep a snapshot in memory, if one is due."""
        if not self._snapshots.is_due(state.step):
            return
        self.settle()  # who finds that numbers are no longer finite names the last good checkpoint
        if failure := self._snapshots.take(self._disk, state, self._parts, self._world, self._order):
            self._warn(f"{failure}; ranks that start again go on from the last checkpoint on disk.")

    def drop_snapshots(self) -> None:
        """Give the memory back: nobody will start this run again by himself."""
        self._snapshots.clear()
