"""Notices that another rank is lost while this one waits, and ends it before its backend's own watchdog would.

The host of a GPU waits for the device, and the device for the lost rank: no call fails, and the main thread may be deep
in the driver. A thread of its own therefore judges what the pulse reads: the beat of the next rank in a ring, and who
any other rank has found lost, so that every rank asks the store as little however many there are.

A rank may also live and never come to a collective that the others wait in. The backend then gives up, and the lookout
says who is behind before the backend ends the process.
"""

import threading
from collections.abc import Callable

from lockstep.comm.pulse import LISTEN_S, Lost, Pulse, is_gone, lose

TICK_S = 0.5
# A rank may hold the interpreter for long, or be stopped and let go again: this much silence is too much.
MAX_PATIENCE_S = 60.0
MAX_GRACE_S = 10.0


class Lookout:
    """Calls `end` once another rank is lost, unless the main thread has found out by then and closed the lookout."""

    def __init__(
        self,
        pulse: Pulse,
        followed: int,
        *,
        timeout_s: float,
        end: Callable[[Lost | None], None],
        has_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Both waits together stay well below `timeout_s`, after which the backend ends the process its own way.

        `has_given_up`: whether the backend is about to do so.
        """
        self._pulse = pulse
        self._followed = followed
        self._patience_s = min(MAX_PATIENCE_S, timeout_s / 2)
        self._grace_s = min(MAX_GRACE_S, timeout_s / 4)
        self._end = end
        self._has_given_up = has_given_up
        # Ticks of this thread rather than a clock: a process that was stopped itself has heard nobody, and must not
        # take that for their silence.
        self._silent_ticks = self._stuck_ticks = 0
        self._beats = self._rounds = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lockstep-lookout", daemon=True)
        pulse.follow(followed)
        self._thread.start()

    def close(self) -> None:
        """Look no longer."""
        self._stop.set()

    def _look(self) -> None:
        while not self._stop.wait(TICK_S):
            is_lost, lost = self._judge()
            if not is_lost:
                continue
            if lost is not None and lost.is_dead:  # one that is only behind is not to be ended by the others
                self._pulse.report(lost)
            if not self._stop.wait(self._grace_s):
                self._end(lost)
            return

    def _judge(self) -> tuple[bool, Lost | None]:
        """Whether anyone is lost, and who, as far as that can be told."""
        pulse, beat = self._pulse, self._pulse.heard
        if pulse.reported is not None:
            return True, pulse.reported
        if self._has_given_up():
            return True, pulse.find_lost()
        self._stuck_ticks = self._stuck_ticks + 1 if pulse.rounds == self._rounds else 0
        self._silent_ticks = self._silent_ticks + 1 if beat.beats == self._beats else 0
        self._rounds, self._beats = pulse.rounds, beat.beats
        if pulse.is_cut or self._stuck_ticks * TICK_S >= self._patience_s:
            return True, pulse.lose_keeper()
        silent_s = self._silent_ticks * TICK_S
        if beat.has_left or silent_s < LISTEN_S:
            return False, None
        if silent_s >= self._patience_s or is_gone(beat.process):
            return True, lose(self._followed, beat)
        return False, None
