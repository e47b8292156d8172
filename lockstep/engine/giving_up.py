"""A step that is given up between two passes, by all ranks or none: what it has changed goes back (beside step 6).

A rank that is asked to stop leaves out its remaining passes and says so with its sums, as `step.py` does; every rank
sees the same sum, and none takes the step.
"""

import torch
from torch import Tensor

from lockstep.engine.build import Parts

GIVEN_UP, SLOW = 3, 4  # places in the reducer's side numbers, behind those of `step.py`


def is_given_up(side: Tensor) -> bool:
    """Whether any rank gave the step up. On a GPU the host waits for it."""
    return float(side[GIVEN_UP]) > 0


def keep_statistics(parts: Parts) -> list[Tensor]:
    """What passes alone change: the model's running statistics."""
    return [buffer.clone() for buffer in parts.model.buffers()]


@torch.no_grad()
def put_statistics(parts: Parts, kept: list[Tensor]) -> None:
    """The way back; in place, because a recorded step has their addresses."""
    for buffer, value in zip(parts.model.buffers(), kept, strict=True):
        buffer.copy_(value)
