"""What outlives a run in a process that takes several, one after the other: a sweep's trials (step 0 on the walk).

Every run asks here for its parts. Alone it finds nothing and builds them, as it would without this file. A later run of
the same process finds:

- the opened *sources*, where the data's own settings agree, and on a GPU the *decoded images*;
- the *parts*, where nothing differs but numbers that a step reads from outside: all their arrays get the values that a
  run of its own would start with, in place, and the plan, the compiled network and the recording stay.

Which numbers those are is `FREE`. The learning rate is on the device, and so is the weight decay; seed and schedule
never reach it. Momentum, a trust coefficient, label smoothing are constants of a recording: a run with another one
builds its own parts, and so does a run with any setting that is not named here.
"""

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lockstep.comm.world import World
from lockstep.config import DataConfig, RunConfig
from lockstep.data.resident import Shelf
from lockstep.data.sources import Source
from lockstep.engine.apply import Step, Warn, apply_plan
from lockstep.engine.brought import NOTHING, Brought
from lockstep.engine.build import Parts, Sources, build_parts, plan_input
from lockstep.engine.pass_size import settle_pass, with_size
from lockstep.engine.planning import Chosen, choose_plan
from lockstep.engine.recorded import RecordedStep
from lockstep.engine.state import list_changing, refresh
from lockstep.engine.statistics import list_passing
from lockstep.errors import LockstepError
from lockstep.plan.folder import write_plan

# Settings that may differ between runs with the same parts, by section; of [data] only the sizes of images matter.
FREE = {
    "optim": {"lr", "weight_decay", "schedule", "warmup", "warmup_lr", "end_lr", "power", "milestones", "gamma"},
    "train": {"seed", "eval_every", "checkpoint_every", "keep_checkpoints", "snapshot_share", "log_every"},
    "data": set(DataConfig.model_fields) - {"image_size", "image_sizes"},
}
# Settings of the data that decide which samples there are and how they are read.
OPENS = {"source", "path", "val_share", "train_images", "val_images", "check_bytes", "read_timeout_s"}


@dataclass
class Built:
    """The parts of the runs so far that agree, and what was made for them."""

    shape: str  # what they agree in
    parts: Parts
    max_batch: int  # that a run has settled on, where it was left to it
    chosen: Chosen | None = None
    step: Step | None = None  # of the chosen plan
    sizes: tuple[int, int] = (0, 0)


class Kept:
    """What the runs of one process share; a run by itself has its own."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self._opened: tuple[str, Sources] | None = None
        self._built: Built | None = None

    def open_sources(self, config: DataConfig, open_now: Callable[[], Sources]) -> Sources:
        """The data, opened on first use."""
        wanted = config.model_dump_json(include=OPENS)
        if self._opened is None or self._opened[0] != wanted:
            self._opened = wanted, open_now()
            self.shelf.keep_only(self._opened[1].train, self._opened[1].val)
        return self._opened[1]

    def build_parts(
        self, config: RunConfig, world: World, sources: Sources, brought: Brought = NOTHING
    ) -> tuple[RunConfig, Parts, str]:
        """Parts for a run that begins, those of the last one where they suit.

        Beside them its configuration with the size of a pass, and what there is to say of that.
        """
        shape = describe_shape(config, world, sources)
        built = self._built
        if built is not None and built.shape == shape and _is_own(built.parts, config):
            built.parts = renew(built.parts, config, world, sources)
            return with_size(config, built.max_batch), built.parts, ""
        self.forget_parts()
        settled, parts, said = settle_pass(config, build_parts(config, world, sources, brought), world)
        self._built = Built(shape, parts, settled.train.max_batch_per_rank)
        return settled, parts, said

    def _find(self, parts: Parts) -> Built:
        """What was made for these parts; a run may bring its own."""
        if self._built is None or self._built.parts is not parts:
            self._built = Built("", parts, 0)
        return self._built

    def choose_plan(
        self,
        config: RunConfig,
        parts: Parts,
        world: World,
        places: Sequence[Path],
        num_steps: int,
        source: Source,
        *,
        is_resumed: bool,
    ) -> Chosen:
        """The plan of the runs before with these parts; one that is resumed asks its own folder first, as always."""
        built = self._find(parts)
        if built.chosen is None or is_resumed:
            return choose_plan(config, parts, world, places, num_steps=num_steps, source=source)
        plan = replace(built.chosen.plan, input=plan_input(config, world, source))
        chosen = replace(built.chosen, plan=plan)
        if chosen.source == "default":
            return chosen
        with suppress(LockstepError):  # a full disk costs the memory of it, not the run
            write_plan(places[0], plan, replace(chosen.profile, input=None))
        return replace(chosen, source="remembered")

    def apply_plan(self, chosen: Chosen, parts: Parts, num_samples: int, global_size: int, warn: Warn) -> Step:
        """The step under a plan; the one of the runs before, recording and all, where the plan is theirs."""
        built, plan = self._find(parts), chosen.plan
        sizes = num_samples, global_size
        is_same = built.chosen is not None and built.chosen.plan == replace(plan, input=built.chosen.plan.input)
        if built.step is None or built.sizes != sizes or not is_same:
            step = apply_plan(plan.execution, plan.reduction, parts, *sizes, warn, chosen.recording)
            built.chosen, built.step, built.sizes = replace(chosen, recording=None), step, sizes
        elif isinstance(built.step, RecordedStep):
            built.step.warn = warn
        return built.step

    def forget_parts(self) -> None:
        """Let go of parts and recording, and of the device's memory with them; sources and images stay."""
        if self._built is None:
            return
        self._built.parts.reducer.close()
        self._built = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def describe_shape(config: RunConfig, world: World, sources: Sources) -> str:
    """Everything that parts are made of, as text: equal for runs that can share them."""
    tables = {
        name: {key: value for key, value in table.items() if key not in FREE.get(name, ())}
        for name, table in config.model_dump(mode="json", exclude={"description"}).items()
    }
    return json.dumps([tables, len(sources.train.classes), str(world.device), world.size])


def _is_own(parts: Parts, config: RunConfig) -> bool:
    """Whether all that a step changes is known: code of the user's may keep more than its arrays.

    Rules with an anchor have numbers of their own in their kernel, and are built anew.
    """
    is_known = getattr(parts.model, "takes_half", False) and config.optim.loss == "cross_entropy"
    return is_known and parts.hybrid is None and not parts.rule.has_anchor


@torch.no_grad()
def renew(parts: Parts, config: RunConfig, world: World, sources: Sources) -> Parts:
    """The same parts as if they had just been built: every array that a step changes, filled in place.

    The values come from parts that are built anew on the host, by the one place that builds.
    """
    fresh = build_parts(config, replace(world, device=torch.device("cpu")), sources)
    pairs = zip(
        [*list_changing(parts).arrays(), *list_passing(parts.model), *parts.constants.values()],
        [*list_changing(fresh).arrays(), *list_passing(fresh.model), *fresh.constants.values()],
        strict=True,
    )
    for array, value in pairs:
        array.copy_(value)
    refresh(parts)
    parts.note.zero_()
    parts.rule.begin_anew(config.optim.weight_decay)
    parts.reducer.measures = False
    parts.clock.take()
    parts.model.train()
    fresh.reducer.close()
    return replace(parts, schedule=fresh.schedule)
