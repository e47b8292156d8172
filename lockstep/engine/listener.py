"""Records on their way to the program that started a run (step 10 on the walk): it listens, and may end the run."""

import sys
from collections.abc import Callable

from lockstep.errors import Stop
from lockstep.events import Event, Notice, Sink
from lockstep.named import describe, phrase_error

OnEvent = Callable[[Event], object]


class Ear:
    """Calls a program's function with records; what the function raises is said once and never hurts the run."""

    def __init__(self, on_event: OnEvent, stop: Callable[[], None], warn: Callable[[str], None]) -> None:
        self._on_event, self._stop, self._warn = on_event, stop, warn
        self._has_failed = False

    def hear(self, event: Event) -> None:
        """Pass a record on; `Stop` asks the run to end."""
        try:
            self._on_event(event)
        except Stop:
            self._stop()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                self._warn(
                    f"{describe(self._on_event)} failed on {event.kind}: {phrase_error(error)}; training goes on, and "
                    "no other such failure is named."
                )


class Heard:
    """A run's sink whose records a program hears too, after they are written and shown."""

    def __init__(self, sink: Sink, on_event: OnEvent, stop: Callable[[], None]) -> None:
        self._sink = sink
        self._ear = Ear(on_event, stop, self._warn)

    def emit(self, event: Event) -> None:
        self._sink.emit(event)
        self._ear.hear(event)

    def close(self) -> None:
        self._sink.close()

    def _warn(self, text: str) -> None:
        self._sink.emit(Notice(level="warning", text=text))


def warn_aside(text: str) -> None:
    """For whoever hears a run of other processes, whose log belongs to them."""
    print(f"lockstep: {text}", file=sys.stderr)
