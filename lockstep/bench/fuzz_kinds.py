"""The kinds of files that a run reads of itself: recipes, clusters, checkpoints, plans, profiles, logs.

Each kind forges a file from a seed, with seals and hashes made right again, so that they protect no reader from what is
inside. A file that is accepted is used as a run would use it: what fails only then is a failure too. `fuzz_data.py` has
the kinds of data sets.
"""

import hashlib
import json
import math
import random
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from itertools import cycle, islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TextIO, get_args, get_origin

import tomli_w
import torch
from rich.console import Console
from safetensors.torch import load, save
from torch import nn

from lockstep.bench.damage import damage_bytes, damage_text, damage_tree
from lockstep.comm.cluster_file import read_cluster
from lockstep.comm.cost import FLAT, Choice, Timing
from lockstep.comm.fusion import ReductionPlan
from lockstep.comm.topology import group_sizes, plan_groups
from lockstep.comm.world import World, join_world
from lockstep.config import RunConfig, to_toml
from lockstep.data.order import Cursor, plan_step
from lockstep.data.pipeline import Batch
from lockstep.engine import checkpoint
from lockstep.engine.build import (
    Parts,
    assemble,
    build_layout,
    build_network,
    build_schedule,
    count_steps,
    plan_input,
)
from lockstep.engine.passes import check_shares
from lockstep.engine.run import describe_changes, write_config
from lockstep.engine.state import State, load_state, prepare_checkpoint
from lockstep.engine.step import train_step
from lockstep.errors import LockstepError
from lockstep.events import KINDS, LOG_NAME, Event, EventLog, Notice, RunStarted, encode, read_events
from lockstep.optim.schedule import Schedule
from lockstep.plan import plan as plans
from lockstep.plan import profile as profiles
from lockstep.plan.choose import explain_choice, pick_choice, pick_trial
from lockstep.plan.folder import PLAN_FILE, PROFILE_FILE, read_plan, read_profile, write_plan
from lockstep.plan.plan import Execution, InputPlan, Plan, describe_reduction
from lockstep.plan.profile import InputRate, Profile, Setup, StepTime, Trial, time_slots
from lockstep.recipes.read import list_recipes, load_recipe, recipe_text
from lockstep.report.phrases import describe_trials
from lockstep.report.plan_tables import build_message_table, describe_fits, describe_setup
from lockstep.report.summary import summarize, write_summary

Files = dict[str, bytes]  # by their path in a folder
NUM_RANKS = 4  # that plans are for
NUM_SAMPLES, GLOBAL_BATCH = 130, 28
ORDER: dict[str, Any] = {
    "seed": 5, "num_samples": NUM_SAMPLES, "global_batch": GLOBAL_BATCH, "data": {"labels": "ab", "names": "cd"},
}  # fmt: skip
NUM_IMAGES = 1_281_167
MANIFEST = checkpoint.MANIFEST


class Kind(Protocol):
    """One kind of file."""

    @property
    def name(self) -> str: ...

    def forge(self, chance: random.Random) -> Files:
        """A damaged one, with whatever has to lie beside it."""
        ...

    def use(self, folder: Path, out: TextIO) -> bool:
        """Read and use it as a run would; whether it was accepted. LockstepError is the sentence that refuses it."""
        ...


def to_bytes(text: str) -> bytes:
    """Text in a file, whatever is in it."""
    return text.encode(errors="surrogatepass")


def join_alone() -> World:
    """A world of one."""
    with join_world(None) as world:
        return world


def build_small(world: World) -> Parts:
    """What a step of a network of a few weights works with."""
    config = RunConfig.model_validate(
        {"optim": {"name": "lamb", "lr": 0.1}, "train": {"global_batch": GLOBAL_BATCH, "duration": "9ep"}}
    )
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    return assemble(config, world, model, Schedule("constant", 0.1, total_steps=9))


