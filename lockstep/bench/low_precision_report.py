"""The low-precision benchmark's curves, for people: a table in the terminal, a chart on a page. Torch-free."""

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lockstep.bench.results import Rows

GOAL = 1e-6  # of the gradient's norm
COLORS = {
    "SGD": "#55a868",
    "LP-SGD": "#b9bec7",
    "LP-SVRG": "#8b93a0",
    "SVRG": "#444444",
    "HALP, 8": "#2563a8",
    "HALP, 16": "#c45f14",
}


def build_table(rows: Rows) -> Table:
    """A line for each run: where it ended, and whether it was still on its way."""
    table = Table(
        title="Norm of the full gradient",
        title_style="bold",
        caption="A pass is one gradient of every sample: an epoch of SGD takes 1, an anchor and an\n"
        "epoch of SVRG or HALP 3. Factor: of the norm, over the last 3 passes above 1e-12.",
        box=None,
        pad_edge=False,
    )
    for title in ("run", "arithmetic", "lr", "start", "end", "least", "passes", f"to {GOAL:g}", "factor", "s"):
        table.add_column(title, justify="left" if title in ("run", "arithmetic") else "right", no_wrap=True)
    for row in rows:
        norms = row["norms"]
        table.add_row(
            row["name"],
            row["arithmetic"],
            f"{row['lr']:g}",
            f"{norms[0]:.1e}",
            f"{norms[-1]:.1e}",
            f"{min(norms):.1e}",
            f"{row['passes'][-1]:g}",
            describe_goal(row),
            f"{find_factor(row):.2f}",
            f"{row['seconds']:.0f}",
        )
    return table


def describe_goal(row: Mapping[str, Any]) -> str:
    """After how many passes the norm is below the goal for good."""
    above = [index for index, norm in enumerate(row["norms"]) if not norm <= GOAL]
    first = above[-1] + 1 if above else 0
    return f"{row['passes'][first]:g}" if first < len(row["norms"]) else "never"


def find_factor(row: Mapping[str, Any]) -> float:
    """What three passes make of the norm, at the end or where FP64 ends: 1 is a floor."""
    width = max(1, round(3 / (row["passes"][1] - row["passes"][0])))
    norms = row["norms"]
    last = next((index for index in range(len(norms) - 1, width, -1) if norms[index] > 1e-12), len(norms) - 1)
    # Over a few such stretches, as a floor is noise.
    stretches = min(4, last // width)
    return math.pow(norms[last] / norms[last - stretches * width], 1 / stretches)


def write_chart(file: Path, rows: Rows, title: str) -> None:
    """One page that needs nothing else: the norms over passes, logarithmic."""
    figure = importlib.import_module("plotly.graph_objects").Figure()
    for row in rows:
        color = next(color for start, color in COLORS.items() if row["name"].startswith(start))
        is_ours = "Lockstep" in row["arithmetic"]
        figure.add_scatter(
            x=row["passes"],
            y=row["norms"],
            name=f"{row['name']} ({row['arithmetic']})",
            mode="lines+markers" if is_ours else "lines",
            line={"color": color, "width": 3 if is_ours else 2, "dash": "solid" if "16" not in row["name"] else "dash"},
        )
    figure.add_hline(y=GOAL, line={"color": "#888888", "width": 1, "dash": "dot"})
    figure.update_layout(
        title=title,
        xaxis={"title": "passes over the data"},
        yaxis={"type": "log", "title": "norm of the full gradient", "exponentformat": "power"},
        template="plotly_white",
    )
    figure.write_html(file, include_plotlyjs=True, full_html=True)
