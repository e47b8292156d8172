"""Accuracy over exactly the validation set, as integer counts: the same number for any rank count."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.data.pipeline import Batch
from lockstep.optim.loss import count_correct, cross_entropy_sum


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
def evaluate(model: nn.Module, batches: Iterable[Batch], world: World, dtype: torch.dtype = torch.float32) -> Accuracy:
    """Count right answers over `batches` of every rank, computed in `dtype`; leaves the model in training mode."""
    average_statistics(model, world)
    counts = torch.zeros(3, dtype=torch.int64, device=world.device)
    loss = torch.zeros(1, dtype=torch.float64, device=world.device)
    model.eval()
    for batch in batches:
        logits = model(batch.images.to(dtype))
        counts[:2] += count_correct(logits, batch.labels, (1, 5))
        counts[2] += len(batch.labels)
        loss += cross_entropy_sum(logits, batch.labels, 0.0)
    model.train()
    correct1, correct5, total = world.sum(counts).tolist()
    return Accuracy(correct1, correct5, total, world.sum(loss).item() / max(1, total))


@torch.no_grad()
def average_statistics(model: nn.Module, world: World) -> None:
    """Replace each rank's batch-norm running statistics by their average over ranks."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world.size == 1 or not statistics:
        return
    flat = torch.cat([buffer.flatten() for buffer in statistics])
    world.sum(flat).div_(world.size)
    parts: tuple[Tensor, ...] = flat.split([buffer.numel() for buffer in statistics])
    for buffer, part in zip(statistics, parts, strict=True):
        buffer.copy_(part.view_as(buffer))
