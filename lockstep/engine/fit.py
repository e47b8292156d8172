"""Whether a recipe and a data set fit each other, in sentences that name the setting to change (step 10 on the walk).

What works and is unwise is said once, before the first step; what cannot work is refused elsewhere.
"""

import numpy as np

from lockstep.config import RunConfig
from lockstep.data.order import steps_per_epoch
from lockstep.data.probe import probe_sides
from lockstep.data.sources import Source
from lockstep.engine.build import Sources
from lockstep.events import Notice

NUM_PROBES = 24
NAMED = 5  # classes that a sentence names
ENLARGED = 2.0  # times, from which on a network mostly looks at what the resizing made up
LEAST_STEPS = 8  # of an epoch, below which its batches hardly differ
SMALL_BATCH = 16  # below which statistics of a batch say little
SMALL_SIDE = 40  # pixels of which the first layers for large images leave a single one at the end
FEW_IMAGES, LARGE_NETWORKS = 50_000, ("resnet50", "resnet101", "resnet152", "alexnet")


def describe_fit(config: RunConfig, sources: Sources) -> list[Notice]:
    """What the data's own notes say, and what of the recipe does not suit the data."""
    notes = [note for source in (sources.train, sources.val) for note in getattr(source, "notes", ())]
    unwise = [
        *_judge_classes(sources),
        *_judge_batch(config, sources.train),
        *_judge_size(config, sources.train),
        *_judge_schedule(config, sources),
    ]
    return [*(Notice(level="info", text=text) for text in notes), *(Notice(level="warning", text=t) for t in unwise)]


def _judge_classes(sources: Sources) -> list[str]:
    """Classes of which nothing can be learnt, or nothing be seen of what was learnt; a split by hash may leave some."""
    said = []
    if len(sources.train.classes) == 1:
        said.append(
            f"There is one class alone, {sources.train.classes[0]}, so that every answer is right. Sort the images "
            "into a folder for each class."
        )
    for source, what in ((sources.train, "training"), (sources.val, "validation")):
        empty = np.flatnonzero(np.bincount(source.labels.astype(np.int64), minlength=len(source.classes)) == 0)
        if len(empty):
            names = ", ".join(source.classes[label] for label in empty[:NAMED]) + (", …" if len(empty) > NAMED else "")
            said.append(f"{len(empty):,} of {len(source.classes):,} classes have no {what} sample: {names}.")
    return said


def _judge_batch(config: RunConfig, train: Source) -> list[str]:
    batch, count = config.train.global_batch, train.num_samples
    if batch > count:
        return [
            f"train.global_batch = {batch:,} is larger than the data set: each step takes all {count:,} samples. Set "
            f"train.global_batch to {_suggest_batch(count)} or less, and lower optim.lr with it."
        ]
    if steps_per_epoch(count, batch) < LEAST_STEPS:
        return [
            f"An epoch of {count:,} samples is only {steps_per_epoch(count, batch)} steps at train.global_batch = "
            f"{batch:,}. Set train.global_batch to {_suggest_batch(count)} or less, and lower optim.lr with it."
        ]
    return []


def _suggest_batch(count: int) -> int:
    """A power of two, 256 at most, with which an epoch has some thirty steps; fewer where that makes tiny batches."""
    usual, least = (int(2 ** np.floor(np.log2(max(1, count / steps)))) for steps in (32, LEAST_STEPS))
    return int(np.clip(usual, max(2, min(SMALL_BATCH, least)), 256))


def _judge_size(config: RunConfig, train: Source) -> list[str]:
    """One sentence at most: on images that are enlarged, or on a network made for larger ones."""
    size, is_resnet = config.data.image_size, config.model.name.startswith("resnet")
    sides = probe_sides(train, NUM_PROBES, config.data.read_timeout_s)
    short = int(np.median(sides.min(axis=1))) if len(sides) else size
    has_large_stem = is_resnet and config.model.stem in ("imagenet", "deep")
    if size >= ENLARGED * short:
        wanted = max(short, 32)
        stem = ' and model.stem = "cifar"' if has_large_stem and wanted <= 64 else ""
        return [
            f"The images have short sides of about {short} pixels and are enlarged {size / short:.2g} times to "
            f"data.image_size = {size}. Set data.image_size = {wanted}, data.eval_resize = {wanted}{stem}."
        ]
    if has_large_stem and size <= SMALL_SIDE:
        return [
            f"At data.image_size = {size} the first layers for large images leave a single pixel at the end. Set "
            'model.stem = "cifar".'
        ]
    return []


def _judge_schedule(config: RunConfig, sources: Sources) -> list[str]:
    """A sentence on a large network that shall learn from few images and from nothing."""
    count, model = sources.train.num_samples, config.model
    is_large = model.name in LARGE_NETWORKS and model.width >= 64 and config.data.image_size > 64
    if (
        config.data.source == "generated"
        or not is_large
        or count >= FEW_IMAGES
        or bool(getattr(model, "weights", None))
    ):
        return []
    return [
        f"{count:,} images are few for {model.name} and a schedule made for ImageNet's 1,281,167. Start from trained "
        'weights (model.weights), or set model.name = "resnet18" and a train.global_batch of '
        f"{_suggest_batch(count)} or less."
    ]
