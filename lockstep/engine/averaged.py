"""The network with its averaged weights: evaluated beside the one that is trained (step 10 on the walk).

The same modules compute with other arrays: a parameter's memory is exchanged for the average's while a batch runs, and
back. No array is copied for it but half weights, once an evaluation. A recorded step knows addresses, and finds what it
knows behind them.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.data.pipeline import EvalPipeline
from lockstep.engine.build import Parts
from lockstep.engine.evaluate import Accuracy, Way, evaluate_ways
from lockstep.engine.mistakes import Mistakes
from lockstep.engine.state_files import average_ranks
from lockstep.engine.statistics import list_statistics
from lockstep.optim.average import Average
from lockstep.optim.storage import mixed_views

MANY_CLASSES = 5  # of no more than so many, one is always among the five best


def evaluate_both(
    parts: Parts, batches: EvalPipeline, world: World, mistakes: Mistakes | None = None
) -> tuple[Accuracy, Accuracy | None]:
    """How good the weights are, and their average where there is one; `mistakes` are the average's then.

    Every rank must call it.
    """
    ways: list[Way] = [contextlib.nullcontext]
    if parts.average:
        ways.append(build_way(parts, parts.average, world))
    found = evaluate_ways(
        parts.model, batches, world, ways, parts.dtype, mistakes, parts.eval_loss, flip=parts.eval_flip
    )
    return found[0], found[1] if parts.average else None


def describe_evaluation(result: Accuracy, average: Accuracy | None, num_classes: int) -> dict[str, Any]:
    """What a record of an evaluation says of both."""
    known = {"": result} | ({"average_": average} if average else {})
    counts: dict[str, Any] = {}
    for prefix, accuracy in known.items():
        counts |= {f"{prefix}{name}": getattr(accuracy, name) for name in ("top1", "correct1", "correct5", "loss")}
        counts[f"{prefix}top5"] = accuracy.top5 if num_classes > MANY_CLASSES else None
    return counts | {"total": result.total}


def build_way(parts: Parts, average: Average, world: World) -> Way:
    """A context in which the model computes with the averaged weights and statistics; every rank must call this."""
    layout, model = parts.layout, parts.model
    half = average.weights[: layout.split].to(parts.half_weights.dtype)
    parameters = dict(model.named_parameters())
    pairs: list[tuple[Tensor, Tensor]] = [
        (parameters[slot.name], view)
        for slot, view in zip(layout.slots, mixed_views(half, average.weights[layout.split :], layout), strict=True)
    ]
    buffers = list_statistics(model)
    for name, values in average_ranks(parts, world).items():
        pairs.append((buffers[name], values.to(buffers[name].dtype)))
    return lambda: exchanged(pairs)


@contextmanager
def exchanged(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """While inside, each first array of a pair has the memory of the second."""
    own = [array.data for array, _ in pairs]
    try:
        with torch.no_grad():
            for array, other in pairs:
                array.data = other
        yield
    finally:
        for (array, _), values in zip(pairs, own, strict=True):
            array.data = values
