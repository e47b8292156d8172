"""Accuracy over exactly the validation set, as integer counts: the same number for any rank count."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.data.pipeline import Batch
from lockstep.engine.mistakes import Mistakes
from lockstep.engine.statistics import averaged_statistics
from lockstep.optim.loss import SummedLoss, count_correct, cross_entropy_sum

# A context in which the model computes with certain arrays: its own, or an average of them.
Way = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Accuracy:
    """Right answers among `total` samples, and their mean loss."""

    correct1: int
    correct5: int
    total: int
    loss: float

    @property
    def top1(self) -> float:
        return self.correct1 / max(1, self.total)

    @property
    def top5(self) -> float:
        return self.correct5 / max(1, self.total)


def answer(model: nn.Module, images: Tensor, flip: bool) -> Tensor:
    """The network's logits; with `flip` the mean of those of each image and of its mirror image."""
    logits: Tensor = model(images)
    return (logits.float() + model(images.flip(3)).float()) / 2 if flip else logits


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    world: World,
    dtype: torch.dtype = torch.float32,
    mistakes: Mistakes | None = None,
    loss: SummedLoss = cross_entropy_sum,
    averages: bool = True,
    flip: bool = False,
) -> Accuracy:
    """Count right answers over `batches` of every rank, computed in `dtype`; leaves the model in training mode.

    `mistakes` takes note of every answer, where somebody wants to know. `averages` is for ranks whose batch-norm
    statistics differ, as in training. With `flip` an image is answered together with its mirror image.
    """
    ways = (contextlib.nullcontext,)
    (accuracy,) = evaluate_ways(model, batches, world, ways, dtype, mistakes, loss, averages, flip)
    return accuracy


@torch.no_grad()
def evaluate_ways(
    model: nn.Module,
    batches: Iterable[Batch],
    world: World,
    ways: Sequence[Way],
    dtype: torch.dtype = torch.float32,
    mistakes: Mistakes | None = None,
    loss: SummedLoss = cross_entropy_sum,
    averages: bool = True,
    flip: bool = False,
) -> list[Accuracy]:
    """The same for a model with several sets of arrays, each batch made once; `mistakes` hears of the last way's."""
    counts = torch.zeros(len(ways), 3, dtype=torch.int64, device=world.device)
    total_loss = torch.zeros(len(ways), dtype=torch.float64, device=world.device)
    model.eval()
    with averaged_statistics(model, world) if averages else contextlib.nullcontext():
        for batch in batches:
            images = batch.images.to(dtype)
            for number, way in enumerate(ways):
                with way():
                    logits = answer(model, images, flip)
                counts[number, :2] += count_correct(logits, batch.labels, (1, 5))
                counts[number, 2] += len(batch.labels)
                total_loss[number] += loss(logits, batch.labels)
                if mistakes and number == len(ways) - 1:
                    mistakes.add(logits, batch.samples)
    model.train()
    sums, losses = world.sum(counts).tolist(), world.sum(total_loss).tolist()
    return [
        Accuracy(correct1, correct5, total, summed / max(1, total))
        for (correct1, correct5, total), summed in zip(sums, losses, strict=True)
    ]
