"""Where a step's time goes: one line of marks, by the host's clock on a CPU and by events on a GPU's stream.

A mark closes the interval since the last one and says what it was spent on. On a GPU nothing waits for the device
until the marks are read.
"""

import time
from typing import Literal

import torch

Kind = Literal["input", "compute", "communicate", "other"]
KINDS: tuple[Kind, ...] = ("input", "compute", "communicate", "other")


class Clock:
    """Seconds spent by kind since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Kind, float | torch.cuda.Event]] = []
        self._last = self._now()

    def mark(self, kind: Kind) -> None:
        """The time since the last mark was spent on `kind`."""
        self._marks.append((kind, self._now()))

    def take(self) -> dict[Kind, float]:
        """Seconds by kind since the last call; on a GPU this waits for the last mark to pass."""
        seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        if self._marks and isinstance(event := self._marks[-1][1], torch.cuda.Event):
            event.synchronize()
        for kind, now in self._marks:
            seconds[kind] += _elapsed(self._last, now)
            self._last = now
        if not self._marks:  # whatever has passed is nobody's
            self._last = self._now()
        self._marks.clear()
        return seconds

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed(start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start
