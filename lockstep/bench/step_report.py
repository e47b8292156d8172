"""The step benchmark's rows, for people: a table in the terminal, a chart on a page of its own. Torch-free."""

import importlib
from pathlib import Path

from rich.table import Table

from lockstep.bench.results import Rows, describe_ms

COLORS = {
    "ddp default": "#9aa0a6",
    "ddp tuned": "#1f77b4",
    "ddp tuned compiled": "#0b3d66",
    "bare loop": "#1f77b4",
    "lockstep": "#d62728",
    "lockstep, launched": "#f4a6a6",
    "lockstep, sent after": "#e57373",
}


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
    """One page that needs nothing else: a bar for each side of each case, how many times Lockstep's on top."""
    figure = importlib.import_module("plotly.graph_objects").Figure()
    for side in dict.fromkeys(row["side"] for row in rows):
        mine = [row for row in rows if row["side"] == side]
        figure.add_bar(
            x=[_describe_case(row["case"], row["ranks"]) for row in mine],
            y=[row["median_s"] for row in mine],
            error_y={"array": [row["spread_s"] / 2 for row in mine], "visible": True, "thickness": 1},
            text=["" if side == "lockstep" else f"{row['ratio']:.2f}×" for row in mine],
            textposition="inside",
            insidetextanchor="middle",
            hovertext=[row["setting"] for row in mine],
            name=side,
            marker_color=COLORS[side],
        )
    figure.update_layout(
        title="A whole training step; × how many times Lockstep's time",
        yaxis={"title": "seconds a step", "exponentformat": "SI", "rangemode": "tozero"},
        barmode="group",
        bargap=0.35,
        template="plotly_white",
        font={"size": 14},
    )
    figure.write_html(file, include_plotlyjs=True, full_html=True)


def _describe_case(case: str, ranks: int) -> str:
    return f"{case}, {ranks} rank{'s' if ranks > 1 else ''}"
