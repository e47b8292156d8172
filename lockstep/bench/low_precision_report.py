"""The low-precision benchmark's curves, for people: a table in the terminal, a chart on a page. Torch-free."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lockstep.bench.page import write_page
from lockstep.bench.results import Rows
from lockstep.report.history import number
from lockstep.report.page.charts import Chart, Numbers, label
from lockstep.report.page.log_axis import build_log_axis

GOAL = 1e-6  # of the gradient's norm
NEVER = "never"
COLORS = {
    "SGD": "--green",
    "LP-SGD": "--red",
    "LP-SVRG": "--purple",
    "SVRG": "--gray",
    "HALP, 8": "--blue",
    "HALP, 16": "--orange",
}
HEADS = ["run", "arithmetic", "lr", "start", "end", "least", "passes", f"to {GOAL:g}", "factor", "s"]
CAPTION = (
    "A pass is one gradient of every sample: an epoch of SGD takes 1, an anchor and an epoch of SVRG or HALP 3. "
    "Factor: of the norm, over the last 3 passes above 1e-12."
)


def build_table(rows: Rows) -> Table:
    """A line for each run: where it ended, and whether it was still on its way."""
    table = Table(
        title="Norm of the full gradient",
        title_style="bold",
        caption=CAPTION,
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for head in HEADS:
        is_words = head in ("run", "arithmetic")  # which wrap where there is no room; numbers would be cut off
        table.add_column(head, justify="left" if is_words else "right", no_wrap=not is_words)
    for row in rows:
        table.add_row(*_tell_row(row))
    return table


def _tell_row(row: Mapping[str, Any]) -> list[str]:
    norms = row["norms"]
    return [
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
    ]


def describe_goal(row: Mapping[str, Any]) -> str:
    """After how many passes the norm is below the goal for good."""
    above = [index for index, norm in enumerate(row["norms"]) if not norm <= GOAL]
    first = above[-1] + 1 if above else 0
    return f"{row['passes'][first]:g}" if first < len(row["norms"]) else NEVER


def find_factor(row: Mapping[str, Any]) -> float:
    """What three passes make of the norm, at the end or where FP64 ends: 1 is a floor."""
    width = max(1, round(3 / (row["passes"][1] - row["passes"][0])))
    norms = row["norms"]
    last = next((index for index in range(len(norms) - 1, width, -1) if norms[index] > 1e-12), len(norms) - 1)
    # Over a few such stretches, as a floor is noise.
    stretches = min(4, last // width)
    return math.pow(norms[last] / norms[last - stretches * width], 1 / stretches)


def write_chart(file: Path, rows: Rows, problem: str) -> None:
    """A page with the norms over passes, logarithmic."""
    known = [norm for row in rows for norm in row["norms"] if number(norm)]
    goal = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": GOAL, "y1": GOAL}
    chart = Chart(
        name="norms",
        title="Norm of the full gradient, by passes over the data",
        says=_tell_goals(rows),
        traces=[_draw(row) for row in rows],
        layout={
            "xaxis": {"title": {"text": "passes over the data"}},
            "yaxis": build_log_axis([*known, GOAL]),
            "shapes": [{**goal, "line": {"color": "--ink", "width": 1, "dash": "dot"}}],
        },
        height=480,
        wide=True,
        note=f"Thick, with points: Lockstep's own steps in FP32. Dashed: 16 bits. Dotted: {GOAL:g}. {CAPTION}",
    )
    write_page(file, "HALP beside low-precision SGD", f"{problem}.", [chart], Numbers(HEADS, [*map(_tell_row, rows)]))


def _draw(row: Mapping[str, Any]) -> dict[str, Any]:
    color = next(color for start, color in COLORS.items() if row["name"].startswith(start))
    is_ours = "Lockstep" in row["arithmetic"]
    return {
        "type": "scatter",
        "mode": "lines+markers" if is_ours else "lines",
        "name": label(_name(row)),
        "x": row["passes"],
        "y": row["norms"],
        "line": {"color": color, "width": 3 if is_ours else 2, "dash": "dash" if "16" in row["name"] else "solid"},
        "marker": {"color": color, "size": 7},
        "hovertemplate": "%{y:.1e} after %{x} passes",
    }


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['name'].replace(', ', ' with ')} ({row['arithmetic']})"


def _tell_goals(rows: Rows) -> str:
    """Which runs get below the goal, and when."""
    told: dict[str, list[str]] = {}
    for row in rows:
        told.setdefault(describe_goal(row), []).append(_name(row))
    never = told.pop(NEVER, [])
    times = [f"after {passes} passes {', '.join(told[passes])}" for passes in sorted(told, key=float)]
    times += [f"never {', '.join(never)}"] if never else []
    return f"Below {GOAL:g} for good: {'; '.join(times)}."
