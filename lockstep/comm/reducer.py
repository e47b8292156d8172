"""Backward hooks -> full buffer -> all-reduce, under the backward pass or after it (steps 7 and 8 on the walk).

Gradients are *summed*: every rank divides its loss by the global batch, so the sum over ranks is the exact average
for any shares, equal or not, and no pass over the gradients is spent on dividing. Half gradients and FP32 ones have an
array each and travel in their own format.

A step that is recorded sends nothing while it is recorded: each full buffer leaves an event in the recording. After
every replay the sums are started, each behind its event, while the rest of the replay still runs.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.comm.channel import Pending
from lockstep.comm.cost import Choice
from lockstep.comm.fusion import Buffer, ReductionPlan
from lockstep.comm.hybrid import PlannedSum, Sum, sum_squares
from lockstep.comm.moment import Moment, seconds_between, take_moment
from lockstep.comm.pulse import Pulse
from lockstep.layout import ALIGNMENT

# How a gradient gets into its slot. It stays outside: a CPU alone in the world sends nothing, and moving the 45 MB of a
# ResNet-18 would take 5 % of its step on two cores. At once: it is still in the CPU's cache. By buffer: a GPU moves all
# gradients of a buffer when the last of them is there, one launch instead of hundreds.
Landing = Literal["stays", "at once", "by buffer"]


class Start(Protocol):
    """Begins the sum of a buffer over all ranks; see `Hybrid.start`."""

    def __call__(
        self, buffer: Tensor, choice: Choice, num_exact: int = 0, after: torch.cuda.Event | None = None
    ) -> Sum: ...


class Sent(NamedTuple):
    """A buffer's way, in seconds after the backward pass began, by the device's clock."""

    full_s: float
    begun_s: float
    done_s: float


class Watch:
    """Moments of one step: its backward pass began, each gradient was there, each buffer was full."""

    def __init__(self, num_slots: int, num_buffers: int) -> None:
        self.began: Moment | None = None
        self.ready: list[Moment | None] = [None] * num_slots
        self.full: list[Moment | None] = [None] * num_buffers
        self.sums: Sequence[Sum] = ()

    def ready_s(self) -> list[float]:
        """When each gradient was ready, after the backward pass began; 0 for one that never came."""
        return [self._since_begin(moment) for moment in self.ready]

    def sent_s(self) -> list[Sent]:
        """Each buffer's way; the device must be done with the step, and the channel have timed it."""
        rows = []
        for full, pending in zip(self.full, self.sums, strict=True):
            assert isinstance(pending, Pending)
            rows.append(Sent(*map(self._since_begin, (full, pending.begun, pending.done))))
        return rows

    def _since_begin(self, moment: Moment | None) -> float:
        return 0.0 if moment is None or self.began is None else seconds_between(self.began, moment)


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
        landing: Landing | None = None,
    ) -> None:
        """`parameters` in slot order; `gradients` from `allocate_gradients`, of which `slots` are views.

        A world of one has no `start`. `landing` follows from the device unless it is given.
        """
        self._parameters = parameters
        self._half, self._full = gradients
        self._on_gpu = self._full.is_cuda
        self._slots = slots
        self._start = start
        self._pulse = pulse
        self._step = 0  # steps begun, for the pulse
        self._under_way: deque[tuple[Pending, tuple[int, int]]] = deque()  # sums the device may not be through with
        self._is_last_pass = False
        self._is_first_pass = True
        self.measures = False  # whether `first_square` is wanted; a recording keeps it always
        # Of the gradients of a step's first pass, where it has several and nothing is sent; recordings write there too.
        self.first_square = torch.zeros((), dtype=torch.float64, device=self._full.device)
        self._landed = [False] * len(slots)
        self._num_missing: list[int] = []
        self._num_sent = 0
        self._sums: list[Sum] = []
        self._marks: list[torch.cuda.Event] | None = None  # while a step is recorded: where each buffer is full
        self._watch: Watch | None = None
        usual: Landing = "by buffer" if self._on_gpu else "at once" if start or self._half.numel() else "stays"
        self.landing: Landing = landing or usual
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
        self._buffers = plan.buffers
        self._owner = [index for index, buffer in enumerate(plan.buffers) for _ in range(buffer.first, buffer.last)]

    def list_sums(self) -> list[PlannedSum]:
        """What a step sums under this plan, in order."""
        last = len(self._buffers) - 1
        return [
            PlannedSum(self._elements(buffer, number == last), choice, ALIGNMENT if number == last else 0)
            for number, (buffer, choice) in enumerate(zip(self._buffers, self.plan.choices, strict=True))
        ]

    @property
    def is_alone(self) -> bool:
        """Whether nothing is sent: in a world of one, or muted."""
        return self._start is None

    @property
    def gradients(self) -> tuple[Tensor, Tensor] | list[Tensor]:
        """Summed over ranks once `finish` has returned: the flat ones, half and FP32, or one by one if they stayed."""
        if self.landing != "stays":
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

    @contextmanager
    def muted(self) -> Iterator[None]:
        """While inside nothing is sent, and no other rank needs to take part."""
        start, self._start = self._start, None
        try:
            yield
        finally:
            self._start = start

    @contextmanager
    def recording(self) -> Iterator[list[torch.cuda.Event]]:
        """While inside, a full buffer is not sent but marked by an event in the recording; gives the marks."""
        marks: list[torch.cuda.Event] = []
        self._marks = marks
        try:
            yield marks
        finally:
            self._marks = None

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """While inside, the moments of each step are noted; those of the last one stay."""
        self._watch = watch = Watch(len(self._slots), len(self._buffers))
        try:
            yield watch
        finally:
            self._watch = None

    def begin(self) -> None:
        """Forget the last step, and what one that failed has left behind."""
        if self.landing != "at once":
            for parameter in self._parameters:
                parameter.grad = None
        self._start_over(landed=False)
        self.side.zero_()

    def count_from(self, step: int) -> None:
        """So many steps have been taken: what is said of a lost rank names the step by the run's own number."""
        self._step = step
        if self._pulse is not None:
            self._pulse.note(step + 1, 0)

    def _start_over(self, *, landed: bool) -> None:
        self._step += 1
        self._landed = [landed] * len(self._slots)
        self._num_missing = [buffer.last - buffer.first for buffer in self._buffers]
        self._num_sent = 0
        self._is_last_pass, self._is_first_pass = False, True
        self._sums = []

    def arm(self) -> None:
        """The next backward pass is the last of this step: send buffers as they fill."""
        self._is_last_pass = True
        if self._watch is not None:
            self._watch.began = self._now()

    def end_pass(self) -> None:
        """A backward pass is over: of the first of several, keep the sum of the gradients' squares if it is wanted."""
        is_wanted = self.is_alone and (self.measures or self._marks is not None)
        if is_wanted and self._is_first_pass and not self._is_last_pass and (gathered := self._gathered()):
            self.first_square.copy_(sum_squares(gathered))
        self._is_first_pass = False

    def _gathered(self) -> list[Tensor]:
        """This rank's gradients so far, in their slots or still outside; all elements in the order they lie."""
        triples = zip(self._parameters, self._slots, self._landed, strict=True)
        found = [p.grad if p.grad is not None else slot for p, slot, landed in triples if landed or p.grad is not None]
        return [_flatten(values) for values in found]

    def finish(self) -> None:
        """Send what has not been sent and wait until every buffer holds the sum over ranks."""
        if self.landing == "stays":
            return
        if self._num_sent == 0:
            self._collect(range(len(self._slots)))  # nothing is on its way: all at once, whatever the buffers
        while self._num_sent < len(self._buffers):
            self._send()
        self.wait()

    def start_marked(self, marks: Sequence[torch.cuda.Event]) -> None:
        """After a replay: start every sum, each behind the mark of its buffer.

        The recording has moved all gradients into their slots, and no hook was called.
        """
        self._start_over(landed=True)
        for mark in marks:
            self._send(after=mark)

    def wait(self) -> None:
        """Let what follows wait until every buffer holds the sum over ranks."""
        for pending in self._sums:
            pending.wait()

    def _land(self, index: int, parameter: Tensor) -> None:
        """A gradient is there; the last that its buffer waited for sends it."""
        assert parameter.grad is not None
        if self._is_last_pass and self._watch is not None:
            self._watch.ready[index] = self._now()
        if self.landing == "at once":
            self._move(index, parameter)
        if not self._is_last_pass or not self.plan.overlap or self.is_alone:
            return
        self._num_missing[self._owner[index]] -= 1
        # Strictly in order: all ranks must start the same collectives in the same sequence.
        while self._num_sent < len(self._buffers) and self._num_missing[self._num_sent] == 0:
            self._send()

    def _move(self, index: int, parameter: Tensor) -> None:
        """Put a fresh gradient into its slot, on top of those of earlier passes; its memory serves the next one."""
        assert parameter.grad is not None
        if self._landed[index]:
            self._slots[index].add_(parameter.grad)
        else:
            self._slots[index].copy_(parameter.grad)
            self._landed[index] = True
        parameter.grad = None

    def _collect(self, indexes: range) -> None:
        """Move gradients that have not been moved yet into their slots, all of one format in one launch."""
        if self.landing != "by buffer":
            return
        fresh = {index: grad for index in indexes if (grad := self._parameters[index].grad) is not None}
        for dtype in {gradient.dtype for gradient in fresh.values()}:
            alike = [index for index, gradient in fresh.items() if gradient.dtype == dtype]
            slots = [_flatten(self._slots[index]) for index in alike]
            torch._foreach_copy_(slots, [_flatten(fresh[index]) for index in alike])
        for index in fresh:
            self._landed[index] = True
            self._parameters[index].grad = None

    def _send(self, after: torch.cuda.Event | None = None) -> None:
        """Fill the next buffer and start its all-reduce, or mark it in a recording."""
        number = self._num_sent
        buffer, choice = self._buffers[number], self.plan.choices[number]
        self._num_sent += 1
        is_last = self._num_sent == len(self._buffers)
        if after is None:
            self._collect(range(buffer.first, buffer.last))
        for index in range(buffer.first, buffer.last):
            if not self._landed[index]:
                self._slots[index].zero_()  # a rank with no samples contributes nothing
        if self._watch is not None and after is None:
            self._watch.full[number] = self._now()
        if self._start is None:
            return
        if self._marks is not None:
            mark = torch.cuda.Event(external=True)
            mark.record()
            self._marks.append(mark)
        else:
            num_exact = ALIGNMENT if is_last else 0
            self._sums.append(self._start(self._elements(buffer, is_last), choice, num_exact, after))
            if self._watch is not None:
                self._watch.sums = self._sums
            self._note_progress((self._step + is_last, 0 if is_last else self._num_sent))

    def _note_progress(self, sent: tuple[int, int]) -> None:
        """Tell the pulse how far this rank is: on a GPU what is done, since a host sends steps ahead of its device.

        Asked here and not by the pulse's thread: no other thread may question events while a recording is made.
        """
        if self._pulse is None:
            return
        pending = self._sums[-1]
        if not self._on_gpu or not isinstance(pending, Pending):
            self._pulse.note(*sent)
            return
        self._under_way.append((pending, sent))
        while self._under_way and self._under_way[0][0].is_done:
            self._pulse.note(*self._under_way.popleft()[1])

    def _elements(self, buffer: Buffer, is_last: bool) -> Tensor:
        """The part of an array that a buffer is; the last one takes the side numbers along."""
        split = self._half.numel()
        if buffer.start < split:
            return self._half[buffer.start : buffer.end]
        return self._full[buffer.start - split : None if is_last else buffer.end - split]

    def _now(self) -> Moment:
        return take_moment(on_gpu=self._on_gpu, in_recording=self._marks is not None)


def _flatten(values: Tensor) -> Tensor:
    """All elements in the order they lie in memory: copies of many tensors in one launch want nothing else."""
    return (values.permute(0, 2, 3, 1) if values.dim() == 4 else values).reshape(-1)


def allocate_gradients(
    numel: int, device: torch.device, *, split: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Zeroed flat arrays for `numel` gradients, the first `split` of them in `dtype`; behind all, the side numbers."""
    return torch.zeros(split, dtype=dtype, device=device), torch.zeros(numel - split + ALIGNMENT, device=device)
