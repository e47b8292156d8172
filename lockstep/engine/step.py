"""One training step, top to bottom: the spine of the system (steps 6 to 9 on the walk)."""

from collections.abc import Iterator

from torch import Tensor

from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts
from lockstep.optim.loss import count_correct, cross_entropy_sum

# Places in the reducer's side numbers.
STOP, LOSS, CORRECT = 0, 1, 2


def train_step(parts: Parts, batch: Batch, lr: float, stop: bool = False) -> Tensor:
    """One weight update; returns stop votes, mean loss and number of right answers over the global batch.

    Every rank divides by the *global* batch and the reducer sums, so uneven shares average exactly.
    """
    model, reducer, clock, scale = parts.model, parts.reducer, parts.clock, parts.loss_scale
    parts.lr.fill_(lr)
    reducer.begin()
    reducer.side[STOP] = float(stop)
    for images, labels, is_last in split_batch(batch, parts.max_batch_per_rank):
        logits = model(images.to(parts.dtype))
        loss = cross_entropy_sum(logits, labels, parts.label_smoothing) / batch.global_size
        reducer.side[LOSS] += loss.detach()
        reducer.side[CORRECT] += count_correct(logits, labels, (1,))[0]
        if is_last:
            reducer.arm()
        loss.backward(scale.factor if scale else None)  # hooks send each buffer as it fills
    clock.mark("compute")

    reducer.finish()
    clock.mark("communicate")

    parts.rule.step(parts.weights, reducer.gradients, parts.lr, parts.half_weights, scale)
    clock.mark("compute")
    return reducer.side


def split_batch(batch: Batch, max_size: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The batch in passes of at most `max_size` samples that differ by at most one; nothing for an empty batch."""
    count = len(batch.labels)
    num_passes = -(-count // max_size)
    for index in range(num_passes):
        part = slice(count * index // num_passes, count * (index + 1) // num_passes)
        yield batch.images[part], batch.labels[part], index == num_passes - 1
