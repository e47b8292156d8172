"""The all-reduce benchmark's rows, for people: a table in the terminal, a chart on a page of its own. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lockstep.bench.page import write_page
from lockstep.bench.results import Rows, describe_ms
from lockstep.report.page.charts import Chart, Numbers, label
from lockstep.report.page.log_axis import build_log_axis
from lockstep.report.phrases import describe_ranks

COLORS = ("--gray", "--blue", "--green", "--purple", "--orange", "--red")


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
    """A page with milliseconds over bytes, both logarithmic, the model's curves dotted."""
    sizes = sorted({row["bytes"] for row in rows})
    # By the points alone: where a spread is twice a median, a bar down to nothing has no end on a logarithmic axis.
    points = [1e3 * seconds for row in rows for seconds in (row["median_s"], row["predicted_s"]) if seconds]
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    largest = [row for row in rows if row["bytes"] == sizes[-1]]
    times = [f"{row['algorithm']} {describe_ms(row['median_s'])} ms" for row in largest]
    chart = Chart(
        name="messages",
        title="Milliseconds of an all-reduce, by size of the message",
        says=f"Of {describe_bytes(sizes[-1])}: {'; '.join(times)}.",
        traces=[
            trace
            for place, name in enumerate(algorithms)
            for trace in _draw(COLORS[place % len(COLORS)], [row for row in rows if row["algorithm"] == name])
        ],
        layout={
            "xaxis": {
                "type": "log",
                "title": {"text": "message"},
                "tickvals": sizes,
                "ticktext": [describe_bytes(size) for size in sizes],
            },
            "yaxis": build_log_axis(points),
        },
        height=480,
        wide=True,
        note="Medians of the judging rounds; thin lines: as long as the quartiles are apart; dotted: the fitted model.",
    )
    about = describe_ranks(rows[0]["topology"], "")
    write_page(file, "All-reduce by size", f"{about[:1].upper()}{about[1:]}.", [chart], _tell_rows(rows))


def _draw(color: str, rows: Rows) -> list[dict[str, Any]]:
    """An algorithm's measured curve, and the model's."""
    mine = sorted(rows, key=lambda row: int(row["bytes"]))
    common: dict[str, Any] = {"type": "scatter", "x": [row["bytes"] for row in mine]}
    name, width = mine[0]["algorithm"], 3 if mine[0]["algorithm"] == "hybrid" else 2
    spreads = [1e3 * row["spread_s"] / 2 for row in mine]
    measured = {
        **common,
        "mode": "lines+markers",
        "name": label(name),
        "y": [1e3 * row["median_s"] for row in mine],
        "error_y": {"type": "data", "array": spreads, "color": color, "thickness": 1},
        "text": [label(row["choice"]) for row in mine],
        "line": {"color": color, "width": width},
        "marker": {"color": color, "size": 7},
    }
    if any(row["predicted_s"] is None for row in mine):
        return [measured]
    predicted = [1e3 * row["predicted_s"] for row in mine]
    line = {"color": color, "width": 1, "dash": "dot"}
    model = {"mode": "lines", "name": f"{label(name)}, model", "y": predicted, "showlegend": False, "line": line}
    return [measured, {**common, **model}]


def _tell_rows(rows: Rows) -> Numbers:
    heads = ["message", "algorithm", "milliseconds", "quartiles apart, ms", "model, ms", "choice"]
    told = [
        [
            describe_bytes(row["bytes"]),
            row["algorithm"],
            describe_ms(row["median_s"]),
            describe_ms(row["spread_s"]),
            "–" if row["predicted_s"] is None else describe_ms(row["predicted_s"]),
            row["choice"],
        ]
        for row in rows
    ]
    return Numbers(heads, told)