def take_step(parts: Parts) -> torch.Tensor:
    """The weights after one step on four images."""
    images = torch.linspace(-1, 1, 4 * 27).reshape(4, 3, 3, 3)
    plan = plan_step(Cursor(), 4, 4, 0, 1, seed=0)
    train_step(parts, Batch(images, torch.arange(4) % 2, 4, 0, plan.samples, plan.next), 0.01)
    return parts.weights.clone()


class Recipe:
    """A recipe, or the configuration that a run left."""

    name = "recipe"

    def __init__(self) -> None:
        whole = [to_toml(load_recipe(info.name)[1]) for info in list_recipes()]
        self._texts = [*whole, *(recipe_text(info.name) for info in list_recipes())]
        self._world = join_alone()
        build_shapes(load_recipe("quickstart")[1])  # which imports half of PyTorch, the first time

    def forge(self, chance: random.Random) -> Files:
        text = chance.choice(self._texts)
        way = chance.randrange(3)
        if way == 0:
            return {"recipe.toml": damage_bytes(to_bytes(text), chance, [to_bytes(other) for other in self._texts])}
        if way == 1:
            return {"recipe.toml": to_bytes(damage_text(text, chance, self._texts))}
        return {"recipe.toml": to_bytes(write_tree_as_toml(tomllib.loads(text), chance))}

    def use(self, folder: Path, out: TextIO) -> bool:
        _, config = load_recipe(str(folder / "recipe.toml"))
        assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config
        write_config(folder / "run", config)
        assert load_recipe(str(folder / "run"))[1] == config
        assert describe_changes(folder / "run", config) == ""
        check_shares(config, NUM_RANKS)
        plan_input(config, self._world)
        in_epoch, total = count_steps(config, NUM_IMAGES)
        schedule = build_schedule(config, in_epoch, total)
        for step in {0, 1, schedule.warmup_steps, total // 2, total - 1}:
            assert math.isfinite(schedule.lr_at(step)), f"learning rate of step {step}"
        assert build_layout(config, build_shapes(config)).numel > 0
        print(to_toml(config), file=out)
        return True


def build_shapes(config: RunConfig) -> nn.Module:
    """A recipe's network without its memory."""
    with torch.device("meta"):
        return build_network(config, 10)


def write_tree_as_toml(tree: Any, chance: random.Random) -> str:
    """A damaged tree as TOML; where it has no word for that, damaged text."""
    text = tomli_w.dumps(tree)
    damage_tree(tree, chance)
    try:
        return tomli_w.dumps(tree)
    except (TypeError, ValueError, RecursionError, AttributeError):
        return damage_text(text, chance)


def write_tree_as_json(tree: Any, chance: random.Random) -> str:
    """A damaged tree as JSON, likewise."""
    text = json.dumps(tree)
    damage_tree(tree, chance)
    try:
        return json.dumps(tree)
    except (ValueError, RecursionError):
        return damage_text(text, chance)


class Cluster:
    """A description of nodes and links."""

    name = "cluster"
    texts = (
        "nodes = 4\nranks_per_node = 8\n[intra]\nlatency_us = 3\ngbit_per_s = 400\n[inter]\nlatency_us = 20\n"
        "gbit_per_s = 100\n",
        "ranks_per_node = [8, 8, 8, 4]\n",
        'nodes = 2\nranks_per_node = 8\ndevice = "H100"\nbackend = "nccl"\nwiring = "nvlink"\nnccl = ["ring", "nvls"]\n'
        "nics_per_node = 8\ncores_per_node = 112\nstorage_gbyte_per_s = 40\ndollars_per_device_hour = 4.9\n"
        "watts_per_device = 1275\njitter = 0.01\n[nvls]\nlatency_us = 25\ngbit_per_s = 3816\n",
    )

    def forge(self, chance: random.Random) -> Files:
        text = chance.choice(self.texts)
        way = chance.randrange(3)
        if way == 0:
            return {"cluster.toml": damage_bytes(text.encode(), chance)}
        damaged = damage_text(text, chance, self.texts) if way == 1 else write_tree_as_toml(tomllib.loads(text), chance)
        return {"cluster.toml": to_bytes(damaged)}

    def use(self, folder: Path, out: TextIO) -> bool:
        topology = read_cluster(folder / "cluster.toml")
        print(topology.key(), topology.num_ranks, topology.num_nodes, topology.intra, topology.inter, file=out)
        if topology.num_ranks <= 1 << 12:
            for size in group_sizes(topology):
                assert sum(map(len, plan_groups(topology, size))) == topology.num_ranks
        return True


class Checkpoint:
    """The newer of two checkpoints: manifest or arrays, hashes and seal made right."""

    name = "checkpoint"

    def __init__(self) -> None:
        self._world = join_alone()
        self._parts = build_small(self._world)
        with tempfile.TemporaryDirectory() as name:
            for epoch in (1, 2):
                self._save(Path(name), State(epoch * 5, Cursor(epoch, 0)))
            self._whole = {str(file.relative_to(name)): file.read_bytes() for file in Path(name).glob("*/*")}
        self._newest = max(self._whole).partition("/")[0]

    def _save(self, folder: Path, state: State) -> None:
        write = prepare_checkpoint(folder, state, self._parts, self._world, ORDER, keep=2)
        assert write is not None  # this is rank 0
        write()

    def forge(self, chance: random.Random) -> Files:
        files = dict(self._whole)
        manifest_name = f"{self._newest}/{MANIFEST}"
        manifest: Any = json.loads(files[manifest_name])
        way = chance.randrange(5)
        if way == 0:  # nothing made right
            name = chance.choice([name for name in files if name.startswith(self._newest)])
            return files | {name: damage_bytes(files[name], chance, list(files.values()))}
        if way == 1:
            return files | {manifest_name: to_bytes(damage_text(files[manifest_name].decode(), chance))}
        if way == 2:
            damage_tree(manifest, chance)
        else:
            name = chance.choice(["model.safetensors", "optimizer.safetensors"])
            forge = damage_tensors if way == 3 else change_tensors
            data = forge(files[f"{self._newest}/{name}"], chance)
            files[f"{self._newest}/{name}"] = data
            manifest["sha256"][name] = hashlib.sha256(data).hexdigest()
        return files | {manifest_name: _seal(manifest, files[manifest_name])}

    def use(self, folder: Path, out: TextIO) -> bool:
        heard: list[str] = []
        parts = self._parts
        state, written = load_state(folder, parts, self._world, ORDER, heard.append)
        print(*heard, written, file=out)
        plan_step(state.cursor, NUM_SAMPLES, GLOBAL_BATCH, 0, 1, seed=5)
        take_step(parts)
        try:
            self._save(folder, state)
        finally:
            _restore(parts, self._world, self._whole, folder)
        if heard:
            raise LockstepError(heard[0])  # a run goes on from the one before it, with this sentence
        return True


def _restore(parts: Parts, world: World, whole: Files, folder: Path) -> None:
    """Weights that a forged checkpoint may have made anything of."""
    for name, data in whole.items():
        (folder / "whole" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "whole" / name).write_bytes(data)
    load_state(folder / "whole", parts, world, ORDER, lambda text: None)


def _seal(manifest: Any, instead: bytes) -> bytes:
    """A forger knows how to seal."""
    try:
        return to_bytes(json.dumps(manifest | {"seal": checkpoint._seal(manifest)}))
    except (TypeError, ValueError, RecursionError):
        return instead[: len(instead) // 2]


def damage_tensors(data: bytes, chance: random.Random) -> bytes:
    """A file of arrays whose header says something else, its length made right again."""
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode()
    way = chance.randrange(3)
    if way == 0:
        return damage_bytes(data, chance)
    header = write_tree_as_json(json.loads(text), chance) if way == 1 else damage_text(text, chance)
    encoded = to_bytes(header)
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + length :]


def change_tensors(data: bytes, chance: random.Random) -> bytes:
    """Arrays of another format, shape, name or content, well written."""
    arrays: dict[str, torch.Tensor] = load(data)
    name = chance.choice(list(arrays))
    array = arrays[name]
    way = chance.randrange(6)
    if way == 0:
        del arrays[name]
    elif way == 1:
        arrays[chance.choice(["x", "", "momentum/0.weight", "a" * 5000])] = arrays.pop(name)
    elif way == 2:
        arrays[name] = array.to(chance.choice([torch.float64, torch.float16, torch.int64, torch.bool, torch.int8]))
    elif way == 3:
        arrays[name] = torch.zeros(chance.choice([(), (0,), (1,), (3, 4, 5), (*array.shape, 1), (1 << 20,)]))
    else:
        value = chance.choice([math.nan, math.inf, -math.inf, 1e38, 3e38, -3e38, 1e-45, 0.0, -1.0])
        arrays[name] = torch.full_like(array, value if array.is_floating_point() else 2**62)
    return save(arrays)


class PlanFile:
    """A plan or a profile that a run left; `which` says which of the two is damaged."""

    def __init__(self, which: Literal["plan", "profile"]) -> None:
        self.name = which
        self._parts = build_small(join_alone())
        self._before = self._parts.weights.clone()
        layout = self._parts.layout
        input_plan = InputPlan("cpu", 2, 0, 0)
        execution = Execution("own", True)
        ends = [[0, 2], [0], list(range(len(layout.slots)))]
        made = [plans.place_buffers(layout, firsts) for firsts in ends]
        choices = [FLAT, Choice("hierarchical", 2), Choice("doubling"), Choice("torus", 2)]
        self._plans = [
            Plan(execution, ReductionPlan(buffers, tuple(islice(cycle(choices), len(buffers))), True), input_plan)
            for buffers in made
        ]
        slots = time_slots(layout, [0.001 * number for number in range(len(layout.slots))])
        self._profile = Profile(
            Setup("H200", "2x8", "", "nccl 2", "fp16", 256, 256, 224, "resnet50", "lars", "torch 2"),
            2.5,
            steps=(StepTime(execution, 0.024, 0.016, slots),),
            messages=(Timing(FLAT, 1024, 1e-4), Timing(FLAT, 1 << 20, 1e-3), Timing(Choice("torus", 8), 1024, 2e-4)),
            trials=(Trial(execution, "merged", "2 buffers", 0.025), Trial(Execution(), "merged", "", math.inf, "no")),
            input=InputRate(9500.0, "both", 4),
        )

    def forge(self, chance: random.Random) -> Files:
        plan, profile = plans.to_toml(chance.choice(self._plans)), profiles.to_json(self._profile)
        name, text = (PLAN_FILE, plan) if self.name == "plan" else (PROFILE_FILE, profile)
        way = chance.randrange(3)
        if way == 0:
            damaged = damage_bytes(text.encode(), chance, [plan.encode(), profile.encode()])
        elif way == 1:
            damaged = to_bytes(damage_text(text, chance, [plan, profile]))
        elif self.name == "plan":
            damaged = to_bytes(write_tree_as_toml(tomllib.loads(text), chance))
        else:
            damaged = to_bytes(write_tree_as_json(json.loads(text), chance))
        return {PLAN_FILE: plan.encode(), PROFILE_FILE: profile.encode(), name: damaged}

    def use(self, folder: Path, out: TextIO) -> bool:
        found = read_plan(folder, self._parts.layout, NUM_RANKS)
        if found is not None:
            self._follow(found[0])
            write_plan(folder / "again", *found)
            assert read_plan(folder / "again", self._parts.layout, NUM_RANKS) == found
            print(found[0].execution, describe_reduction(found[0].reduction), file=out)
        profile = read_profile(folder)
        if profile is not None:
            self._show(profile, folder, out)
        if found is None:
            raise LockstepError("It was measured anew.")  # a run says so in its event
        return True

    def _follow(self, plan: Plan) -> None:
        """A step under this plan changes the weights as it does under any other."""
        parts = self._parts
        results = []
        for reduction in (self._plans[0].reduction, plan.reduction):
            parts.weights.copy_(self._before)
            parts.rule.count.zero_()
            for array in parts.rule.state().values():
                array.zero_()
            parts.reducer.follow(reduction)
            results.append(take_step(parts))
        assert torch.equal(*results), "other weights"

    def _show(self, profile: Profile, folder: Path, out: TextIO) -> None:
        console = Console(file=out, width=120)
        for line in describe_setup(profile.setup):
            console.print(line, highlight=False)
        console.print(f"measured in {profile.seconds:.1f} s, kept in {folder}", highlight=False, soft_wrap=True)
        if profile.messages:
            console.print(build_message_table(profile.messages))
            pick_choice(profile.messages, 5e5)
        trials = describe_trials(explain_choice(profile.trials), profile.setup.batch)
        for line in [*describe_fits(profile), *trials]:
            console.print(line, highlight=False, soft_wrap=True)
        pick_trial(profile.trials)
        for fit in profile.fits.values():
            fit.predict(1 << 20)


class Log:
    """The records of a run."""

    name = "event log"

    def __init__(self) -> None:
        events = [build_event(kind, time_s) for time_s, kind in enumerate(KINDS.values())]
        start = next(event for event in events if isinstance(event, RunStarted))
        self._lines = [encode(event) for event in (start, *events, start, *events)]

    def forge(self, chance: random.Random) -> Files:
        lines = list(self._lines)
        if chance.random() < 0.3:
            text = "\n".join(lines) + "\n"
            damaged = (
                damage_bytes(text.encode(), chance) if chance.random() < 0.5 else to_bytes(damage_text(text, chance))
            )
            return {LOG_NAME: damaged}
        for _ in range(chance.choice([1, 1, 3])):
            place = chance.randrange(len(lines))
            lines[place] = write_tree_as_json(json.loads(self._lines[place]), chance)
        number = chance.choice(["0001", "0000", "9" * 9, "x"])
        parts = {f"events-{number}.jsonl": to_bytes("\n".join(lines[:4]))} if chance.random() < 0.2 else {}
        return parts | {LOG_NAME: to_bytes("\n".join(lines))}

    def use(self, folder: Path, out: TextIO) -> bool:
        self._summarize(folder, out)
        log = EventLog(folder / LOG_NAME, warn=lambda notice: None)  # as a resumed run goes on with it
        log.emit(Notice(time_s=99.0, level="info", text="again"))
        log.close()
        self._summarize(folder, out)
        return True

    def _summarize(self, folder: Path, out: TextIO) -> None:
        summary = summarize(read_events(folder))
        write_summary(folder / "summary.json", summary)
        json.loads((folder / "summary.json").read_text())
        print(json.dumps(summary), file=out)


def build_event(kind: type[Event], time_s: float) -> Event:
    """A record with something plausible in every field."""
    values: dict[str, Any] = {item.name: _build_value(item.type) for item in fields(kind)}
    return kind(**values | {"time_s": time_s})


def _build_value(wanted: Any) -> Any:
    if isinstance(wanted, UnionType):
        return _build_value(next(choice for choice in get_args(wanted) if choice is not NoneType))
    origin = get_origin(wanted) or wanted
    if origin is Literal:
        return get_args(wanted)[0]
    if origin is list:
        return [_build_value(get_args(wanted)[0])] * 3
    if origin is dict:
        return {"name": "value", "number": 1.5}
    plain: Mapping[Any, Any] = {str: "word", int: 3, float: 0.25, bool: True}
    return plain.get(origin, "word")
