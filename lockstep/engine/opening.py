"""What a run says first: who trains what on what (step 10 on the walk, before the first step)."""

import platform

import torch

from lockstep import __version__
from lockstep.comm.world import World
from lockstep.commit import read_commit
from lockstep.config import RunConfig
from lockstep.engine.build import Parts, Sources, count_steps
from lockstep.events import RunStarted

MOST_NAMES = 2_000  # classes whose names a record holds; more of them nobody reads


def describe_start(
    config: RunConfig, run: str, recipe: str, world: World, sources: Sources, parts: Parts, start_step: int, now: float
) -> RunStarted:
    """The record that opens a run, or a part of one that goes on from `start_step`."""
    steps_per_epoch, total_steps = count_steps(config, sources.train.num_samples)
    device, classes, slots = world.device, sources.train.classes, parts.layout.slots
    return RunStarted(
        time_s=now,
        run=run,
        recipe=recipe,
        config=config.model_dump(mode="json"),
        world_size=world.size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
        num_train=sources.train.num_samples,
        num_val=sources.val.num_samples,
        num_classes=len(classes),
        num_parameters=sum(slot.numel for slot in slots),
        steps_total=total_steps,
        steps_per_epoch=steps_per_epoch,
        start_step=start_step,
        versions=name_versions(world.is_first),
        layers=[slot.name for slot in slots],
        class_names=list(classes) if len(classes) <= MOST_NAMES else [],
    )


def name_versions(with_commit: bool) -> dict[str, str]:
    """What runs here, by name; the commit too, where this is a checkout and somebody listens."""
    versions = {"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()}
    commit = read_commit() if with_commit else ""
    return versions | ({"commit": commit} if commit else {})
