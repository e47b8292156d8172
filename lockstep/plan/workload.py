"""What a recipe asks of a cluster, as the planner needs it: from a configuration to plain numbers. Torch-free."""

from dataclasses import dataclass

from lockstep.config import CommConfig, RunConfig
from lockstep.errors import LockstepError
from lockstep.plan.derive import DATASHEETS, RATES, Datasheet
from lockstep.plan.device import DeviceProfile
from lockstep.plan.networks import RESNETS, count_macs, lend_profile, list_layers, sketch_profile
from lockstep.plan.rules import find_rule
from lockstep.plan.shipped import list_shipped, read_shipped

IMAGENET = 1_281_167  # training images
IMAGE_BYTES = 115e3  # of one, encoded, on average: 148 GB in all
IMAGES_PER_CORE_S = 570.0  # decoded and cropped: MLPerf's H200 record, 63,599 images/s on 112 cores
LENDER = "resnet50"  # the network whose profile stands in for others
# What a step costs besides its images, in images: a sketch knows no more. `lockstep profile` on one H200: 1.9 ms and
# 0.087 ms an image.
FIXED_IMAGES = 22
BANDWIDTH_SHARE = 0.8  # of a data sheet's, that an update reaches: an estimate
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
    halves: bool = False  # whether a run halves its passes by itself where they do not fit


def describe_workload(recipe: str, config: RunConfig, num_images: int = 0) -> Workload:
    """A recipe's numbers; the samples of a folder are ImageNet's unless `num_images` says otherwise."""
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
        max_batch=config.train.largest_pass,
        halves=not config.train.max_batch_per_rank,
        epochs=epochs,
        num_images=count,
        image_bytes=0.0 if is_generated else IMAGE_BYTES,
        prefetch=config.data.prefetch_batches or PREFETCH,
        comm=config.comm,
        notes=tuple(notes),
    )


def refuse_changed(recipe: str, config: RunConfig) -> None:
    """Shipped profiles are of published networks: a recipe that changes one needs a profile of its own."""
    model = config.model
    is_changed = model.width != 64 or model.stem != "imagenet" or model.pooled_shortcuts
    if model.name in RESNETS and is_changed:
        raise LockstepError(
            f"{recipe} changes model.width, stem or shortcuts, and shipped profiles are of the published networks; "
            "measure one with `lockstep profile` and give it with --profile."
        )


def find_profile(device: str, model: str) -> DeviceProfile:
    """The shipped profile of a network on a device, one lent by ResNet-50 there, or a sketch from a published rate."""
    if (device.lower(), model) in list_shipped():
        return read_shipped(device, model)
    if (device.lower(), LENDER) in list_shipped() and model in RESNETS:
        return lend_profile(read_shipped(device, LENDER), model)
    if (device.lower(), LENDER) in RATES:
        return sketch_published(device.lower(), model)
    if not device:
        raise LockstepError("The cluster names no device, so no profile is known; add device, or give --profile FILE.")
    raise LockstepError(
        f"There is no profile of {model} on a {device}; measure one with `lockstep profile` and give it with --profile."
    )


def sketch_published(device: str, model: str) -> DeviceProfile:
    """A profile with nothing in it but one published rate and what a step costs besides its images."""
    of = model if (device, model) in RATES else LENDER
    rate, sheet = RATES[device, of], DATASHEETS[device]
    known_s, update_s = (time_update(name, "sgd", sheet) for name in (of, model))
    image_s = (rate.batch / rate.images_s - known_s) / (rate.batch + FIXED_IMAGES) * count_macs(model) / count_macs(of)
    return sketch_profile(
        model,
        sheet.name,
        image_s,
        FIXED_IMAGES * image_s + update_s,
        update_s=update_s,
        precision=sheet.precision,
        memory_bytes=sheet.memory_bytes,
        note=f"sketched from {rate.images_s:g} images/s of {of} at batch {rate.batch} ({rate.source})",
    )


def time_update(model: str, rule: str, sheet: Datasheet) -> float:
    """Seconds of an update by a device's bandwidth: arrays that travel, and nothing else."""
    elements = sum(layer.weights + layer.beside for layer in list_layers(model))
    width = 2 if sheet.precision == "fp16" else 4
    return find_rule(rule).moved_bytes(width) * elements / (BANDWIDTH_SHARE * sheet.bandwidth)


def compare_precision(workload: Workload, profile: DeviceProfile) -> tuple[str, ...]:
    """What the profile does otherwise than the recipe; the plan is true of the profile."""
    notes = []
    # Left to the run it is what a device is made for, and so are profiles.
    is_same = profile.precision in ("fp16", "fp32") if workload.precision == "auto" else False
    if workload.precision != profile.precision and not is_same:
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
