"""The step as a CUDA graph: recorded once, then replayed by a single launch (steps 6 to 9 on the walk).

Small steps on a fast GPU are over before the host has launched their kernels; a recording has no such gaps. It reads
its input and whatever changes from step to step from fixed places on the device. Alone in the world the whole step is
recorded, among others only the passes: what is sent stays with the reducer, after the backward pass.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts
from lockstep.engine.step import run_passes, set_knobs, train_step, update_weights

# Steps launched from the same places before recording: kernels are compiled and chosen, which no recording can hold.
WARM_UP_STEPS = 3


class RecordedStep:
    """`train_step` for batches of one size; any other batch, such as the last of an epoch, is taken as usual."""

    def __init__(self, parts: Parts, num_samples: int, global_size: int) -> None:
        self._parts = parts
        self._sizes = (num_samples, global_size)
        self._is_alone = parts.hybrid is None
        self._place: Batch | None = None
        self._steps_until_recording = WARM_UP_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch, lr: float, stop: bool = False) -> Tensor:
        """One weight update, as `train_step`."""
        if (len(batch.labels), batch.global_size) != self._sizes:
            return train_step(self._parts, batch, lr, stop)
        place = self._put(batch)
        if self._steps_until_recording > 0:
            self._steps_until_recording -= 1
            return train_step(self._parts, place, lr, stop)
        if self._graph is None:
            self._graph = self._record(place)
        return self._replay(lr, stop)

    def _put(self, batch: Batch) -> Batch:
        """Copy a batch to the place a recording reads; images of another size begin a new one."""
        if self._place is None or self._place.images.shape[2:] != batch.images.shape[2:]:
            self._place = self._build_place(batch)
            self._graph, self._steps_until_recording = None, WARM_UP_STEPS
        self._place.images[:, : batch.images.shape[1]].copy_(batch.images)
        self._place.labels.copy_(batch.labels)
        return self._place

    def _build_place(self, batch: Batch) -> Batch:
        count, channels, height, width = batch.images.shape
        # Tensor cores read four channels faster than three; the fourth stays zero.
        channels = getattr(self._parts.model, "input_channels", channels)
        images = torch.zeros(count, height, width, channels, dtype=self._parts.dtype, device=batch.images.device)
        return replace(batch, images=images.permute(0, 3, 1, 2), labels=torch.zeros_like(batch.labels))

    def _record(self, place: Batch) -> torch.cuda.CUDAGraph:
        """Record what a step does, without doing it."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a recording has memory of its own
        graph = torch.cuda.CUDAGraph()
        # Only this thread is watched: those that prepare the next batches may go on using the device.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run_passes(self._parts, place.images, place.labels, place.global_size)
            self._parts.reducer.collect()
            if self._is_alone:
                update_weights(self._parts)
        return graph

    def _replay(self, lr: float, stop: bool) -> Tensor:
        assert self._graph is not None
        parts = self._parts
        set_knobs(parts, lr, stop)
        self._graph.replay()
        if not self._is_alone:
            parts.clock.mark("compute")
            parts.reducer.finish_recorded()
            parts.clock.mark("communicate")
            update_weights(parts)
        parts.clock.mark("compute")
        return parts.reducer.side
