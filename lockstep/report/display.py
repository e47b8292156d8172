"""A run as it goes on: a live view in a terminal, plain lines anywhere else.

Both say the same: where training stands, each evaluation, checkpoint and notice, and T = S · N · e at the end.
"""

import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.events import (
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    InputChosen,
    Notice,
    RunEnded,
    RunPredicted,
    RunStarted,
    StepDone,
    TimelineTaken,
)
from lockstep.plan.hindsight import Hindsight, look_back
from lockstep.report.phrases import (
    clock,
    describe,
    describe_place,
    describe_result,
    describe_spent,
    describe_state,
    percent,
)
from lockstep.report.time_left import TimeLeft
from lockstep.report.useful_batch import find_useful_batch
from lockstep.report.verdict import Verdict
from lockstep.terminal import Aside, say

# Seconds between two plain lines on steps or preparation, so that a log stays readable.
PLAIN_INTERVAL_S = 5.0
# Seconds between two plain lines on what is slow, which come when that has changed.
VERDICT_INTERVAL_S = 60.0
BAR_WIDTH = 30


def build_display(console: Console, folder: Path, go_on: str = "") -> "Display":
    """The display that suits the output; `folder` is where the run leaves its files, `go_on` how to take it up."""
    kind = LiveDisplay if is_live(console) else PlainDisplay
    if console.is_terminal and not isinstance(console.file, Aside):
        with suppress(OSError, ValueError):  # a notebook's or a test's, which is no file
            console.file = cast("IO[str]", Aside(console.file, console.encoding))
    return kind(console, folder, go_on)


def is_live(console: Console) -> bool:
    """Whether the output is a terminal whose cursor can move."""
    return console.is_terminal and not console.is_dumb_terminal


