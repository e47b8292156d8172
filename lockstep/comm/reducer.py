"""Backward hooks -> full buffer -> all-reduce, under the backward pass or after it (steps 7 and 8 on the walk).

Gradients are *summed*: every rank divides its loss by the global batch, so the sum over ranks is the exact average
for any shares, equal or not, and no pass over the gradients is spent on dividing. Half gradients and FP32 ones have an
array each and travel in their own format. A CPU alone in the world sends nothing and moves nothing: its gradients stay
where the backward pass left them.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.comm.cost import Choice
from lockstep.comm.fusion import Buffer, ReductionPlan
from lockstep.comm.hybrid import Pending
from lockstep.comm.pulse import Pulse
from lockstep.layout import ALIGNMENT

Start = Callable[[Tensor, Choice], Pending]


class Reducer:
    """Moves each gradient into its slot and sums full buffers over all ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        gradients: tuple[Tensor, Tensor],
        slots: Sequence[Tensor],
        plan: ReductionPlan,
        start: Start | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """`parameters` in slot order; `gradients` from `allocate_gradients`, of which `slots` are views.

        `start` begins the sum of a buffer over all ranks; a world of one has none.
        """
        self._parameters = parameters
        self._half, self._full = gradients
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
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._land, index))
            for index, parameter in enumerate(parameters)
        ]

    def close(self) -> None:
        """Let go of the parameters: they hold the hooks and the hooks this, a ring that Python cannot clean up."""
        for hook in self._hooks:
            hook.remove()

    def follow(self, plan: ReductionPlan) -> None:
        """Use other buffers from the next step on."""
        self.plan = plan
        # Moving 45 MB of FP32 gradients would cost a ResNet-18's step on two cores 5 % of its time.
        self.keeps = self._start is None and not self._full.is_cuda and not self._half.numel()
        # Where nothing is sent under backward, a GPU copies all gradients at once: a few launches instead of hundreds.
        self.copies_late = self.keeps or (self._full.is_cuda and (self._start is None or not plan.overlap))
        self._buffers = plan.buffers
        self._owner = [index for index, buffer in enumerate(plan.buffers) for _ in range(buffer.first, buffer.last)]

    @property
    def gradients(self) -> tuple[Tensor, Tensor] | list[Tensor]:
        """Summed over ranks once `finish` has returned: the flat ones, half and FP32, or one by one if they stayed."""
        if not self.keeps:
            return self.flat
        pairs = zip(self._parameters, self._slots, strict=True)
        return [_flatten(slot.zero_() if p.grad is None else p.grad) for p, slot in pairs]

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """The flat arrays of half and of FP32 gradients."""
        return self._half, self._full[:-ALIGNMENT]

    @property
    def side(self) -> Tensor:
        """A few numbers that ride along with the last buffer and are summed with it: votes and counts cost nothing."""
        return self._full[-ALIGNMENT:]

    def begin(self) -> None:
        """Forget the last step."""
        if self.keeps:
            for parameter in self._parameters:
                parameter.grad = None
        self._start_over(landed=False)
        self.side.zero_()

    def _start_over(self, *, landed: bool) -> None:
        self._step += 1
        self._landed = [landed] * len(self._slots)
        self._num_missing = [buffer.last - buffer.first for buffer in self._buffers]
        self._num_sent = 0
        self._is_last_pass = False

    def arm(self) -> None:
        """The next backward pass is the last of this step: send buffers as they fill."""
        self._is_last_pass = True
        self._begun_s = time.perf_counter()

    def finish(self) -> None:
        """Send what has not been sent and wait until every buffer holds the sum over ranks."""
        if self.keeps:
            return
        self.collect()
        while self._num_sent < len(self._buffers):
            self._send()
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def collect(self) -> None:
        """Move gradients that have not been moved yet into their slots."""
        fresh = {index: p.grad for index, p in enumerate(self._parameters) if p.grad is not None}
        for dtype in {gradient.dtype for gradient in fresh.values()}:
            alike = [index for index, gradient in fresh.items() if gradient.dtype == dtype]
            slots = [_flatten(self._slots[index]) for index in alike]
            torch._foreach_copy_(slots, [_flatten(fresh[index]) for index in alike])
        for index in fresh:
            self._landed[index] = True
            self._parameters[index].grad = None

    def finish_recorded(self) -> None:
        """`finish` for passes that a recording ran: all gradients are in their slots, and no hook was called."""
        self._start_over(landed=True)
        self.finish()

    def _land(self, index: int, parameter: Tensor) -> None:
        """Move a fresh gradient into its slot at once: it is still in the cache, and its memory serves the next one."""
        assert parameter.grad is not None
        if self._is_last_pass:
            self.ready_s[index] = time.perf_counter() - self._begun_s
        if self.copies_late:
            return  # passes add up in `parameter.grad`
        if self._landed[index]:
            self._slots[index].add_(parameter.grad)
        else:
            self._slots[index].copy_(parameter.grad)
            self._landed[index] = True
        parameter.grad = None
        if not self._is_last_pass or not self.plan.overlap:
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
        self._pending.append(self._start(self._elements(buffer, is_last), choice))
        if self._pulse is not None:
            self._pulse.note(self._step + is_last, 0 if is_last else self._num_sent)

    def _elements(self, buffer: Buffer, is_last: bool) -> Tensor:
        """The part of an array that a buffer is; the last one takes the side numbers along."""
        split = self._half.numel()
        if buffer.start < split:
            return self._half[buffer.start : buffer.end]
        return self._full[buffer.start - split : None if is_last else buffer.end - split]


def _flatten(values: Tensor) -> Tensor:
    """All elements in the order they lie in memory: copies of many tensors in one launch want nothing else."""
    return (values.permute(0, 2, 3, 1) if values.dim() == 4 else values).reshape(-1)


def allocate_gradients(
    numel: int, device: torch.device, *, split: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Zeroed flat arrays for `numel` gradients, the first `split` of them in `dtype`; behind all, the side numbers."""
    return torch.zeros(split, dtype=dtype, device=device), torch.zeros(numel - split + ALIGNMENT, device=device)
