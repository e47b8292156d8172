"""The step as a CUDA graph: recorded once, then replayed by a single launch (steps 6 to 9 on the walk).

Small steps on a fast GPU are over before the host has launched their kernels; a recording has no such gaps. It reads
its input and whatever changes from step to step from fixed places on the device. Alone in the world the whole step is
recorded, among others only the passes: what is sent stays with the reducer, after the backward pass.
"""

import torch
from torch import Tensor

from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts
from lockstep.engine.step import run_passes, set_knobs, train_step, update_weights

# Steps taken as usual before recording: kernels are compiled and chosen, memory finds its size.
WARM_UP_STEPS = 3


class RecordedStep:
    """`train_step` for batches of one size; any other batch, such as the last of an epoch, is taken as usual."""

    def __init__(self, parts: Parts, num_samples: int, global_size: int) -> None:
        self._parts = parts
        self._num_samples = num_samples
        self._global_size = global_size
        self._is_alone = parts.hybrid is None
        self._steps_until_recording = WARM_UP_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None
        self._images: Tensor | None = None
        self._labels: Tensor | None = None

    def __call__(self, batch: Batch, lr: float, stop: bool = False) -> Tensor:
        """One weight update, as `train_step`."""
        is_usual = (len(batch.labels), batch.global_size) == (self._num_samples, self._global_size)
        if self._images is not None and batch.images.shape[2:] != self._images.shape[2:]:
            self._forget()  # images of another size from here on
        if not is_usual or self._steps_until_recording > 0:
            self._steps_until_recording -= is_usual
            return train_step(self._parts, batch, lr, stop)
        if self._graph is None:
            self._record(batch)
        return self._replay(batch, lr, stop)

    def _forget(self) -> None:
        self._graph, self._images, self._labels = None, None, None
        self._steps_until_recording = WARM_UP_STEPS

    def _record(self, batch: Batch) -> None:
        """Record what a step does, without doing it."""
        parts = self._parts
        count, channels, *size = batch.images.shape
        # Tensor cores read four channels faster than three; the fourth stays zero.
        channels = max(channels, getattr(parts.model, "input_channels", channels))
        self._images = torch.zeros(count, channels, *size, dtype=parts.dtype, device=batch.images.device).to(
            memory_format=torch.channels_last
        )
        self._labels = torch.zeros_like(batch.labels)
        torch.cuda.empty_cache()  # a recording has memory of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_passes(parts, self._images, self._labels, self._global_size)
            parts.reducer.collect()
            if self._is_alone:
                update_weights(parts)
        self._graph = graph

    def _replay(self, batch: Batch, lr: float, stop: bool) -> Tensor:
        assert self._graph is not None
        assert self._images is not None
        assert self._labels is not None
        parts = self._parts
        set_knobs(parts, lr, stop)
        self._images[:, : batch.images.shape[1]].copy_(batch.images)
        self._labels.copy_(batch.labels)
        self._graph.replay()
        if not self._is_alone:
            parts.clock.mark("compute")
            parts.reducer.finish_recorded()
            parts.clock.mark("communicate")
            update_weights(parts)
        parts.clock.mark("compute")
        return parts.reducer.side
