"""Backward hooks -> full buffer -> all-reduce, under the backward pass or after it (steps 7 and 8 on the walk).

Gradients are *summed*: every rank divides its loss by the global batch, so the sum over ranks is the exact average
for any shares, equal or not, and no pass over the gradients is spent on dividing.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.comm.cost import Choice
from lockstep.comm.fusion import ReductionPlan
from lockstep.comm.hybrid import Pending
from lockstep.comm.pulse import Pulse
from lockstep.layout import ALIGNMENT

Start = Callable[[Tensor, Choice], Pending]


class Reducer:
    """Moves each gradient into its slot and sums full buffers over all ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        array: Tensor,
        slots: Sequence[Tensor],
        plan: ReductionPlan,
        start: Start | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """`parameters` in slot order; `array` from `allocate_gradients`, of which `slots` are views.

        `start` begins the sum of a buffer over all ranks; a world of one has none.
        """
        self._array = array
        self._slots = slots
        self._start = start
        self._pulse = pulse
        self._step = 0  # steps begun, for the pulse
        self._begun_s = 0.0
        self._is_last_pass = False
        self._landed = [False] * len(slots)
        self._num_missing: list[int] = []
        self._num_sent = 0
        self._pending: list[Pending] = []
        self.ready_s = [0.0] * len(slots)  # when each gradient of the last step landed, after its backward began
        self.follow(plan)
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._land, index))

    def follow(self, plan: ReductionPlan) -> None:
        """Use other buffers from the next step on."""
        self.plan = plan
        self._buffers = plan.buffers
        self._owner = [index for index, buffer in enumerate(plan.buffers) for _ in range(buffer.first, buffer.last)]

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
        self._step += 1
        self._landed = [False] * len(self._slots)
        self._num_missing = [buffer.last - buffer.first for buffer in self._buffers]
        self._num_sent = 0
        self._is_last_pass = False
        self.side.zero_()

    def arm(self) -> None:
        """The next backward pass is the last of this step: send buffers as they fill."""
        self._is_last_pass = True
        self._begun_s = time.perf_counter()

    def finish(self) -> None:
        """Send what has not been sent and wait until every buffer holds the sum over ranks."""
        while self._num_sent < len(self._buffers):
            self._send()
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def _land(self, index: int, parameter: Tensor) -> None:
        """Move a fresh gradient into its slot at once: it is still in the cache, and its memory serves the next one."""
        assert parameter.grad is not None
        if self._landed[index]:
            self._slots[index].add_(parameter.grad)
        else:
            self._slots[index].copy_(parameter.grad)
            self._landed[index] = True
        parameter.grad = None
        if not self._is_last_pass:
            return
        self.ready_s[index] = time.perf_counter() - self._begun_s
        if not self.plan.overlap:
            return
        self._num_missing[self._owner[index]] -= 1
        # Strictly in order: all ranks must start the same collectives in the same sequence.
        while self._num_sent < len(self._buffers) and self._num_missing[self._num_sent] == 0:
            self._send()

    def _send(self) -> None:
        """Start the all-reduce of the next buffer."""
        buffer, choice = self._buffers[self._num_sent], self.plan.choices[self._num_sent]
        self._num_sent += 1
        for index in range(buffer.first, buffer.last):
            if not self._landed[index]:
                self._slots[index].zero_()  # a rank with no samples contributes nothing
        if self._start is None:
            return
        is_last = self._num_sent == len(self._buffers)
        end = self._array.numel() if is_last else buffer.end
        self._pending.append(self._start(self._array[buffer.start : end], choice))
        if self._pulse is not None:
            self._pulse.note(self._step + is_last, 0 if is_last else self._num_sent)


def allocate_gradients(numel: int, device: torch.device) -> Tensor:
    """A zeroed flat array for `numel` gradients and, behind them, the side numbers."""
    return torch.zeros(numel + ALIGNMENT, device=device)
