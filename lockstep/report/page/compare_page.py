"""The page of runs beside each other: what came out, curves over each other, and settings that differ."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.report.compare_runs import Run, compare_results, compare_settings, list_status, split_changes
from lockstep.report.history import Spot, number
from lockstep.report.page.charts import Chart, draw_curve, label
from lockstep.report.page.document import Document, Section, build_document, build_table, escape
from lockstep.report.phrases import count, percent

COLORS = ("--blue", "--orange", "--green", "--purple", "--red", "--gray")
DASHES = ("solid", "dash", "dot")


def build_run_comparison(runs: Sequence[Run]) -> str:
    """The page of several runs."""
    charts = _draw_curves(runs)
    settings = compare_settings(runs)
    results, *changes = split_changes(compare_results(runs), len(runs))
    tables = build_table(results, name="results-table", is_whole=True)
    tables += "".join(build_table(table, name="changes-table", is_whole=True) for table in changes)
    sections = [
        Section("results", "Results", body=tables),
        *([Section("curves", "Curves", charts=charts, switch=True)] if charts else []),
        Section("settings", "Settings that differ", body=build_table(settings, is_whole=True))
        if settings
        else Section("settings", "Settings", lead="All settings are the same."),
    ]
    # Beside the names, because a word in the table would align its columns of numbers like text.
    names = [f"{run.name} ({status})" for run, status in zip(runs, list_status(runs), strict=True)]
    header = build_header("runs", names)
    return build_document(Document(title="Comparison – Lockstep", header=header, sections=sections))


def _draw_curves(runs: Sequence[Run]) -> list[Chart]:
    """What the runs have of each curve, over each other."""
    from_zero = {"rangemode": "tozero"}
    of_evaluations: dict[str, Any] = {"mode": "lines+markers"}
    of_shares = of_evaluations | {"template": "%{y:.2%}"}
    charts = [
        _draw_over(runs, "loss", "Training loss", _choose_steps("loss"), _show_short, from_zero),
        _draw_over(
            runs,
            "validation-loss",
            "Loss on the validation set",
            _choose_evaluations("loss"),
            _show_short,
            from_zero,
            **of_evaluations,
        ),
        _draw_over(
            runs,
            "accuracy",
            "Top-1 on the validation set",
            _choose_evaluations("top1"),
            percent,
            {"tickformat": ".4~%"},
            **of_shares,
        ),
        _draw_over(
            runs,
            "throughput",
            "Throughput, images/s",
            _choose_steps("images_per_second"),
            count,
            from_zero,
            which=("The medians", statistics.median),
        ),
        _draw_over(
            runs, "lr", "Learning rate", _choose_steps("lr"), _show_short, from_zero, which=("The highest", max)
        ),
    ]
    return [chart for chart in charts if chart]


def _show_short(value: float) -> str:
    return f"{value:.3g}"


def _choose_steps(name: str) -> Callable[[Run], list[tuple[Spot, float]]]:
    return lambda run: _points(run.history.steps, name)


def _choose_evaluations(name: str) -> Callable[[Run], list[tuple[Spot, float]]]:
    return lambda run: _points(run.history.evaluations, name)


def _points(told: Sequence[tuple[Spot, Any]], name: str) -> list[tuple[Spot, float]]:
    return [(spot, value) for spot, event in told if (value := number(getattr(event, name))) is not None]


def _draw_over(
    runs: Sequence[Run],
    name: str,
    title: str,
    choose: Callable[[Run], list[tuple[Spot, float]]],
    show: Callable[[float], str],
    yaxis: dict[str, Any],
    which: tuple[str, Callable[[list[float]], float]] = ("At the end", lambda values: values[-1]),
    **more: Any,
) -> Chart | None:
    """Curves with the number of each that says most of it."""
    traces, told = [], []
    for place, run in enumerate(runs):
        points = choose(run)
        if points:
            color, dash = COLORS[place % len(COLORS)], DASHES[place // len(COLORS) % len(DASHES)]
            spots, values = [spot for spot, _ in points], [value for _, value in points]
            traces.append(draw_curve(label(run.name), spots, values, color, dash=dash, **more))
            told.append(f"{run.name} {show(which[1](values))}")
    if not traces:
        return None
    return Chart(name=name, title=title, says=f"{which[0]}: {'; '.join(told)}.", traces=traces, layout={"yaxis": yaxis})


def build_header(what: str, names: Sequence[str]) -> str:
    """The head of any comparison's page."""
    items = "".join(f"<li>{escape(name)}</li>" for name in names)
    return f'<p class="kind">Lockstep · comparison</p><h1>{len(names)} {what} beside each other</h1><ol>{items}</ol>'
