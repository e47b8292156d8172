"""What a recipe asks of a cluster, as the planner needs it: from a configuration to plain numbers. Torch-free."""

from dataclasses import dataclass

from lockstep.config import CommConfig, RunConfig
from lockstep.errors import LockstepError
from lockstep.plan.device import DeviceProfile
from lockstep.plan.networks import RESNETS, lend_profile
from lockstep.plan.shipped import list_shipped, read_shipped

IMAGENET = 1_281_167  # training images
IMAGE_BYTES = 115e3  # of one, encoded, on average: 148 GB in all
IMAGES_PER_CORE_S = 570.0  # decoded and cropped: MLPerf's H200 record, 63,599 images/s on 112 cores
PREFETCH = 3  # batches ahead, where the recipe leaves it open


@dataclass(frozen=True)
class Workload:
    """One recipe."""

    recipe: str
    model: str
    precision: str
    rule: str
    image_size: int
    global_batch: int
    max_batch: int  # samples of one pass
    epochs: float
    num_images: int
    image_bytes: float  # encoded; 0: nothing is read or decoded
    prefetch: int
    comm: CommConfig
    notes: tuple[str, ...] = ()


def describe_workload(recipe: str, config: RunConfig, num_images: int = 0) -> Workload:
    """A recipe's numbers; the samples of a folder are ImageNet's unless `num_images` says otherwise."""
    if config.model.name in RESNETS and (config.model.width != 64 or config.model.stem != "imagenet"):
        raise LockstepError(
            f"{recipe} changes model.width or model.stem, and device profiles are of the published networks; leave "
            "both as they are to plan it."
        )
    notes = []
    is_generated = config.data.source == "generated"
    if not num_images and not is_generated:
        notes.append(f"{IMAGENET:,} training images, as ImageNet has; --images says otherwise")
    count = num_images or (config.data.train_images if is_generated else IMAGENET)
    duration = config.train.duration
    steps_per_epoch = -(-count // config.train.global_batch)
    epochs = duration.value if duration.unit == "ep" else duration.value / steps_per_epoch
    return Workload(
        recipe=recipe,
        model=config.model.name,
        precision=config.precision.compute,
        rule=config.optim.name,
        image_size=config.data.image_size,
        global_batch=config.train.global_batch,
        max_batch=config.train.max_batch_per_rank,
        epochs=epochs,
        num_images=count,
        image_bytes=0.0 if is_generated else IMAGE_BYTES,
        prefetch=config.data.prefetch_batches or PREFETCH,
        comm=config.comm,
        notes=tuple(notes),
    )


def find_profile(device: str, model: str) -> DeviceProfile:
    """The shipped profile of a network on a device, or one lent by ResNet-50 there; a sentence where neither is."""
    if (device.lower(), model) in list_shipped():
        return read_shipped(device, model)
    if (device.lower(), "resnet50") in list_shipped() and model in RESNETS:
        return lend_profile(read_shipped(device, "resnet50"), model)
    if not device:
        raise LockstepError("The cluster names no device, so no profile is known; add device, or give --profile FILE.")
    raise LockstepError(
        f"There is no profile of {model} on a {device}; measure one with `lockstep profile` and give it with --profile."
    )


def compare_precision(workload: Workload, profile: DeviceProfile) -> tuple[str, ...]:
    """What the profile does otherwise than the recipe; the plan is true of the profile."""
    notes = []
    if workload.precision != profile.precision:
        notes.append(
            f"the profile computes in {profile.precision}, the recipe in {workload.precision}: this plan holds with "
            f"--set precision.compute={profile.precision}"
        )
    if workload.image_size != profile.image_size:
        notes.append(
            f"the profile's images have {profile.image_size} pixels, the recipe's {workload.image_size}: times are "
            "scaled by their areas"
        )
    return tuple(notes)
