"""The page of a run that still goes on: the same curves, drawn anew whenever there are new records."""

from collections.abc import Sequence
from typing import Any

from lockstep.events import Event
from lockstep.report.history import History
from lockstep.report.page.curves import draw_curves
from lockstep.report.page.document import Document, Section, build_document, build_section
from lockstep.report.page.run import build_header, tell_warnings
from lockstep.report.page.time_spent import tell_spent

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
    sections = [section for section in told if section]
    return {
        "title": f"{history.start.run} – Lockstep",
        "header": build_header(history, is_live=True),
        "main": "".join(map(build_section, sections)),
        "charts": [{**chart.as_data(), "says": chart.says} for section in sections for chart in section.charts],
        "layout": [section.name for section in sections] + [chart.name for chart in curves],
    }
