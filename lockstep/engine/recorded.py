"""The step as a CUDA graph: recorded once, then replayed by a single launch (steps 6 to 9 on the walk).

Small steps on a fast GPU are over before the host has launched their kernels; a recording has no such gaps. It reads
its input and whatever changes from step to step from fixed places on the device.

Alone in the world the whole step is recorded. Among others the recording holds both passes, and an event where each
buffer is full. NCCL stays outside, so that its watchdog and a clean end keep working: after the replay is launched, the
host starts each buffer's sum on the channel's stream, behind its event, while the rest of the replay still runs.

    host             | replay | start sum 0 | start sum 1 | start sum 2 | update |   (all at once, ahead of the device)
    compute stream   | place | forward | backward  e0        e1         e2 | waits for the sums | update |
    channel's stream                              | sum 0 |   | sum 1 |   | sum 2 |
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts
from lockstep.engine.giving_up import is_given_up, keep_statistics, put_statistics
from lockstep.engine.step import (
    Asked,
    run_passes,
    set_knobs,
    train_step,
    update_weights,
)
from lockstep.engine.timing import Cut
from lockstep.models import find_own

# Steps launched from the same places before recording: kernels are compiled and chosen, which no recording can hold.
WARM_UP_STEPS = 3


class Recording(NamedTuple):
    """A recorded step: the graph, the events in it that mark full buffers, and those where its passes end."""

    graph: torch.cuda.CUDAGraph
    marks: Sequence[torch.cuda.Event]
    cuts: list[Cut]


class RecordedStep:
    """`train_step` for batches of one size; any other batch, such as the last of an epoch, is taken as usual."""

    def __init__(
        self, parts: Parts, num_samples: int, global_size: int, warn: Callable[[str], None], pool: Any = None
    ) -> None:
        """`pool` is the memory of another recording, which must not be replayed at the same time."""
        self._parts = parts
        self.sizes = (num_samples, global_size)
        self.warn = warn
        self.pool = pool
        self._place: Batch | None = None
        self._steps_until_recording = WARM_UP_STEPS
        self._recording: Recording | None = None
        self._is_given_up = False

    def __call__(self, batch: Batch, lr: float, stop: bool = False, asked: Asked | None = None) -> Tensor:
        """One weight update, as `train_step`; a replay itself is never given up, but others may give up theirs."""
        if (len(batch.labels), batch.global_size) != self.sizes:
            return take_odd_step(self._parts, batch, lr, stop, asked)
        place = self._put(batch)
        if self._recording is None and not self._is_recorded_now(place):
            return train_step(self._parts, place, lr, stop, asked)
        return self._replay(lr, stop, asked)

    def prepare(self, batch: Batch, warm_up_steps: int = 0) -> None:
        """Record at once, and raise what goes wrong; kernels that have not run before need steps to warm up.

        No other rank takes part in the recording itself.
        """
        place = self._put(batch)
        for number in range(warm_up_steps):
            is_last = number == warm_up_steps - 1
            with refuse_waits() if is_last else nullcontext():
                train_step(self._parts, place, 0.0)
        self._recording = self._record(place)

    def _is_recorded_now(self, place: Batch) -> bool:
        """Record if it is time; a rank that cannot goes on launching, which sends the same sums in the same order."""
        self._steps_until_recording -= 1
        if self._steps_until_recording >= 0 or self._is_given_up:
            return False
        try:
            self._recording = self._record(place)
        except RuntimeError as error:  # out of memory is one, too
            self._is_given_up = True
            torch.cuda.synchronize()
            self.warn(f"The step could not be recorded and is launched one by one: {str(error).splitlines()[0]}")
        return not self._is_given_up

    def _put(self, batch: Batch) -> Batch:
        """Copy a batch to the place a recording reads; images of another size begin a new one."""
        if self._place is None or self._place.images.shape[2:] != batch.images.shape[2:]:
            self._recording = None  # its memory first
            self._place = self._build_place(batch)
            self._steps_until_recording = WARM_UP_STEPS
        self._place.images[:, : batch.images.shape[1]].copy_(batch.images)
        self._place.labels.copy_(batch.labels)
        return self._place

    def _build_place(self, batch: Batch) -> Batch:
        count, channels, height, width = batch.images.shape
        # Tensor cores read four channels faster than three; the fourth stays zero.
        channels = find_own(self._parts.model, "input_channels", channels)
        images = torch.zeros(count, height, width, channels, dtype=self._parts.dtype, device=batch.images.device)
        return replace(batch, images=images.permute(0, 3, 1, 2), labels=torch.zeros_like(batch.labels))

    def _record(self, place: Batch) -> Recording:
        """Record what a step does, without doing it."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a recording has memory of its own
        graph = torch.cuda.CUDAGraph()
        reducer = self._parts.reducer
        # Only this thread is watched: those that prepare the next batches may go on using the device.
        with (
            torch.cuda.stream(
                torch.cuda.current_stream()
            ),  # to come back to: a recording that breaks off stays on its own
            reducer.recording() as marks,
            self._parts.clock.recording() as cuts,
            torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
        ):
            run_passes(self._parts, place.images, place.labels, place.global_size)
            reducer.finish()  # nothing is sent, so there is nothing to wait for
            if reducer.is_alone:
                update_weights(self._parts)
        self.pool = graph.pool()
        return Recording(graph, marks, cuts)

    def _replay(self, lr: float, stop: bool, asked: Asked | None) -> Tensor:
        assert self._recording is not None
        parts, (graph, marks, cuts) = self._parts, self._recording
        kept = keep_statistics(parts) if asked and not parts.reducer.is_alone else []
        set_knobs(parts, lr, stop)
        graph.replay()
        parts.clock.note_replay(cuts)
        if not parts.reducer.is_alone:
            parts.reducer.start_marked(marks)
            parts.clock.mark("compute")
            parts.reducer.wait()
            parts.clock.mark("communicate")
            if asked and is_given_up(parts.reducer.side):
                put_statistics(parts, kept)
            else:
                update_weights(parts)
        parts.clock.mark("compute")
        return parts.reducer.side


@contextmanager
def refuse_waits() -> Iterator[None]:
    """While inside, a host that would wait for the device raises: for the step before a recording, which holds no wait.

    A recording that breaks off is never over for PyTorch 2.11's allocator: no later batch's memory is free again.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        set_sync_mode("error")
        yield
    finally:
        set_sync_mode(before)


def set_sync_mode(mode: int | str) -> None:
    """Set PyTorch's mode for operations that wait for the device."""
    with warnings.catch_warnings():
        # That PyTorch does not see all waits; as an error it would come after the mode was set, which would stay.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def take_odd_step(parts: Parts, batch: Batch, lr: float, stop: bool = False, asked: Asked | None = None) -> Tensor:
    """A step on a batch of a size met once an epoch: to compile it or search for kernels would take longer than it."""
    with as_written(parts.model):
        return train_step(parts, batch, lr, stop, asked)


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """While inside, modules that were compiled run as they are written, and no kernels are searched for.

    What was compiled stays for later.
    """
    searches, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searches
        for module, call in compiled:
            module._compiled_call_impl = call
