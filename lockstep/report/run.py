"""What listens to a run on rank 0: the log, the display, the viewers of others; at the end, summary and report."""

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.events import LOG_NAME, Event, EventLog, Notice, RunEnded, Sink, read_events
from lockstep.report.sinks import Behind
from lockstep.report.summary import summarize, write_summary
from lockstep.restarts import can_restart


class RunSink:
    """Every record goes to the run's log, then to viewers and display; its end leaves a summary and a page.

    One of hundreds of runs leaves no page: `lockstep report` draws it for who wants to see it.
    """

    def __init__(self, folder: Path, display: Sink, viewers: Sequence[Behind] = (), *, draws: bool = True) -> None:
        self._folder = folder
        self._draws = draws
        self._display = display
        self._viewers = viewers
        self._log = EventLog(folder / LOG_NAME, warn=display.emit)

    def emit(self, event: Event) -> None:
        self._log.emit(event)
        if isinstance(event, RunEnded):
            # Ranks that are about to start again have no time to draw.
            if self._draws and (event.status != "failed" or not can_restart(os.environ)):
                self._report()
            self._summarize()  # last: whoever finds it finds all the rest
        for viewer in self._viewers:
            if problem := viewer.emit(event):
                self._log.emit(problem)
                self._display.emit(problem)
        self._display.emit(event)

    def close(self) -> None:
        for viewer in self._viewers:
            viewer.close()
        self._display.close()
        self._log.close()

    def _summarize(self) -> None:
        try:
            write_summary(self._folder / "summary.json", summarize(read_events(self._log.path)))
        except LockstepError as error:  # a full disk costs the summary, not the run
            self._display.emit(Notice(level="warning", text=str(error)))

    def _report(self) -> None:
        """Leave the page; whatever goes wrong with it, the run is done and says so."""
        try:
            from lockstep.report.page.run_page import write_report

            write_report(self._folder)
        except LockstepError as error:
            self._display.emit(Notice(level="warning", text=f"There is no report: {error}"))
        except Exception as error:  # a fault in a drawing must not cost a run of weeks its good end
            text = f"There is no report, because of a fault in Lockstep ({type(error).__name__}: {error})."
            self._display.emit(Notice(level="warning", text=text))


class SilentSink:
    """Hears everything and says nothing: every rank but the first."""

    def emit(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass
