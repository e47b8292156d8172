"""Where a step's time goes: one line of marks, by the host's clock on a CPU and by events on a GPU's stream.

A mark closes the interval since the last one and says what it was spent on. On a GPU nothing waits for the device
until the marks are read.

Now and then somebody draws a few steps (`timeline.py`) and keeps a *trace*: the same marks, and between them the cuts
where forward and backward end. In a recording the cuts are events inside it, which every replay passes anew.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from lockstep.comm.moment import Moment, seconds_between, take_moment, wait_for

Kind = Literal["input", "compute", "communicate", "other"]
KINDS: tuple[Kind, ...] = ("input", "compute", "communicate", "other")
Cut = tuple[Literal["forward", "backward"], Moment]


@dataclass
class Trace:
    """The marks and cuts of a few steps, in the order they came; a replay stands for all the cuts inside it."""

    start: Moment
    points: list[tuple[str, Moment]] = field(default_factory=list)
    replays: dict[int, list[Cut]] = field(default_factory=dict)  # by the number of points before each
    seen: tuple[Moment, float] | None = None  # a moment after the last of them, and the host's clock when it passed

    @property
    def start_s(self) -> float:
        """The start by the host's clock.

        The host runs ahead of a GPU: when it asked for the start says nothing of when the device came there.
        """
        assert self.seen is not None
        moment, seen_s = self.seen
        return seen_s - seconds_between(self.start, moment)


class Clock:
    """Seconds spent by kind since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Kind, Moment]] = []
        self._last = self._now()
        self._trace: Trace | None = None
        self._recorded: list[Cut] | None = None  # while a step is recorded
        # A moment, and the host's clock when it passed.
        self._seen: tuple[Moment, float] = self._last, time.perf_counter()

    def mark(self, kind: Kind) -> None:
        """The time since the last mark was spent on `kind`."""
        now = self._now()
        self._marks.append((kind, now))
        if self._trace is not None:
            self._trace.points.append((kind, now))

    def cut(self, what: Literal["forward", "backward"]) -> None:
        """This pass ended here; noted only where somebody keeps a trace, or may keep one of a recording's replays."""
        if self._recorded is not None:
            self._recorded.append((what, take_moment(on_gpu=True, in_recording=True)))
        elif self._trace is not None:
            self._trace.points.append((what, self._now()))

    @contextmanager
    def recording(self) -> Iterator[list[Cut]]:
        """While inside, cuts become part of the recording; gives them."""
        cuts: list[Cut] = []
        self._recorded = cuts
        try:
            yield cuts
        finally:
            self._recorded = None

    def note_replay(self, cuts: list[Cut]) -> None:
        """What the next mark closes was a replay of a recording with these cuts."""
        if self._trace is not None:
            self._trace.replays[len(self._trace.points)] = cuts

    def begin_trace(self) -> None:
        """Keep the marks and cuts from here on."""
        self._trace = Trace(self._now())

    def end_trace(self) -> Trace:
        """What was kept since `begin_trace`; on a GPU to be read after a `take`, when all of it has passed."""
        assert self._trace is not None
        trace, self._trace = self._trace, None
        trace.seen = self._seen
        return trace

    def take(self) -> dict[Kind, float]:
        """Seconds by kind since the last call; on a GPU this waits for the last mark to pass."""
        seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        if self._marks:
            wait_for(self._marks[-1][1])
            self._seen = self._marks[-1][1], time.perf_counter()
        for kind, now in self._marks:
            seconds[kind] += seconds_between(self._last, now)
            self._last = now
        if not self._marks:  # whatever has passed is nobody's
            self._last = self._now()
        self._marks.clear()
        return seconds

    def _now(self) -> Moment:
        return take_moment(on_gpu=self._on_gpu)
