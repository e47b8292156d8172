"""What a run says first: who trains what on what, how, and what to expect (step 10 on the walk, before step 0)."""

import math
import platform

import torch

from lockstep import __version__
from lockstep.comm.world import World
from lockstep.commit import read_commit
from lockstep.config import RunConfig
from lockstep.engine.anchor_pass import plan_anchors
from lockstep.engine.build import Parts, Sources, count_steps
from lockstep.engine.machine import describe_machine
from lockstep.engine.passes import plan_passes
from lockstep.engine.planning import Chosen
from lockstep.errors import LockstepError
from lockstep.events import PlanChosen, RunPredicted, RunStarted
from lockstep.plan.choose import explain_choice
from lockstep.plan.device import DeviceProfile
from lockstep.plan.foresight import Facts, find_device, foresee
from lockstep.plan.plan import describe_reduction, to_table
from lockstep.plan.profile import Profile
from lockstep.plan.workload import refuse_changed

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
        machine=describe_machine(),
    )


def describe_chosen(chosen: Chosen, world: World) -> PlanChosen:
    """How steps will be taken, and what else was tried."""
    plan, profile = chosen.plan, chosen.profile
    return PlanChosen(
        source=chosen.source,
        seconds=profile.seconds,
        topology=profile.setup.topology,
        backend=profile.setup.backend,
        batch=profile.setup.batch,
        execution=str(plan.execution),
        reduction=describe_reduction(plan.reduction) if world.size > 1 else "",
        plan=to_table(plan),
        trials=explain_choice(profile.trials),
    )


def predict_run(
    config: RunConfig, chosen: Chosen, parts: Parts, world: World, num_samples: int, start_step: int
) -> RunPredicted | None:
    """What to expect of the steps to come; None where nothing is known, or where they will not be alike."""
    steps_per_epoch, total_steps = count_steps(config, num_samples)
    if any(step.until.value > start_step / steps_per_epoch for step in config.data.image_sizes):
        return None  # what was measured is true of the last size alone
    batch = chosen.profile.setup.batch
    passes, anchors = math.ceil(batch / plan_passes(config.train, 0, world.size)), 0
    if parts.rule.has_anchor:  # the samples of a step are taken twice
        every = plan_anchors(config, num_samples)
        passes, anchors = 2 * passes, len(range(-(-start_step // every) * every, total_steps, every))
    try:
        facts = Facts(
            plan=chosen.plan,
            profile=chosen.profile,
            source=chosen.source,
            topology=parts.topology,
            wire_bytes=parts.hybrid.bytes_per_element if parts.hybrid else 4,
            on_gpu=world.device.type == "cuda",
            global_batch=config.train.global_batch,
            num_images=num_samples,
            steps=total_steps - start_step,
            passes=passes,
            anchors=anchors,
            cores=world.num_threads,
            device=_find_device(config, chosen.profile),
            rule=config.optim.name,
            decodes_photos=config.data.source != "generated" and not _may_stay(config, world, num_samples),
        )
        return foresee(facts)
    except LockstepError:  # what cannot be predicted can still be trained
        return None


def _find_device(config: RunConfig, profile: Profile) -> DeviceProfile | None:
    """The shipped profile of this network, if it is the published one, on such a device."""
    try:
        refuse_changed(config.model.name, config)
        return find_device(profile, config.model.name)
    except LockstepError:
        return None


def _may_stay(config: RunConfig, world: World, num_samples: int) -> bool:
    """Whether all images could stay on the device once they are decoded, at the size that the network sees."""
    if config.data.resident == "off" or world.device.type != "cuda":
        return False
    return 3 * config.data.image_size**2 * num_samples <= torch.cuda.get_device_properties(world.device).total_memory


def name_versions(with_commit: bool) -> dict[str, str]:
    """What runs here, by name; the commit too, where this is a checkout and somebody listens."""
    versions = {"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()}
    commit = read_commit() if with_commit else ""
    return versions | ({"commit": commit} if commit else {})
