"""What of a run lasts: checkpoints on disk, snapshots in memory, the one it goes on from (step 10 on the walk)."""

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.engine.build import Parts, Sources
from lockstep.engine.checkpoint import list_checkpoints
from lockstep.engine.identity import share_identity
from lockstep.engine.resume import TakenUp, take_up
from lockstep.engine.snapshot import Snapshots
from lockstep.engine.state import State, save_state
from lockstep.errors import SharedError
from lockstep.events import CheckpointSaved, Event, Notice
from lockstep.restarts import can_restart


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
        self._unsaved = ""  # why the last checkpoint could not be written
        self._is_renumbered = False  # whether steps are counted in other batches than those of the older checkpoints

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
        self._is_renumbered = found is not None and found.is_renumbered
        return found

    def find_good(self) -> Path | None:
        """The last checkpoint on disk."""
        return next(iter(list_checkpoints(self._disk)), None)

    def save(self, state: State) -> None:
        """Write a checkpoint; a disk that cannot take it costs the checkpoint, not the run."""
        if self._world.broadcast_value(self._world.is_first and not self._is_ours()):
            # Else it would be written into a new folder, which nobody could go on from.
            raise SharedError(
                f"The run's folder {self._folder} was moved or deleted while the run went on, so step {state.step} was "
                "not saved; put it back, and go on from its last checkpoint with --resume."
            )
        try:
            saved = save_state(
                self._disk,
                state,
                self._parts,
                self._world,
                self._order,
                keep=self._keep,
                drop_later=self._is_renumbered,
                classes=self._train.classes,
            )
        except OSError as error:
            self._unsaved = (
                f"The checkpoint of step {state.step} could not be written to {self._disk} "
                f"({error.strerror or error}); free some space there."
            )
            self._emit(Notice(level="warning", text=self._unsaved))
            return
        self._unsaved = ""
        if self._is_renumbered:  # those of before would be taken for newer, by their steps
            self._snapshots.clear()
        if saved:
            self._emit(
                CheckpointSaved(step=state.step, path=str(saved.path), bytes=saved.num_bytes, seconds=saved.seconds)
            )

    def save_at_last(self, state: State) -> None:
        """If the last checkpoint could not be written: once more, and a run that cannot keep its last steps failed."""
        if not self._world.broadcast_value(self._unsaved):  # which rank 0 alone knows
            return
        self.save(state)
        if failure := self._world.broadcast_value(self._unsaved):
            raise SharedError(failure)

    def snap(self, state: State) -> None:
        """Keep a snapshot in memory, if one is due."""
        if self._snapshots.is_due(state.step) and (
            failure := self._snapshots.take(self._disk, state, self._parts, self._world, self._order)
        ):
            self._warn(f"{failure}; ranks that start again go on from the last checkpoint on disk.")

    def drop_snapshots(self) -> None:
        """Give the memory back: nobody will start this run again by himself."""
        self._snapshots.clear()
