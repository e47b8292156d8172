"""What was predicted for a run beside what it measured: two bars, a table, and the assumption that was wrong."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.plan.hindsight import Row, look_back
from lockstep.plan.measured_steps import PASSES
from lockstep.report.history import History
from lockstep.report.page.charts import Chart, Numbers
from lockstep.report.page.document import Section, build_table, tell
from lockstep.report.phrases import count, percent, size

COLORS = {
    "waiting for input": "--green",
    "forward": "--sky",
    "backward": "--blue",
    "update": "--purple",
    "computing, together": "--blue",
    "waiting for the slowest rank": "--gray",
    "exposed communication": "--orange",
    "waiting for others and for messages": "--orange",
}
TOGETHER = "computing, together"


def tell_prediction(history: History) -> Section | None:
    """The prediction of the last part, and what became of it; nothing where there was none."""
    told = look_back(history.parts[-1])
    if told is None:
        return None
    parts = list_parts(told.rows)
    chart = Chart(
        name="prediction",
        title="Milliseconds of a step, by what they went to",
        says=told.sentence,
        traces=[_draw_part(row) for row in parts if row.predicted > 0 or row.measured],
        layout={
            "barmode": "stack",
            "xaxis": {"title": {"text": "milliseconds"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "showgrid": False},
        },
        height=240,
        wide=True,
    )
    notes = [told.beside] if told.beside else []
    if told.assumptions:
        notes.append(f"Assumed: {'; '.join(told.assumptions)}.")
    rows = _tell_rows(told.rows)
    body = build_table(rows if told.is_compared else _leave_out(rows, [2, 3]), name="prediction-table", is_whole=True)
    body += "".join(f"<p>{tell(note)}</p>" for note in notes)
    return Section(
        "prediction",
        "Predicted against measured",
        lead="" if told.is_compared else told.sentence,
        charts=[chart] if told.is_compared else [],
        body=body,
        short="Prediction",
    )


def list_parts(rows: Sequence[Row]) -> list[Row]:
    """The rows that a step is made of, each once: its passes where both sides tell them, or else computing as one."""
    known = {row.name for row in rows if row.measured is not None}
    left_out = {TOGETHER} if known >= set(PASSES) and {row.name for row in rows} >= set(PASSES) else set(PASSES)
    return [row for row in rows if row.name in COLORS and row.name not in left_out]


def _draw_part(row: Row) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": row.name,
        "x": [round(row.predicted * 1e3, 4), round((row.measured or 0.0) * 1e3, 4)],
        "y": ["predicted", "measured"],
        "marker": {"color": COLORS[row.name], "line": {"color": "--paper", "width": 1}},
        "hovertemplate": f"%{{x:,.2f}} ms<extra>{row.name}</extra>",
    }


def _tell_rows(rows: Sequence[Row]) -> Numbers:
    heads = ["", "predicted", "measured", "factor", "the prediction is from"]
    return Numbers(
        heads,
        [
            [
                f"{row.name}, {row.unit}" if row.unit == "images/s" else row.name,
                _tell(row, row.predicted),
                "–" if row.measured is None else _tell(row, row.measured),
                "–" if row.ratio is None else f"{row.ratio:.2f}",
                row.source,
            ]
            for row in rows
        ],
        caption="A step, and what follows from it",
    )


def _leave_out(numbers: Numbers, columns: Sequence[int]) -> Numbers:
    """The table without what is not known of any row."""
    heads, *rows = [
        [cell for place, cell in enumerate(row) if place not in columns] for row in (numbers.heads, *numbers.rows)
    ]
    return replace(numbers, heads=heads, rows=rows)


def _tell(row: Row, value: float) -> str:
    match row.unit:
        case "s":
            return f"{value:,.1f} s" if row.name.startswith("all steps") else f"{value * 1e3:,.2f} ms"
        case "share":
            return percent(value)
        case "bytes":
            return size(round(value))
    return count(value)
