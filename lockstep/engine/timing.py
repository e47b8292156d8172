"""Where a step's time goes: one line of marks, by the host's clock on a CPU and by events on a GPU's stream.

A mark closes the interval since the last one and says what it was spent on. On a GPU nothing waits for the device
until the marks are read.
"""

from typing import Literal

import torch

from lockstep.comm.moment import Moment, seconds_between, take_moment, wait_for

Kind = Literal["input", "compute", "communicate", "other"]
KINDS: tuple[Kind, ...] = ("input", "compute", "communicate", "other")


class Clock:
    """Seconds spent by kind since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Kind, Moment]] = []
        self._last = self._now()

    def mark(self, kind: Kind) -> None:
        """The time since the last mark was spent on `kind`."""
        self._marks.append((kind, self._now()))

    def take(self) -> dict[Kind, float]:
        """Seconds by kind since the last call; on a GPU this waits for the last mark to pass."""
        seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        if self._marks:
            wait_for(self._marks[-1][1])
        for kind, now in self._marks:
            seconds[kind] += seconds_between(self._last, now)
            self._last = now
        if not self._marks:  # whatever has passed is nobody's
            self._last = self._now()
        self._marks.clear()
        return seconds

    def _now(self) -> Moment:
        return take_moment(on_gpu=self._on_gpu)
