"""The step benchmark's rows, for people: a table in the terminal, a chart on a page of its own. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lockstep.bench.page import write_page
from lockstep.bench.results import Rows, describe_ms
from lockstep.report.page.charts import Chart, Numbers, label


def build_tables(rows: Rows) -> list[Table]:
    """A table for each case with a line for each side."""
    cases = dict.fromkeys((row["case"], row["ranks"]) for row in rows)
    return [_build_table([row for row in rows if (row["case"], row["ranks"]) == case]) for case in cases]


def _build_table(rows: Rows) -> Table:
    table = Table(
        title=_describe_case(rows[0]["case"], rows[0]["ranks"]),
        title_style="bold",
        title_justify="left",
        caption=f"Median of {rows[0]['rounds']} rounds ± distance of the quartiles; images/s of all ranks together;\n"
        "× Lockstep's time, round by round.",
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("side", no_wrap=True)
    table.add_column("ms a step", justify="right", no_wrap=True)
    table.add_column("images/s", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("setting")
    for row in rows:
        ratio = row["ratio"]
        style = "green" if ratio > 1.03 else "red" if ratio < 0.97 else "default"
        table.add_row(
            f"[cyan]{row['side']}",
            f"{describe_ms(row['median_s'])} ±{row['spread_s'] / row['median_s']:.0%}",
            f"{row['images_per_second']:,.0f}",
            "" if row["side"] == "lockstep" else f"[{style}]{ratio:.2f}×[/] ±{row['ratio_spread']:.2f}",
            row["setting"],
        )
    return table


def write_chart(file: Path, rows: Rows) -> None:
    """A page with a bar for each side of each case, and how many times Lockstep's time it is."""
    cases = dict.fromkeys((row["case"], row["ranks"]) for row in rows)
    charts = [
        _draw_case(place, [row for row in rows if (row["case"], row["ranks"]) == case])
        for place, case in enumerate(cases)
    ]
    about = f"A whole training step, {rows[0]['precision']}. Medians of {rows[0]['rounds']} turns of each side."
    write_page(file, "A step beside its peers", about, charts, _tell_rows(rows))


def _draw_case(place: int, rows: Rows) -> Chart:
    sides = [row["side"] for row in rows]
    times = [f"{row['side']} {describe_ms(row['median_s'])} ms{_tell_ratio(row)}" for row in rows]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [1e3 * row["median_s"] for row in rows],
        "y": list(range(len(rows))),
        "error_x": {
            "type": "data",
            "array": [1e3 * row["spread_s"] / 2 for row in rows],
            "color": "--ink",
            "thickness": 1.2,
            "width": 3,
        },
        "text": ["" if row["side"] == "lockstep" else f"{row['ratio']:.2f} ×" for row in rows],
        "textposition": "inside",
        "insidetextanchor": "start",
        "textfont": {"color": "--on-color", "size": 12},
        "customdata": [label(row["setting"]) for row in rows],
        "hovertemplate": "%{x:,.1f} ms<br>%{customdata}<extra></extra>",
        "marker": {"color": ["--blue" if side.startswith("lockstep") else "--gray" for side in sides]},
    }
    return Chart(
        name=f"case-{place}",
        title=f"Milliseconds a step: {_describe_case(rows[0]['case'], rows[0]['ranks'])}",
        says=f"{'; '.join(times)}.",
        traces=[bars],
        layout={
            "xaxis": {"title": {"text": "milliseconds"}, "rangemode": "tozero"},
            "yaxis": {
                "autorange": "reversed",
                "tickvals": list(range(len(rows))),
                "ticktext": [label(side) for side in sides],
                "showgrid": False,
            },
        },
        height=110 + 44 * len(rows),
        wide=True,
        note="Thin lines are as long as the quartiles are apart; × is how many times Lockstep's time, round by round.",
    )


def _tell_ratio(row: Mapping[str, Any]) -> str:
    return "" if row["side"] == "lockstep" else f" ({row['ratio']:.2f} ×)"


def _tell_rows(rows: Rows) -> Numbers:
    heads = ["case", "side", "ms a step", "quartiles apart, ms", "images/s", "× Lockstep's time", "setting"]
    told = [
        [
            _describe_case(row["case"], row["ranks"]),
            row["side"],
            describe_ms(row["median_s"]),
            describe_ms(row["spread_s"]),
            f"{row['images_per_second']:,.0f}",
            f"{row['ratio']:.2f} ± {row['ratio_spread']:.2f}",
            row["setting"],
        ]
        for row in rows
    ]
    return Numbers(heads, told)


def _describe_case(case: str, ranks: int) -> str:
    return f"{case}, {ranks} rank{'s' if ranks > 1 else ''}"
