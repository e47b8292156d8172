"""The page of a comparison: curves over each other, and what differs; or benchmarks as bars side by side."""

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.report.compare import Benchmark, Run, compare_results, compare_rows, compare_settings, tabulate_rows
from lockstep.report.history import Spot, number
from lockstep.report.page.charts import Chart, draw_curve, label
from lockstep.report.page.document import Document, Section, build_document, build_table, escape
from lockstep.report.phrases import percent

COLORS = ("--blue", "--orange", "--green", "--purple", "--red", "--gray")
DASHES = ("solid", "dash", "dot")
# Charts of a benchmark: what people look for first; every quantity is in the table.
DRAWN = ("median_s", "step_s", "seconds", "images_per_second", "ratio", "share")
MOST_BARS = 40


def build_run_comparison(runs: Sequence[Run]) -> str:
    """The page of several runs."""
    charts = [
        _draw_over(
            runs,
            "loss",
            "Training loss",
            lambda run: _points(run.history.steps, lambda event: event.loss),
            lambda value: f"{value:.3g}",
            {"rangemode": "tozero"},
        ),
        _draw_over(
            runs,
            "accuracy",
            "Top-1 on the validation set",
            lambda run: _points(run.history.evaluations, lambda event: event.top1),
            percent,
            {"tickformat": ".0%"},
            mode="lines+markers",
            template="%{y:.2%}",
        ),
        _draw_over(
            runs,
            "throughput",
            "Throughput, images/s",
            lambda run: _points(run.history.steps, lambda event: event.images_per_second),
            lambda value: f"{value:,.0f}",
            {"rangemode": "tozero"},
        ),
        _draw_over(
            runs,
            "lr",
            "Learning rate",
            lambda run: _points(run.history.steps, lambda event: event.lr),
            lambda value: f"{value:.3g}",
            {"rangemode": "tozero"},
        ),
    ]
    drawn = [chart for chart in charts if chart]
    settings = compare_settings(runs)
    sections = [
        Section("results", "Results", body=build_table(compare_results(runs), name="results-table", is_whole=True)),
        *([Section("curves", "Curves", charts=drawn, switch=True)] if drawn else []),
        Section("settings", "Settings that differ", body=build_table(settings))
        if settings
        else Section("settings", "Settings", lead="All settings are the same."),
    ]
    return build_document(
        Document(
            title="Comparison – Lockstep", header=_build_header("runs", [run.name for run in runs]), sections=sections
        )
    )


def _points(told: Sequence[tuple[Spot, Any]], choose: Callable[[Any], object]) -> list[tuple[Spot, float]]:
    return [(spot, value) for spot, event in told if (value := number(choose(event))) is not None]


def _draw_over(
    runs: Sequence[Run],
    name: str,
    title: str,
    choose: Callable[[Run], list[tuple[Spot, float]]],
    show: Callable[[float], str],
    yaxis: dict[str, Any],
    **more: Any,
) -> Chart | None:
    traces, ends = [], []
    for place, run in enumerate(runs):
        points = choose(run)
        if points:
            color, dash = COLORS[place % len(COLORS)], DASHES[place // len(COLORS) % len(DASHES)]
            spots, values = [spot for spot, _ in points], [value for _, value in points]
            traces.append(draw_curve(label(run.name), spots, values, color, dash=dash, **more))
            ends.append(f"{run.name} {show(values[-1])}")
    if not traces:
        return None
    return Chart(name=name, title=title, says=f"At the end: {'; '.join(ends)}.", traces=traces, layout={"yaxis": yaxis})


def build_bench_comparison(benchmarks: Sequence[Benchmark]) -> str:
    """The page of several files of one benchmark."""
    table = tabulate_rows(benchmarks)
    rows = compare_rows(benchmarks)
    quantities = [quantity for quantity in DRAWN if any(row[1] == quantity for row in rows)][:3]
    charts = [
        _draw_bars(benchmarks, quantity, [(row[0], row[2]) for row in rows if row[1] == quantity][:MOST_BARS])
        for quantity in quantities
    ]
    sections = [
        *([Section("charts", "Side by side", charts=charts)] if charts else []),
        Section("rows", "Everything measured", body=build_table(table, name="rows-table")),
    ]
    names = [benchmark.name for benchmark in benchmarks]
    return build_document(
        Document(title="Comparison – Lockstep", header=_build_header("benchmarks", names), sections=sections)
    )


def _draw_bars(benchmarks: Sequence[Benchmark], quantity: str, rows: Sequence[tuple[str, list[float | None]]]) -> Chart:
    places = list(range(len(rows)))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(benchmark.name),
            "x": [values[place] for _, values in rows],
            "y": places,
            "marker": {"color": COLORS[place % len(COLORS)]},
            "customdata": [label(name) for name, _ in rows],
            "hovertemplate": "%{customdata}: %{x:.4g}<extra>" + label(benchmark.name) + "</extra>",
        }
        for place, benchmark in enumerate(benchmarks)
    ]
    ratios = sorted(values[-1] / values[0] for _, values in rows if values[0] and values[-1] is not None)
    middle = f"; the last is {ratios[len(ratios) // 2]:.3f} times the first in the middle of all rows" if ratios else ""
    return Chart(
        name=f"bars-{quantity.replace('_', '-')}",
        title=quantity,
        says=f"{len(rows)} rows of {len(benchmarks)} files{middle}.",
        traces=traces,
        layout={
            "barmode": "group",
            "yaxis": {
                "autorange": "reversed",
                "tickvals": places,
                "ticktext": [_wrap(name) for name, _ in rows],
                "showgrid": False,
            },
            "xaxis": {"rangemode": "tozero"},
        },
        height=110 + len(rows) * (22 + 14 * len(benchmarks)),
        wide=True,
    )


def _wrap(name: str) -> str:
    """A row's name over several lines, so that bars keep most of the width."""
    lines, line = [], ""
    for part in name.split(", "):
        if line and len(line) + len(part) > 18:
            lines.append(line)
            line = ""
        line = f"{line}, {part}" if line else part
    return "<br>".join(label(one) for one in [*lines, line][:3])


def _build_header(what: str, names: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(name)}</li>" for name in names)
    return f'<p class="kind">Lockstep · comparison</p><h1>{len(names)} {what} beside each other</h1><ol>{items}</ol>'
