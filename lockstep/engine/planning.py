"""Before step 0: the plan of a run, remembered from an earlier one or measured now (step 0 on the walk).

A plan is remembered by what it is true of, its setup: in the run's own folder, so that a resumed run adds in the same
order, and in the user's cache. Rank 0 reads, picks and writes; the others hear from it. `measure.py` comes after it.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.sources import Source as DataSource
from lockstep.engine.build import (
    Parts,
    assemble,
    build_network,
    count_steps,
    open_sources,
    plan_input,
    set_number_formats,
)
from lockstep.engine.measure import Rig, suits_own_kernels
from lockstep.engine.number_format import settle_format
from lockstep.engine.pass_size import settle_pass
from lockstep.engine.recorded import RecordedStep
from lockstep.engine.setup import CACHE, default_plan_folder, describe_setup
from lockstep.engine.state import put_back
from lockstep.errors import LockstepError, SharedError
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import is_worth_compiling, list_compiled, list_executions, pick_trial
from lockstep.plan.folder import read_plan, write_plan
from lockstep.plan.plan import Execution, Plan, from_toml, to_toml
from lockstep.plan.profile import Profile, Setup, from_json, read_setup, to_json

Source = Literal["measured", "remembered", "default"]


@dataclass(frozen=True)
class Chosen:
    """The plan, what it was chosen by, and where that comes from."""

    plan: Plan
    profile: Profile
    source: Source
    recording: RecordedStep | None = field(default=None, compare=False)  # of the plan's step, where one was made


def choose_plan(
    config: RunConfig,
    parts: Parts,
    world: World,
    places: Sequence[Path] = (),
    *,
    num_steps: int = 1,
    again: bool = False,
    source: DataSource | None = None,
) -> Chosen:
    """The best plan for this run, remembered or measured now; every rank comes to the same answer.

    `places` are folders that may hold a plan, the first preferred; a folder that is no run's keeps one for each setup.
    What is chosen goes to all of them.
    """
    setup = read_setup(world.broadcast_value(asdict(describe_setup(config, parts, world))))
    folders = [place if place.name != CACHE else place / setup.name for place in places]
    plan = Plan(Execution(), parts.reducer.plan, plan_input(config, world, source))
    chosen = Chosen(plan, Profile(setup, 0.0), "default")
    if not _has_choice(config, parts, world):
        return chosen
    found = None
    if world.is_first and not again:
        found = next((f for f in (_recall(folder, setup, parts, config, num_steps) for folder in folders) if f), None)
    found = _share_plan(world, parts, found)
    if found:
        chosen = Chosen(replace(found[0], input=plan.input), found[1], "remembered")
    else:
        chosen = measure_plan(config, parts, world, setup, plan, num_steps)
    if world.is_first:
        for folder in folders:
            with contextlib.suppress(LockstepError):  # a full disk costs the memory of it, not the run
                # What an earlier part of the run knows of its input is not true of another run's images.
                known = chosen.profile if folder in places else replace(chosen.profile, input=None)
                write_plan(folder, chosen.plan, known)
    return chosen


def tune_recipe(config: RunConfig, world: World) -> tuple[Chosen, Path]:
    """Measure anew for a recipe; returns where the result is kept."""
    config, _ = settle_format(config, world)
    set_number_formats(config.precision)
    source = open_sources(config.data).train if world.is_first else None
    counts = world.broadcast_value([len(source.classes), source.num_samples] if source else None)
    num_classes, num_samples = map(int, counts)
    schedule = Schedule("constant", config.optim.lr, total_steps=1)
    parts = assemble(config, world, build_network(config, num_classes), schedule)
    config, parts, _ = settle_pass(config, parts, world, again=True)
    # As long as the run will be: what is tried depends on it, and the run looks for all that it would try.
    _, num_steps = count_steps(config, num_samples)
    chosen = choose_plan(config, parts, world, [default_plan_folder()], num_steps=num_steps, again=True)
    if chosen.source == "default":
        raise SharedError("comm.tune_s = 0 leaves no time to measure; give some seconds.")
    return chosen, default_plan_folder() / chosen.profile.setup.name


def _has_choice(config: RunConfig, parts: Parts, world: World) -> bool:
    """Whether there is anything to measure: a GPU, a compiler that is asked for, or others to send to."""
    is_asked = config.train.compile not in ("auto", "off")
    return world.device.type == "cuda" or is_asked or (parts.hybrid is not None and config.comm.tune_s > 0)


def _recall(folder: Path, setup: Setup, parts: Parts, config: RunConfig, num_steps: int) -> tuple[Plan, Profile] | None:
    """What an earlier run chose in the same setup, if it looked at all that this one would look at."""
    found = read_plan(folder, parts.layout, parts.topology.num_ranks)
    if found is None or found[1].setup != setup:
        return None
    trials = found[1].trials
    best = pick_trial(trials)
    on_gpu = parts.weights.is_cuda
    lacks = best is not None and is_worth_compiling(config.train, num_steps, best.seconds, on_gpu=on_gpu)
    return None if lacks and all(trial.execution.compile == "off" for trial in trials) else found


def measure_plan(config: RunConfig, parts: Parts, world: World, setup: Setup, plan: Plan, num_steps: int) -> Chosen:
    """Measure candidates within `comm.tune_s`; rank 0's pick is everybody's."""
    begun = time.perf_counter()
    rig = Rig(config, parts, world)

    def list_later() -> list[Execution]:
        """What is compiled once the rest is measured; in a short run nothing."""
        best = rig.pick()
        is_worth_it = best and is_worth_compiling(config.train, num_steps, best.seconds, on_gpu=rig.on_gpu)
        return list_compiled(config.train) if world.broadcast_value(bool(is_worth_it)) else []

    with put_back(parts), world.patience():
        has_own = suits_own_kernels(parts.model)
        executions = list_executions(config.train, on_gpu=rig.on_gpu, has_own_kernels=has_own)
        for number, execution in enumerate(executions):
            rig.measure_execution(execution, len(executions) - number + len(list_later()))
        compiled = list_later()
        for number, execution in enumerate(compiled):
            rig.measure_execution(execution, len(compiled) - number)
    best = rig.pick()
    rig.clean_up()
    profile = Profile(
        setup,
        time.perf_counter() - begun,
        steps=tuple(rig.steps),
        messages=tuple(rig.messages),
        trials=tuple(rig.trials),
    )
    if best:
        plan = replace(plan, execution=best.execution, reduction=rig.reductions[rig.trials.index(best)])
    shared = _share_plan(world, parts, (plan, profile))
    assert shared is not None
    return Chosen(*shared, "measured", rig.recording)


def _share_plan(world: World, parts: Parts, found: tuple[Plan, Profile] | None) -> tuple[Plan, Profile] | None:
    """Rank 0's plan and profile on every rank, in the formats that their files have."""
    if world.size == 1:
        return found
    texts = world.broadcast_value([to_toml(found[0]), to_json(found[1])] if found and world.is_first else None)
    return (from_toml(texts[0], parts.layout, world.size), from_json(texts[1])) if texts else None
