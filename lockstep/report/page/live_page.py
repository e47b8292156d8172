"""The page of a run that still goes on: the same curves, drawn anew whenever there are new records."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.errors import LockstepError
from lockstep.events import Event
from lockstep.report.history import History
from lockstep.report.page.charts import tell_time
from lockstep.report.page.curves import draw_curves
from lockstep.report.page.document import Document, Section, build_document, build_section
from lockstep.report.page.run_page import build_header, tell_warnings
from lockstep.report.page.time_spent import tell_spent
from lockstep.report.phrases import count, percent
from lockstep.report.time_left import TimeLeft

WAITING = '<p class="kind">Lockstep · live</p><h1>Waiting for the first record</h1>'


def build_live_page() -> str:
    """The page before it has heard anything."""
    return build_document(
        Document(
            title="Live – Lockstep",
            header=WAITING,
            sections=[],
            scripts=("page.js", "live.js"),
            connect="'self'",
            footer="Live from the run's own folder. Everything comes from this machine, and nothing leaves it.",
        )
    )


def build_state(events: Sequence[Event]) -> dict[str, Any]:
    """What the page shows now: its header and sections as HTML, escaped as in a report, and the charts' data."""
    history = History(events)
    curves = draw_curves(history)
    told = [
        Section("curves", "Training", charts=curves, switch=True) if curves else None,
        tell_spent(history),
        tell_warnings(history),
    ]
    sections = [_leave_tables_out(section) for section in told if section]
    return {
        "title": f"{history.start.run} – Lockstep",
        "header": build_header(history, "" if history.ended else describe_now(history)),
        "main": "".join(map(build_section, sections)),
        "charts": [{**chart.as_data(), "says": chart.says} for section in sections for chart in section.charts],
        # What makes the page put its sections in place anew; charts alone are drawn over.
        "layout": [[section.body, *(chart.name for chart in section.charts)] for section in sections],
    }


def _leave_tables_out(section: Section) -> Section:
    """Charts without their tables, which are not drawn anew with them and would be old in a moment."""
    return replace(section, charts=[replace(chart, numbers=None) for chart in section.charts])


def describe_now(history: History) -> str:
    """How far a run is that goes on, how quick, and how long it still takes."""
    summary, total = history.summary, history.start.steps_total
    done = f" ({percent(summary['steps'] / total)})" if total > 0 else ""
    parts = [f"Step {summary['steps']:,} of {total:,}{done}, after {tell_time(summary['wall_s'])}"]
    if history.steps:
        parts.append(f"{count(history.steps[-1][1].images_per_second)} images/s now")
    try:
        left = TimeLeft(history.start)
        for event in history.parts[-1]:
            left.emit(event)
        parts.append(f"about {tell_time(left.seconds())} left")
    except (LockstepError, KeyError, TypeError, ValueError, ArithmeticError):  # a configuration of another version
        pass
    return f"{', '.join(parts)}."
