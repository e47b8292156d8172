"""Notices that another rank is lost while this one waits, and ends it before its backend's own watchdog would.

The host of a GPU waits for the device, and the device for the lost rank: no call fails, and the main thread may be deep
in the driver. A thread of its own therefore judges what the pulse reads: the beat of the next rank in a ring, and who
any other rank has found lost, so that every rank asks the store as little however many there are.

A rank may also live and never come to a collective that the others wait in. The backend then gives up, and the lookout
says who is behind before the backend ends the process.
"""

import threading
from collections.abc import Callable

from lockstep.comm.pulse import Beat, Lost, Pulse, is_gone, lose

TICK_S = 0.5
# A rank may hold the interpreter for long, or be stopped and let go again: this much silence is too much.
MAX_PATIENCE_S = 60.0
MAX_GRACE_S = 10.0
SLICE_S = 0.05
GONE_ROUNDS = 2  # of the pulse, after which a process that is gone would have been heard to leave


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
        is_stuck: bool = False,
    ) -> None:
        """Both waits together stay well below `timeout_s`, after which the backend ends the process its own way.

        `has_given_up`: whether the backend is about to do so. `is_stuck`: the main thread waits in it for ever.
        """
        self._pulse = pulse
        self._followed = followed
        self._patience_s = min(MAX_PATIENCE_S, timeout_s / 2)
        self._grace_s = min(MAX_GRACE_S, timeout_s / 4)
        self._is_stuck = is_stuck
        self._end = end
        self._has_given_up = has_given_up
        # Ticks of this thread rather than a clock: a process that was stopped itself has heard nobody, and must not
        # take that for their silence.
        self._silent_ticks = self._stuck_ticks = 0
        self._signs = self._rounds = -1
        self._gone_round: int | None = None  # of the pulse, when the followed rank's process was first seen to be gone
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
            if not self._is_closed_meanwhile(lost):
                self._end(lost)
            return

    def _is_closed_meanwhile(self, lost: Lost | None) -> bool:
        """Whether the main thread has found out by itself, within its grace.

        One that is stuck never does: there is only the word to wait for, or this rank would be the next to be lost. One
        that is ending, because all ranks failed alike and another was quicker, still has to say why.
        """
        if not self._is_stuck:
            return self._stop.wait(self._grace_s)
        is_told, waited_s = lost is None or not lost.is_dead, 0.0
        while not self._stop.wait(SLICE_S):
            waited_s += SLICE_S
            is_told = is_told or self._pulse.reported is not None or self._pulse.is_cut
            if self._pulse.is_ending:
                if waited_s >= MAX_GRACE_S:
                    return False
            elif is_told or waited_s >= self._grace_s:
                return False
        return True

    def _judge(self) -> tuple[bool, Lost | None]:
        """Whether anyone is lost, and who, as far as that can be told."""
        pulse, beat = self._pulse, self._pulse.heard
        if pulse.reported is not None:
            return True, pulse.reported
        if self._has_given_up():
            return True, pulse.find_lost()
        self._stuck_ticks = self._stuck_ticks + 1 if pulse.rounds == self._rounds else 0
        self._silent_ticks = self._silent_ticks + 1 if beat.signs == self._signs else 0
        self._rounds, self._signs = pulse.rounds, beat.signs
        if pulse.is_cut or self._stuck_ticks * TICK_S >= self._patience_s:
            return True, pulse.lose_keeper()
        if not beat.has_left and (self._silent_ticks * TICK_S >= self._patience_s or self._is_gone(beat)):
            return True, lose(self._followed, beat)
        return False, None

    def _is_gone(self, beat: Beat) -> bool:
        """Whether the followed rank's process has ended, on this host, without a word.

        What was last read of it may be from before its farewell: a reading that began after its end would have that.
        """
        if not is_gone(beat.process):
            self._gone_round = None
            return False
        if self._gone_round is None:
            self._gone_round = self._pulse.rounds
        return self._pulse.rounds >= self._gone_round + GONE_ROUNDS
