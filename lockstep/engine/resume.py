"""Where a run goes on from: the newest good state that the disk or any node's memory holds (before step 1)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.comm.world import World
from lockstep.engine.build import Parts
from lockstep.engine.checkpoint import list_checkpoints
from lockstep.engine.snapshot import Snapshots
from lockstep.engine.state import State, Written, load_state
from lockstep.errors import LockstepError, SharedError
from lockstep.events import Evaluated, RunStarted, read_events


@dataclass(frozen=True)
class TakenUp:
    """Where a run stands, who wrote it down, and what it was written to."""

    state: State
    written: Written
    where: str

    @property
    def is_renumbered(self) -> bool:
        """Whether steps are counted in other batches from now on."""
        return self.state.step != self.written.step

    def describe(self, world_size: int, global_batch: int, total_steps: int) -> list[str]:
        """What is said of it as the run goes on, a sentence each."""
        state, written = self.state, self.written
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        said = [f"Going on from step {written.step} on {ranks}; {written.world_size} wrote {self.where}."]
        if self.is_renumbered:
            place = f"epoch {state.cursor.epoch + 1}, sample {state.cursor.position + 1:,}"
            said.append(
                f"train.global_batch was {written.global_batch} and is {global_batch}: the run keeps its place in the "
                f"data ({place}), which is step {state.step} of {total_steps} in such batches."
            )
        return said


def list_evaluated(folder: Path) -> set[int]:
    """The steps after which a run was evaluated, of those that it did not lose; a log that cannot be read has none."""
    steps: set[int] = set()
    try:
        events = read_events(folder)
    except LockstepError:
        return steps
    for event in events:
        if isinstance(event, RunStarted):
            steps = {step for step in steps if step <= event.start_step}
        elif isinstance(event, Evaluated):
            steps.add(event.step)
    return steps


def take_up(
    disk: Path,
    snapshots: Snapshots,
    parts: Parts,
    world: World,
    order: Mapping[str, Any],
    warn: Callable[[str], None],
) -> TakenUp | None:
    """Fill the parts from the newest state there is; None if there is none. Every rank must call it.

    Rank 0 looks on the disk, one rank of each node into its memory. What is in memory was written by ranks that are
    gone, so it is read like any file: if it is damaged, the disk has the word.
    """
    on_disk = [path.name for path in list_checkpoints(disk)[:1]] if world.is_first else []
    found = world.gather_values([int(on_disk[0].rpartition("-")[2]) if on_disk else -1, snapshots.find_newest()])
    disk_step = found[0][0]
    in_memory = [step for _, step in found]
    if max(in_memory) > disk_step:
        holder = in_memory.index(max(in_memory))
        try:
            state, written = load_state(snapshots.folder, parts, world, order, warn, source=holder)
            return TakenUp(state, written, "a snapshot in memory")
        except SharedError as error:
            if world.is_first:
                warn(f"The snapshot in memory is of no use: {error}")
    if disk_step < 0:
        return None
    state, written = load_state(disk, parts, world, order, warn)
    return TakenUp(state, written, "the checkpoint")
