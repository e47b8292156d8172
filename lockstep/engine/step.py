"""One training step, top to bottom: the spine of the system (steps 6 to 9 on the walk)."""

from collections.abc import Callable

from torch import Tensor

from lockstep.data.order import split_batch
from lockstep.data.pipeline import Batch
from lockstep.engine.anchored import subtract_anchor
from lockstep.engine.build import Parts
from lockstep.engine.giving_up import GIVEN_UP, is_given_up, keep_statistics, put_statistics
from lockstep.optim.loss import count_correct

# Places in the reducer's side numbers; behind them lie those of `giving_up.py`, and what `drift.py` compares.
STOP, LOSS, CORRECT = 0, 1, 2

Asked = Callable[[], bool]  # whether this rank is to stop before its next pass


def train_step(parts: Parts, batch: Batch, lr: float, stop: bool = False, asked: Asked | None = None) -> Tensor:
    """One weight update; returns stop votes, mean loss and number of right answers over the global batch.

    With `asked`, which all ranks give or none, any rank may give the step up between two passes: then no rank takes it.
    """
    kept = keep_statistics(parts) if asked else []
    set_knobs(parts, lr, stop)
    run_passes(parts, batch.images, batch.labels, batch.global_size, asked)
    parts.clock.mark("compute")

    parts.reducer.finish()
    parts.clock.mark("communicate")

    if asked and is_given_up(parts.reducer.side):
        put_statistics(parts, kept)
    else:
        update_weights(parts)
    parts.clock.mark("compute")
    return parts.reducer.side


def set_knobs(parts: Parts, lr: float, stop: bool) -> None:
    """What changes from step to step goes to the device first, where a recorded step reads it too."""
    parts.lr.fill_(lr)
    parts.note[STOP].fill_(stop)


def run_passes(parts: Parts, images: Tensor, labels: Tensor, global_size: int, asked: Asked | None = None) -> None:
    """Forward and backward over this rank's share; hooks send each buffer as it fills.

    Every rank divides by the *global* batch and the reducer sums, so uneven shares average exactly. A rank that is
    asked to stop leaves out the passes that are left, and says so with its sums.
    """
    reducer, scale = parts.reducer, parts.loss_scale
    reducer.begin()
    reducer.side[: len(parts.note)] = parts.note
    if parts.rule.has_anchor:
        subtract_anchor(parts, images, labels, global_size)
    for part, is_last in split_batch(len(labels), parts.max_batch_per_rank):
        if asked and asked():
            reducer.side[GIVEN_UP] = 1
            break
        logits = parts.model(images[part].to(parts.dtype))
        loss = parts.loss(logits, labels[part]) / global_size
        reducer.side[LOSS] += loss.detach()
        reducer.side[CORRECT] += count_correct(logits, labels[part], (1,))[0]
        parts.clock.cut("forward")
        if is_last:
            reducer.arm()
        loss.backward(scale.factor if scale else None)
        parts.clock.cut("backward")
        reducer.end_pass()


def update_weights(parts: Parts) -> None:
    """Summed gradients → master weights → the weights the model reads, and their average where there is one."""
    parts.rule.step(parts.weights, parts.reducer.gradients, parts.lr, parts.half_weights, parts.loss_scale)
    if parts.average:
        parts.average.follow(parts.rule.count, parts.loss_scale)
