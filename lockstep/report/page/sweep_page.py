"""The page of a sweep: accuracy over the first thing that varies, a line for each cell with error bars; every trial."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.recipes.sweep_file import SweepFile
from lockstep.report.compare import NONE
from lockstep.report.history import number
from lockstep.report.page.charts import Chart, Numbers, label, tell_time
from lockstep.report.page.compare_page import COLORS, DASHES
from lockstep.report.page.document import Document, Section, build_document, build_table, escape
from lockstep.report.page.log_axis import build_log_axis
from lockstep.report.sweep_rows import Place, Row, Spread, find_places, phrase_settings, show_value, tabulate

BATCH = "train.global_batch"
MANY_TIMES = 8  # from the least to the greatest value: from here on an axis is logarithmic


def build_sweep_page(name: str, sweep: SweepFile, rows: Sequence[Row], commit: str = "") -> str:
    """The whole page."""
    places = find_places(rows, sweep.measure)
    charts = [draw_places(sweep, places, "accuracy")]
    if sweep.target is not None:
        charts.append(draw_places(sweep, places, "steps_to"))
    bad = [row for row in rows if row.status in ("diverged", "failed")]
    done = sum(row.is_settled for row in rows)
    best, trials = drop_empty_columns(tabulate(sweep, places)), drop_empty_columns(list_trials(rows, sweep.target))
    sections = [
        Section("chart", "Results", charts=[chart for chart in charts if chart]),
        Section("table", "Best of each cell", body=build_table(best, name="places", is_whole=True)),
        Section("trials", "Every trial", body=build_table(trials, name="trials-table", is_whole=True)),
    ]
    facts = f"{done} of {len(rows)} trials, {len(bad)} of them diverged or failed. Recipe {sweep.recipe}."
    facts += f" Commit {commit}." if commit else ""
    note = f"<p>{escape(sweep.description)}</p>" if sweep.description else ""
    header = f'<p class="kind">Lockstep · sweep</p><h1>{escape(name)}</h1>{note}<p>{escape(facts)}</p>'
    return build_document(Document(title=f"{name} – Lockstep", header=header, sections=sections))


def drop_empty_columns(numbers: Numbers) -> Numbers:
    """A table without the columns that say nothing in any row."""
    kept = [place for place in range(len(numbers.heads)) if any(row[place] != NONE for row in numbers.rows)]
    rows = [[row[place] for place in kept] for row in numbers.rows]
    return replace(numbers, heads=[numbers.heads[place] for place in kept], rows=rows) if rows else numbers


def draw_places(sweep: SweepFile, places: Sequence[Place], what: str) -> Chart | None:
    """One quantity over the batch, or over whatever the grid's first key is; a line for each cell and other point."""
    key = BATCH if BATCH in sweep.grid else next(iter(sweep.grid), "")
    groups: dict[str, list[tuple[Any, Spread]]] = {}
    for place in places:
        point = dict(place.point)
        x = point.pop(key, place.cell)
        others = [f"{name.rpartition('.')[2]} {show_value(value)}" for name, value in point.items()]
        spread = place.accuracy if what == "accuracy" else place.steps_to
        found = groups.setdefault(", ".join([place.cell, *others] if key else others), [])
        found += [(x, spread)] if spread.mean is not None else []
    colored = list(groups)  # a line has the same colour in every chart
    groups = {name: found for name, found in groups.items() if found}
    if not groups:
        return None
    is_share = what == "accuracy"
    goal = 100 * (sweep.target or 0)
    title = "Top-1 on the validation set" if is_share else f"Steps to {goal:g} %"
    traces = [_draw(colored.index(name), name, found, is_share) for name, found in groups.items()]
    says = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{show_value(x)} → {spread.phrase(100 if is_share else 1, 2 if is_share else 0)}" for x, spread in found
        )
        for name, found in groups.items()
    )
    values = [value for found in groups.values() for x, _ in found if (value := number(x)) is not None]
    xaxis: dict[str, Any] = {"title": {"text": label(key.rpartition(".")[2] or "cell")}}
    if len(values) == sum(map(len, groups.values())):
        ticks = sorted(set(values))
        xaxis |= {"tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}
        xaxis |= {"type": "log"} if ticks[0] > 0 and ticks[-1] >= MANY_TIMES * ticks[0] else {}
    else:
        xaxis |= {"type": "category"}
    has_spread = any(spread.deviation is not None for found in groups.values() for _, spread in found)
    means = [spread.mean for found in groups.values() for _, spread in found if spread.mean]
    ends = [
        spread.mean + side * (spread.deviation or 0.0)
        for found in groups.values()
        for _, spread in found
        for side in (-1, 1)
        if spread.mean is not None
    ]
    is_wide = not is_share and bool(means) and max(means) >= MANY_TIMES * min(means)
    yaxis: dict[str, Any] = {"tickformat": ".4~%"} if is_share else build_log_axis(ends) if is_wide else {}
    return Chart(
        name=what.replace("_", "-"),
        title=title,
        says=f"{'In percent: ' if is_share else ''}{says}.",
        traces=traces,
        layout={"xaxis": xaxis, "yaxis": yaxis},
        height=420,
        wide=True,
        note="Points are means over seeds, bars one standard deviation each way."
        if has_spread
        else "Each point is a single seed: how far seeds lie apart is not known.",
    )


def _draw(place: int, name: str, found: Sequence[tuple[Any, Spread]], is_share: bool) -> dict[str, Any]:
    color, dash = COLORS[place % len(COLORS)], DASHES[place // len(COLORS) % len(DASHES)]
    shown = label(name)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(found) > 1 else "markers",
        "name": shown or "all",
        "x": [x if number(x) is not None else label(x) for x, _ in found],
        "y": [spread.mean for _, spread in found],
        "error_y": {"type": "data", "array": [spread.deviation or 0.0 for _, spread in found], "color": color},
        "line": {"color": color, "width": 2, "dash": dash},
        "marker": {"color": color, "size": 7},
        "hovertemplate": f"%{{x}}: {'%{y:.2%}' if is_share else '%{y:,.0f}'}<extra>{shown}</extra>",
    }


def list_trials(rows: Sequence[Row], target: float | None) -> Numbers:
    """What every trial gave."""
    goal = f"{100 * (target or 0):g} %"
    heads = [
        "trial",
        "settings",
        "seed",
        "status",
        "top-1, %",
        "of the average, %",
        "best, %",
        f"steps to {goal}",
        f"seconds to {goal}",
    ]
    heads += ["images/s", "time"]
    told = []
    # Of a trial without an average that is the accuracy of its weights, which stands in the column before.
    has_average = any(row.average_top1 != row.top1 for row in rows)
    for row in rows:
        trial = row.trial
        point = [f"{key.rpartition('.')[2]} {show_value(value)}" for key, value in trial.point]
        numbers = [
            NONE if value is None else f"{factor * value:,.{digits}f}"
            for value, factor, digits in (
                (row.top1, 100, 2),
                (row.average_top1 if has_average else None, 100, 2),
                (row.best_top1, 100, 2),
                (row.steps_to, 1, 0),
                (row.seconds_to, 1, 1),
                (row.images_per_second, 1, 0),
            )
        ]
        told.append(
            [
                ", ".join([trial.cell, *point, f"trial {trial.number}"]),
                phrase_settings(trial),
                f"{trial.seed}{' (confirms)' if trial.is_confirming else ''}",
                f"{row.status}: {row.reason}" if row.reason else row.status,
                *numbers,
                NONE if row.wall_s is None else tell_time(row.wall_s),
            ]
        )
    return Numbers(heads, told)
