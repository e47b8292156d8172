"""The all-reduce benchmark's rows, for people: a table in the terminal, a chart on a page of its own. Torch-free."""

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lockstep.bench.results import Rows, describe_ms


def describe_bytes(num_bytes: int) -> str:
    """`4 MiB`; bytes that are no whole number of a unit stay in the smaller one."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"


def build_table(rows: Rows) -> Table:
    """A line for each size: milliseconds, how many times quicker than PyTorch's own, and how far off the model was."""
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    table = Table(
        title=f"All-reduce on {rows[0]['topology']} ranks",
        title_style="bold",
        caption="Median ms ± distance of the quartiles; × quicker than torch;\n"
        "error of the model. Choices and model are from every other\n"
        "round, times from those between.",
        box=None,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        leading=1,
    )
    table.add_column("size", justify="right", no_wrap=True)
    for algorithm in algorithms:
        table.add_column(f"[cyan]{algorithm}", justify="right", no_wrap=True)
    for size in sorted({row["bytes"] for row in rows}):
        here = {row["algorithm"]: row for row in rows if row["bytes"] == size}
        table.add_row(describe_bytes(size), *(_describe_cell(here[name], here["torch"]) for name in algorithms))
    return table


def _describe_cell(row: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    lines = [f"{describe_ms(row['median_s'])} ±{row['spread_s'] / row['median_s']:.0%}"]
    if row["algorithm"] != "torch":
        ratio = peer["median_s"] / row["median_s"]
        style = "green" if ratio > 1.03 else "red" if ratio < 0.97 else "default"
        groups = f" k={row['group_size']}" if row["group_size"] > 1 and row["algorithm"] != "hybrid" else ""
        lines.append(f"[{style}]{ratio:.2f}×[/]{groups}")
    if row["predicted_s"] is not None:
        lines.append(f"[dim]{row['predicted_s'] / row['median_s'] - 1:+.0%}[/]")
    if row["algorithm"] == "hybrid":
        lines.append(f"[bold]{row['choice']}[/]")
    return "\n".join(lines)


def write_chart(file: Path, rows: Rows) -> None:
    """One page that needs nothing else: milliseconds over bytes, both logarithmic, with the model's curves dotted."""
    figure = importlib.import_module("plotly.graph_objects").Figure()
    colors = ("#444444", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#d62728")
    for index, algorithm in enumerate(dict.fromkeys(row["algorithm"] for row in rows)):
        mine = sorted((row for row in rows if row["algorithm"] == algorithm), key=lambda row: int(row["bytes"]))
        color = colors[index % len(colors)]
        sizes = [row["bytes"] for row in mine]
        figure.add_scatter(
            x=sizes,
            y=[1e3 * row["median_s"] for row in mine],
            error_y={"array": [1e3 * row["spread_s"] / 2 for row in mine], "visible": True, "thickness": 1},
            text=[row["choice"] for row in mine],
            name=algorithm,
            legendgroup=algorithm,
            mode="lines+markers",
            line={"color": color, "width": 3 if algorithm == "hybrid" else 2},
        )
        if all(row["predicted_s"] is not None for row in mine):
            figure.add_scatter(
                x=sizes,
                y=[1e3 * row["predicted_s"] for row in mine],
                name=f"{algorithm}, model",
                legendgroup=algorithm,
                showlegend=False,
                mode="lines",
                line={"color": color, "width": 1, "dash": "dot"},
            )
    ticks = sorted({row["bytes"] for row in rows})
    # By the points alone: where a spread is twice a median, a bar down to nothing has no end on a logarithmic axis.
    points = [1e3 * seconds for row in rows for seconds in (row["median_s"], row["predicted_s"]) if seconds]
    shown = [math.log10(min(points) / 1.5), math.log10(max(points) * 1.5)]
    figure.update_layout(
        title=f"All-reduce on {rows[0]['topology']} ranks: medians of the judging rounds; "
        "bars: as long as the quartiles are apart; dotted: the fitted model",
        xaxis={
            "type": "log",
            "title": "message",
            "tickvals": ticks,
            "ticktext": [describe_bytes(size) for size in ticks],
        },
        yaxis={"type": "log", "title": "milliseconds", "dtick": "D2", "range": shown},
        template="plotly_white",
    )
    figure.write_html(file, include_plotlyjs=True, full_html=True)
