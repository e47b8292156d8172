"""Backward hooks -> full buffer -> all-reduce, under the backward pass or after it (steps 8 to 10 on the walk).

Gradients are *summed*: every rank divides its loss by the global batch, so the sum over ranks is the exact average
for any shares, equal or not, and no pass over the gradients is spent on dividing.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.fusion import Buffer
from lockstep.layout import ALIGNMENT


class Reducer:
    """Moves each gradient into its slot and sums full buffers over all ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        array: Tensor,
        slots: Sequence[Tensor],
        buffers: Sequence[Buffer],
        *,
        num_ranks: int,
        overlap: bool,
    ) -> None:
        """`parameters` in slot order; `array` from `allocate_gradients`, of which `slots` are views."""
        self._array = array
        self._slots = slots
        self._buffers = buffers
        self._num_ranks = num_ranks
        self._overlap = overlap and num_ranks > 1
        self._owner = [index for index, buffer in enumerate(buffers) for _ in range(buffer.first, buffer.last)]
        self._is_last_pass = False
        self._landed = [False] * len(slots)
        self._num_missing: list[int] = []
        self._num_sent = 0
        self._works: list[dist.Work] = []
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._land, index))

    @property
    def gradients(self) -> Tensor:
        """The flat gradients over the layout, summed over ranks once `finish` has returned."""
        return self._array[:-ALIGNMENT]

    @property
    def side(self) -> Tensor:
        """A few numbers that ride along with the last buffer and are summed with it: votes and counts cost nothing."""
        return self._array[-ALIGNMENT:]

    def begin(self) -> None:
        """Forget the last step."""
        self._landed = [False] * len(self._slots)
        self._num_missing = [buffer.last - buffer.first for buffer in self._buffers]
        self._num_sent = 0
        self._is_last_pass = False
        self.side.zero_()

    def arm(self) -> None:
        """The next backward pass is the last of this step: send buffers as they fill."""
        self._is_last_pass = True

    def finish(self) -> None:
        """Send what has not been sent and wait until every buffer holds the sum over ranks."""
        while self._num_sent < len(self._buffers):
            self._send()
        for work in self._works:
            work.wait()
        self._works.clear()

    def _land(self, index: int, parameter: Tensor) -> None:
        """Move a fresh gradient into its slot at once: it is still in the cache, and its memory serves the next one."""
        assert parameter.grad is not None
        if self._landed[index]:
            self._slots[index].add_(parameter.grad)
        else:
            self._slots[index].copy_(parameter.grad)
            self._landed[index] = True
        parameter.grad = None
        if not (self._is_last_pass and self._overlap):
            return
        self._num_missing[self._owner[index]] -= 1
        # Strictly in order: all ranks must start the same collectives in the same sequence.
        while self._num_sent < len(self._buffers) and self._num_missing[self._num_sent] == 0:
            self._send()

    def _send(self) -> None:
        """Start the all-reduce of the next buffer."""
        buffer = self._buffers[self._num_sent]
        self._num_sent += 1
        for index in range(buffer.first, buffer.last):
            if not self._landed[index]:
                self._slots[index].zero_()  # a rank with no samples contributes nothing
        if self._num_ranks > 1:
            is_last = self._num_sent == len(self._buffers)
            end = self._array.numel() if is_last else buffer.end
            work = dist.all_reduce(self._array[buffer.start : end], async_op=True)
            if work is not None:
                self._works.append(work)


def allocate_gradients(numel: int, device: torch.device) -> Tensor:
    """A zeroed flat array for `numel` gradients and, behind them, the side numbers."""
    return torch.zeros(numel + ALIGNMENT, device=device)
