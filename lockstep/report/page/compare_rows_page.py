"""The page of benchmarks, or sweeps, beside each other: bars side by side, and everything that was measured."""

import re
import statistics
from collections.abc import Sequence
from typing import Any

from lockstep.report.compare_rows import (
    Compared,
    RowFile,
    compare_facts,
    compare_rows,
    describe_quantities,
    tabulate_rows,
)
from lockstep.report.page.charts import Chart, label
from lockstep.report.page.compare_page import COLORS, build_header
from lockstep.report.page.document import Document, Section, build_document, build_table
from lockstep.report.page.row_labels import list_shared, name_rows
from lockstep.report.quantities import SHARES, Quantity

# What people look for first; every quantity is in the table.
DRAWN = (*SHARES, "steps to", "median_s", "step_s", "seconds", "images_per_second", "ratio", "share", "wall_s")
MOST_CHARTS = 3
MOST_BARS = 40
LINE_PX = 16  # of a row's name


def build_row_comparison(files: Sequence[RowFile]) -> str:
    """The page of several files of one benchmark, or of several sweeps."""
    table, rows, facts = tabulate_rows(files), compare_rows(files), compare_facts(files)
    quantities = describe_quantities(rows)
    keys = sorted((key for key in quantities if _rank(key) < len(DRAWN)), key=_rank)[:MOST_CHARTS]
    charts = [_draw_bars(files, quantities[key], [row for row in rows if row.key == key]) for key in keys]
    sections = [
        *([Section("charts", "Side by side", charts=charts)] if charts else []),
        *([Section("settings", "Settings that differ", body=build_table(facts, is_whole=True))] if facts else []),
        Section("rows", "Everything measured", body=build_table(table, name="rows-table", is_whole=True)),
    ]
    header = build_header(f"{files[0].kind}s", [file.name for file in files])
    footer = "Made by Lockstep from the files named above. Nothing in this page was fetched, and nothing leaves it."
    return build_document(Document(title="Comparison – Lockstep", header=header, sections=sections, footer=footer))


def _rank(key: str) -> int:
    """The place of a quantity among those to draw; a sweep's target stands behind its words."""
    return next((place for place, one in enumerate(DRAWN) if key == one or key.startswith(f"{one} ")), len(DRAWN))


def _draw_bars(files: Sequence[RowFile], quantity: Quantity, found: Sequence[Compared]) -> Chart:
    rows = found[:MOST_BARS]
    labels = name_rows([row.identity for row in rows])
    lines = max(one.count("<br>") + 1 for one in labels)
    places = list(range(len(rows)))
    shared = ", ".join(list_shared([row.identity for row in rows]))
    yaxis = {"autorange": "reversed", "tickvals": places, "ticktext": labels, "showgrid": False}
    return Chart(
        name=re.sub(r"[^a-z0-9]+", "-", f"bars-{rows[0].key}".lower()).strip("-"),  # part of the page, never escaped
        title=quantity.title,
        says=_tell(len(files), quantity, rows, len(found)),
        traces=[_draw_file(place, file, quantity, rows) for place, file in enumerate(files)],
        layout={"barmode": "group", "yaxis": yaxis, "xaxis": {"rangemode": "tozero"}},
        height=110 + len(rows) * max(22 + 14 * len(files), 10 + LINE_PX * lines),
        wide=True,
        note=f"In all rows: {shared}." if shared else "",
    )


def _draw_file(place: int, file: RowFile, quantity: Quantity, rows: Sequence[Compared]) -> dict[str, Any]:
    """One file's bars, with its spreads where it has some."""
    color = COLORS[place % len(COLORS)]
    values = [row.values[place] for row in rows]
    spreads = [quantity.factor * ((value and value.deviation) or 0.0) for value in values]
    error = {"type": "data", "array": spreads, "color": "--ink", "thickness": 1.2, "width": 3}
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(file.name),
        "x": [None if value is None else quantity.factor * value.value for value in values],
        "y": list(range(len(rows))),
        "marker": {"color": color},
        "customdata": name_rows([row.identity for row in rows], width=50),
        "hovertemplate": "%{customdata}<br>%{x:.4g}<extra>" + label(file.name) + "</extra>",
        **({"error_x": error} if any(spreads) else {}),
    }


def _tell(num_files: int, quantity: Quantity, rows: Sequence[Compared], num_found: int) -> str:
    """The chart in a sentence."""
    which = f"{len(rows)} rows" if len(rows) == num_found else f"The first {len(rows)} of {num_found} rows"
    pairs = [(row.numbers[0], row.numbers[-1]) for row in rows]
    known = [(first, last) for first, last in pairs if last is not None and first is not None]
    middle = ""
    if quantity.is_share and known:
        points = 100 * statistics.median_low(last - first for first, last in known)
        middle = f"; in the middle of all rows the last is {points:+.2f} points from the first"
    elif ratios := [last / first for first, last in known if first]:
        middle = f"; in the middle of all rows the last is {statistics.median_low(ratios):.3f} times the first"
    spread = any(value and value.deviation for row in rows for value in row.values)
    bars = " Thin lines are one standard deviation each way." if spread else ""
    return f"{which} of {num_files} files{middle}.{bars}"
