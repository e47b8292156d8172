"""The moving average of the weights in one launch; its plain version is `optim/average.py`.

A step after which no update is due reads three numbers and none of the arrays, so an average that moves every few steps
costs a fraction of one that always does, in a recorded step too.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _move(average, live, count, skipped, numel, every, least, young, BLOCK: tl.constexpr):
    steps = tl.load(count)
    updates = tl.floor(steps / every + 0.5)  # rounded: a GPU's division may miss a whole number
    if (tl.load(skipped) == 0.0) & (updates * every == steps) & (steps > 0.0):
        share = tl.maximum(young / (young + updates), least)
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < numel
        before = tl.load(average + offsets, mask, other=0.0)
        now = tl.load(live + offsets, mask, other=0.0)
        tl.store(average + offsets, before + share * (now - before), mask)


def move_average(
    average: Tensor, live: Tensor, count: Tensor, skipped: Tensor, every: int, least: float, young: float
) -> None:
    """average ← average + share · (live − average) if an update is due after `count` steps, in place."""
    numel = average.numel()
    if numel:
        _move[(triton.cdiv(numel, BLOCK),)](
            average, live, count, skipped, numel, float(every), float(least), young, BLOCK=BLOCK
        )
