"""A run's records as they are written, by whoever, on whichever machine shares the folder.

Nothing tells a shared disk's readers of a change, so the log is looked at now and then. A line counts when its end is
there. When a full log is put away, the old file is read to its end before the new one.
"""

import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.events import LOG_NAME, Event, RunEnded, RunStarted, decode, list_full_parts, read_part
from lockstep.report.phrases import describe_silence

CHUNK_BYTES = 8 << 20
SUFFIX = Path(LOG_NAME).suffix
LONGEST_LINE = 64 << 20  # bytes; no record has as many


class Follower:
    """Reads what has been added to a run's log since the last look; the run, and its folder, may still be to come."""

    def __init__(self, source: Path) -> None:
        is_log = source.is_file() or (source.suffix == SUFFIX and not source.is_dir())
        self.path = source if is_log else source / LOG_NAME
        if source.is_file() and source.suffix != SUFFIX:
            raise LockstepError(f"{source} is no event log; give the folder of a run.")
        if not source.parent.is_dir():
            raise LockstepError(f"{source} is not there; give the folder of a run.")
        self._file = -1
        self._rest = b""  # a line whose end is not there yet
        self._read: set[str] = set()  # full parts that were read
        self._last_s = -math.inf  # time of the newest record

    def poll(self) -> list[Event]:
        """The records since the last look, oldest first."""
        if self._file < 0:
            return self._begin()
        is_replaced = self._is_replaced()  # asked first: all that was written before is then read below
        events = self._note(self._read_on())
        if is_replaced:
            self.close()
            events += self._begin()
        return events

    def _begin(self) -> list[Event]:
        """Read the full parts that are new, then open the log and read it."""
        events: list[Event] = []
        while True:
            # A part that was the log before holds what is known already.
            events += self._note([event for event in self._read_full() if event.time_s > self._last_s])
            self._open()
            if all(part.name in self._read for part in list_full_parts(self.path)):
                break
            self.close()  # put away in this very moment
        return events + (self._note(self._read_on()) if self._file >= 0 else [])

    def _note(self, events: list[Event]) -> list[Event]:
        """The same records; remembers how new they are."""
        self._last_s = max([self._last_s, *(event.time_s for event in events if not math.isnan(event.time_s))])
        return events

    def describe_silence(self, last_s: float) -> str:
        """Why nothing comes from a run whose newest record is of that time; empty while it is young."""
        if self._file >= 0 and not self.path.parent.is_dir():
            return f"{self.path.parent} is gone; what is shown is the last that was known of the run."
        return describe_silence(last_s)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._rest = -1, b""

    def _open(self) -> None:
        try:
            # Not blocking: a pipe of that name would hold up the very call.
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        except OSError as error:
            raise LockstepError(f"Cannot read the event log {self.path}: {error.strerror}.") from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise LockstepError(f"{self.path} is not a plain file, so it is no event log.")

    def _is_replaced(self) -> bool:
        try:
            now, held = os.stat(self.path), os.fstat(self._file)
        except FileNotFoundError:
            return False  # put away a moment ago; the next one comes
        except OSError:  # a shared disk has forgotten the old file
            return True
        return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino)

    def _read_on(self) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                chunk = os.read(self._file, CHUNK_BYTES)
            except OSError:  # as above: what it held is in the full part
                return events
            if not chunk:
                return events
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > LONGEST_LINE:
                raise LockstepError(
                    f"{self.path} has a line of more than {LONGEST_LINE:,} bytes, so it is no event log."
                )
            events += [event for line in lines if (event := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Event | None:
        try:
            return decode(line.decode(errors="replace"))
        except TypeError as error:
            text = f"{self.path} was not written by this version of Lockstep: {error}."
            raise LockstepError(text) from None

    def _read_full(self) -> list[Event]:
        """The full parts not read so far."""
        parts = [part for part in list_full_parts(self.path) if part.name not in self._read]
        self._read |= {part.name for part in parts}
        return [event for part in parts for event in read_part(part)]


def has_ended(events: Sequence[Event]) -> bool:
    """Whether the last thing that happened is the end of a run."""
    last = next((event for event in reversed(events) if isinstance(event, RunStarted | RunEnded)), None)
    return isinstance(last, RunEnded)