class Display:
    """A sink that keeps what a reader wants to see; how it is shown is for the two kinds below."""

    def __init__(self, console: Console, folder: Path, go_on: str = "") -> None:
        self.console = console
        self.folder = folder
        self.go_on = go_on or f"lockstep train {folder} --resume"
        self.start: RunStarted | None = None
        self.time_left: TimeLeft | None = None
        self.step: StepDone | None = None
        self.measured: list[StepDone] = []  # those that know a noise scale
        self.evaluated: Evaluated | None = None
        self.verdict = Verdict()
        self._compared: list[Event] = []  # what a prediction is compared with, of this part of the run

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.start, self.time_left, self._compared = event, TimeLeft(event), []
        if isinstance(event, RunStarted | RunPredicted | InputChosen | TimelineTaken | RunEnded):
            self._compared.append(event)
        if isinstance(event, Evaluated):
            self.evaluated = event
        if isinstance(event, StepDone):
            self.step = event
            if event.noise_scale is not None:
                self.measured.append(event)
        if self.time_left:
            self.time_left.emit(event)
        self.verdict.emit(event)
        for line in describe(event):
            self.show_line(line, event)
        self.show_progress(event)
        if isinstance(event, RunEnded):
            self.close()
            self.show_end(event)

    def look_back(self) -> Hindsight | None:
        """What was predicted beside what came."""
        return look_back(self._compared)

    def describe_end(self, ended: RunEnded) -> list[tuple[str, str]]:
        useful = find_useful_batch(self.measured)
        return describe_result(ended, self.start, self.evaluated, self.folder, self.go_on, useful)

    def describe_state(self, step: StepDone) -> list[str]:
        """How training does, with the last that is known of what is not in every record."""
        return describe_state(step, self.evaluated, self.measured[-1].noise_scale if self.measured else None)

    def show_line(self, line: str, event: Event) -> None:
        raise NotImplementedError

    def show_progress(self, event: Event) -> None:
        raise NotImplementedError

    def show_end(self, ended: RunEnded) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Leave the terminal as it was found, with all that was to be said."""
        if isinstance(self.console.file, Aside):
            self.console.file.drain()


class PlainDisplay(Display):
    """Lines without control characters, for logs and pipes."""

    _next_line_s = 0.0
    _next_verdict_s = 0.0
    _slow: str | None = None  # as last said

    def show_line(self, line: str, event: Event) -> None:
        print_plain(self.console, line)

    def show_progress(self, event: Event) -> None:
        if not isinstance(event, StepDone) or not self.start or not self.time_left or event.time_s < self._next_line_s:
            return
        self._next_line_s = event.time_s + PLAIN_INTERVAL_S
        fields = [*describe_place(event, self.start), *self.describe_state(event)]
        print_plain(self.console, "  ".join([*fields, f"{clock(self.time_left.seconds())} left"]))
        self._show_verdict(event)

    def _show_verdict(self, step: StepDone) -> None:
        sentence, slow = self.verdict.sentence(), self.verdict.slow
        if sentence and slow != self._slow and step.time_s >= self._next_verdict_s:
            self._slow, self._next_verdict_s = slow, step.time_s + VERDICT_INTERVAL_S
            print_plain(self.console, sentence)

    def show_end(self, ended: RunEnded) -> None:
        rows = self.describe_end(ended)
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            print_plain(self.console, f"{label:{width}}  {value}")
        for line in describe_spent(ended, self.verdict.sentence(), self.look_back()):
            print_plain(self.console, line)


class LiveDisplay(Display):
    """A few lines that stay at the bottom of the terminal while all others scroll away above them."""

    _live: Live | None = None

    def show_line(self, line: str, event: Event) -> None:
        self.console.print(Text(line, style=style_of(event)))

    def show_progress(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            # Drawn when something happened and never from a thread of its own: the cores belong to training.
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        if self._live:
            self._live.update(self._view(), refresh=True)

    def show_end(self, ended: RunEnded) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(overflow="fold")
        for label, value in self.describe_end(ended):
            table.add_row(Text(label, style="cyan"), Text(value, style="bold" if label == "top-1" else ""))
        self.console.print(table)
        for line in describe_spent(ended, self.verdict.sentence(), self.look_back()):
            self.console.print(Text(line))

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        super().close()

    def _view(self) -> RenderableType:
        if not (self.start and self.step and self.time_left):
            return Text("first steps ...", style="dim")
        done = self.step.step / self.start.steps_total
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            ProgressBar(total=1.0, completed=done),
            f"{100 * done:.0f} %  {clock(self.time_left.seconds())} left",
        )
        return Group(
            Text(fit([self.start.recipe, *describe_place(self.step, self.start)], self.console.width), style="bold"),
            bar,
            Text(fit(self.describe_state(self.step), self.console.width)),
            *([Text(sentence, style="dim")] if (sentence := self.verdict.sentence()) else []),
        )


def style_of(event: Event) -> str:
    match event:
        case Evaluated():
            return "green"
        case CheckpointSaved() | Notice(level="info"):
            return "dim"
        case Notice(level="warning") | EpochDone():
            return "yellow"
    return "bold"


def fit(fields: list[str], width: int) -> str:
    """Fields in a row, or in as many as a narrow terminal needs; a line breaks only between two fields."""
    unbroken = "   ".join(field.replace(" ", "\N{NO-BREAK SPACE}") for field in fields)
    return textwrap.fill(unbroken, width).replace("\N{NO-BREAK SPACE}", " ")


def print_plain(console: Console, text: str) -> None:
    """One line as it is, less what the stream cannot take."""
    encoding = console.encoding
    line = "".join(character if character.isprintable() else " " for character in text)
    say(line.encode(encoding, "backslashreplace").decode(encoding), console.file)


def progress(title: str, console: Console) -> Callable[[int, int], None]:
    """A callback for long preparation, given (done, total): a bar in a terminal, a line now and then elsewhere."""
    next_s = 0.0

    def show(done: int, total: int) -> None:
        nonlocal next_s
        now, finished = time.monotonic(), done >= total
        if now < next_s and not finished:
            return
        if is_live(console):
            next_s = now + 0.1
            # Redrawn in place by a bare carriage return: nothing to put right if the work fails half-way.
            end = "\n" if finished else "\r"
            with suppress(OSError, ValueError):
                console.print(bar_line(title, done, total), end=end, overflow="crop", no_wrap=True)
        else:
            next_s = now + PLAIN_INTERVAL_S
            print_plain(console, f"{title}: {done:,}/{total:,} ({percent(done / max(total, 1))})")

    return show


def bar_line(title: str, done: int, total: int) -> Text:
    filled = BAR_WIDTH * done // max(total, 1)
    parts = (f"{title} ", ("=" * filled, "green"), ("-" * (BAR_WIDTH - filled), "dim"), f" {done:,}/{total:,}")
    return Text.assemble(*parts)
