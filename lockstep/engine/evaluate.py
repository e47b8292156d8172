"""Accuracy over exactly the validation set, as integer counts: the same number for any rank count."""

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.data.pipeline import Batch
from lockstep.engine.mistakes import Mistakes
from lockstep.optim.loss import SummedLoss, count_correct, cross_entropy_sum


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


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    world: World,
    dtype: torch.dtype = torch.float32,
    mistakes: Mistakes | None = None,
    loss: SummedLoss = cross_entropy_sum,
    averages: bool = True,
) -> Accuracy:
    """Count right answers over `batches` of every rank, computed in `dtype`; leaves the model in training mode.

    `mistakes` takes note of every answer, where somebody wants to know. `averages` is for ranks whose batch-norm
    statistics differ, as in training.
    """
    counts = torch.zeros(3, dtype=torch.int64, device=world.device)
    total_loss = torch.zeros(1, dtype=torch.float64, device=world.device)
    model.eval()
    with averaged_statistics(model, world) if averages else contextlib.nullcontext():
        for batch in batches:
            logits = model(batch.images.to(dtype))
            counts[:2] += count_correct(logits, batch.labels, (1, 5))
            counts[2] += len(batch.labels)
            total_loss += loss(logits, batch.labels)
            if mistakes:
                mistakes.add(logits, batch.samples)
    model.train()
    correct1, correct5, total = world.sum(counts).tolist()
    return Accuracy(correct1, correct5, total, world.sum(total_loss).item() / max(1, total))


@contextmanager
def averaged_statistics(model: nn.Module, world: World) -> Iterator[None]:
    """While inside, batch norm's running statistics are their average over ranks; then each rank has its own again.

    Training goes on from a rank's own: an average in between would round them, and what a run ends with would depend
    on when somebody looked.
    """
    own = flatten_statistics(model)
    if world.size == 1 or not own.numel():
        yield
        return
    fill_statistics(model, world.sum(own.clone()).div_(world.size))
    try:
        yield
    finally:
        fill_statistics(model, own)


def gather_statistics(model: nn.Module, world: World) -> Tensor:
    """Every rank's running statistics, one row each; 0.2 MB for a rank of a ResNet-50."""
    own = flatten_statistics(model)
    rows = own.new_zeros(world.size, own.numel())
    rows[world.rank] = own
    return world.sum(rows)


def flatten_statistics(model: nn.Module) -> Tensor:
    """A copy of this rank's running statistics in one array."""
    statistics = _list_statistics(model)
    return torch.cat([buffer.detach().flatten() for buffer in statistics]) if statistics else torch.zeros(0)


@torch.no_grad()
def fill_statistics(model: nn.Module, flat: Tensor) -> None:
    """The way back; in place, because a recorded step has their addresses."""
    statistics = _list_statistics(model)
    parts: tuple[Tensor, ...] = flat.split([buffer.numel() for buffer in statistics])
    for buffer, part in zip(statistics, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def _list_statistics(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in list_statistics(model).values() if buffer.is_floating_point()]


def list_statistics(model: nn.Module) -> dict[str, Tensor]:
    """What a network keeps besides its parameters, by name: batch norm's statistics, and whatever else it has."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def list_passing(model: nn.Module) -> list[Tensor]:
    """Buffers that a network does not keep: tables that it builds anew, scratch."""
    kept = model.state_dict(keep_vars=True)
    return [buffer for name, buffer in model.named_buffers() if name not in kept]
