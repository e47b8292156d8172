"""Following a run that goes on elsewhere, in this terminal."""

import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep.errors import LockstepError
from lockstep.events import Event, RunStarted, StepDone
from lockstep.report.compare import clean
from lockstep.report.display import Display, build_display, print_plain
from lockstep.report.follow import Follower, has_ended
from lockstep.report.summary import split_parts

POLL_S = 1.0


def watch_terminal(source: Path, console: Console | None = None, poll_s: float = POLL_S) -> None:
    """Show a run as it goes on, until it ends or Ctrl-C."""
    console = console or Console()
    follower = Follower(source)
    folder = follower.path.parent
    display = build_display(console, folder)
    try:
        events = follower.poll()
        if not events:
            print_plain(console, f"Waiting for the first record in {folder}; Ctrl-C ends the waiting.")
        events, old = choose_recent(events), list_old_steps(events)
        last_s, is_said = 0.0, False  # of the newest record; whether its age has been told
        while True:
            for event in events:
                if isinstance(event, RunStarted) and display.start:  # it was resumed meanwhile
                    display.close()
                    display = build_display(console, folder)
                _show(display, event, follower.path)
                if isinstance(event, RunStarted):
                    _catch_up(display, old)
                    old = []
                last_s, is_said = event.time_s, False
            if has_ended(events):
                return
            if display.start and not is_said and (silence := follower.describe_silence(last_s)):
                print_plain(console, silence)
                is_said = True
            time.sleep(poll_s)
            events = follower.poll()
    except KeyboardInterrupt:  # the usual way to stop watching
        return
    finally:
        display.close()
        follower.close()


def choose_recent(events: Sequence[Event]) -> list[Event]:
    """Of a run that has gone on for long: its last part, and of that part's steps the last."""
    parts = split_parts(events)
    if not parts:
        return list(events)
    old = {id(step) for step in list_old_steps(events)}
    return [event for event in parts[-1] if id(event) not in old]


def list_old_steps(events: Sequence[Event]) -> list[StepDone]:
    """The steps of the last part that are not shown, all but the last."""
    parts = split_parts(events)
    return [event for event in parts[-1] if isinstance(event, StepDone)][:-1] if parts else []


def _catch_up(display: Display, steps: Sequence[StepDone]) -> None:
    """Let what the display keeps of a run know of steps it does not show: the useful batch is the median of all."""
    for step in steps:
        display.verdict.emit(step)
        if step.noise_scale is not None:
            display.measured.append(step)


def _show(display: Display, event: Event, path: Path) -> None:
    try:
        display.emit(tame(event))
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise LockstepError(f"{path} holds a {event.kind} that this version of Lockstep cannot show.") from None


def tame(event: Event) -> Event:
    """The same record with nothing in it that could steer a terminal."""
    return type(event)(**{item.name: _tame(getattr(event, item.name)) for item in fields(event)})


def _tame(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_tame(one) for one in value]
    if isinstance(value, dict):
        return {clean(str(name)): _tame(one) for name, one in value.items()}
    return value
