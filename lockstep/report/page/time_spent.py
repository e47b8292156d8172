"""Where the time of a run went: as a whole, and in a few steps of each rank."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.events import StartedUp, TimelineTaken
from lockstep.report.history import History, Spent, find_timelines, measure_spent, number
from lockstep.report.page.charts import Chart, Numbers, label, tell_time
from lockstep.report.page.document import Section, tell
from lockstep.report.phrases import describe_spent, describe_startup, percent, plural
from lockstep.report.verdict import judge

KINDS = {
    "compute": ("computing", "--blue"),
    "communication": ("communication and waiting for other ranks", "--orange"),
    "input": ("waiting for input", "--green"),
    "evaluation": ("evaluation", "--purple"),
    "checkpoint": ("checkpoints", "--red"),
    "startup": ("start-up", "--gray"),
    "anchors": ("full gradients", "--sky"),
    "other": ("other", "--faint"),
}
SPAN_COLORS = {
    "input": "--green",
    "forward": "--sky",
    "backward": "--blue",
    "communicate": "--orange",
    "update": "--purple",
    "other": "--faint",
}
PALE = ("--faint", "--sky")  # in both themes, so that their text is that of the page
# As the shares of the time are called; in a narrow bar there is room for a span's own name alone.
SPAN_NAMES = {"input": KINDS["input"][0], "communicate": KINDS["communication"][0]}
BESIDE_COLORS = {"input": "--green", "all-reduce": "--orange"}
BESIDE_NAMES = {"input": "batch made", "all-reduce": "buffer summed"}
MOST_RANKS, MOST_ROWS, MOST_ROWS_A_RANK = 8, 32, 10
MOST_SPANS = 4000
OWN_CLOCKS = " Ranks have no clock in common: the time of each begins with its own first step."
LEAST_SHARE = 5e-4  # of the time; less would be shown as 0.0 %


def tell_spent(history: History) -> Section | None:
    """Where the time went, part by part."""
    spent = [measure_spent(part) for part in history.parts]
    totals = {kind: sum(getattr(one, kind) for one in spent) for kind in KINDS}
    total = sum(totals.values())
    if total <= 0 or not any(one.compute for one in spent):
        return None
    shown = [kind for kind in KINDS if totals[kind] > LEAST_SHARE * total]
    verdict = judge(history.parts[-1]).sentence()
    whose = "Of the steps alone" if len(spent) == 1 else "Of the steps since the last resume"
    verdict = f"{whose}: {verdict}" if verdict else ""  # the shares above are of all the time
    sentences = describe_spent(history.ended, verdict) if history.ended else [f"{verdict}."] * bool(verdict)
    sentences += [describe_startup(event) for event in history.parts[-1] if isinstance(event, StartedUp)]
    body = "".join(f"<p>{tell(sentence)}</p>" for sentence in filter(None, sentences))
    chart = Chart(
        name="spent",
        title="Seconds by what they would go to" if history.is_predicted else "Seconds by what they went to",
        says=f"Of {tell_time(total)}: "
        + ", ".join(f"{KINDS[kind][0]} {percent(totals[kind] / total)}" for kind in shown)
        + ".",
        traces=[_draw_spent(kind, spent) for kind in shown],
        layout={
            "barmode": "stack",
            "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
            "yaxis": {
                "autorange": "reversed",
                "tickvals": list(range(len(spent))),
                "ticktext": _name_parts(history),
                "showgrid": False,
                "showticklabels": len(spent) > 1,
            },
        },
        height=150 + 44 * len(spent),
        wide=True,
        numbers=Numbers(
            ["what", "seconds", "share"],
            [[KINDS[kind][0], f"{totals[kind]:,.1f}", percent(totals[kind] / total)] for kind in shown],
        ),
    )
    title = "Where the time would go" if history.is_predicted else "Where the time went"
    return Section("spent", title, charts=[chart], body=body, short="Time")


def _name_parts(history: History) -> list[str]:
    """How each part began, and its ranks where another part had others."""
    sizes = [start.world_size for start in history.starts]
    names = ["started", *(["resumed"] * (len(sizes) - 1))]
    if len(set(sizes)) == 1:
        return names
    return [f"{name}, {plural(size, 'rank')}" for name, size in zip(names, sizes, strict=True)]


def _draw_spent(kind: str, spent: list[Spent]) -> dict[str, Any]:
    name, color = KINDS[kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": [round(getattr(one, kind), 3) for one in spent],
        "y": list(range(len(spent))),
        "marker": {"color": color, "line": {"color": "--paper", "width": 1}},
        "hovertemplate": f"%{{x:,.1f}} s<extra>{name}</extra>",
    }


def tell_timeline(history: History) -> Section | None:
    """A few steps of each rank, lane by lane."""
    timelines = [timeline for timeline in find_timelines(history) if _read_spans(timeline)]
    if not timelines:
        return None
    shown = timelines[: min(MOST_RANKS, MOST_ROWS // len(_list_rows(timelines[0])))]
    total = timelines[0].seconds
    rows = [(timeline.rank, row) for timeline in shown for row in _list_rows(timeline)]
    heights = {row: height for height, row in enumerate(rows)}
    spans = [(timeline.rank, span) for timeline in shown for span in _read_spans(timeline)][:MOST_SPANS]
    first, steps = shown[0].first_step, shown[0].num_steps
    until_s = max([total, *(span["end_s"] for _, span in spans if span["lane"] == "step")])  # of whichever rank is last
    chart = Chart(
        name="timeline",
        title=f"{plural(steps, 'step')}{', simulated' if history.is_predicted else f' from step {first:,}'}",
        says=_say_timeline(shown[0], total, "would take" if history.is_predicted else "took"),
        traces=_draw_spans(spans, heights),
        layout={
            "barmode": "overlay",
            "xaxis": {"title": {"text": "milliseconds"}, "range": [0, until_s * 1e3]},
            "yaxis": {
                "range": [len(rows) - 0.4, -0.6],
                "tickvals": list(range(len(rows))),
                "ticktext": [_name_tick(rank, row) for rank, row in rows],
                "showgrid": False,
            },
            "uniformtext": {"mode": "hide", "minsize": 10},
            "shapes": [_draw_edge(start_s, rows, one.rank) for one in shown for start_s in _find_edges(one)],
        },
        height=130 + 34 * len(rows),
        wide=True,
        numbers=_tell_lanes(shown),
        note=_explain_rows({span["lane"] for _, span in spans})
        + (OWN_CLOCKS if len(shown) > 1 and not history.is_predicted else "")
        + (f" The first {len(shown)} of {len(timelines)} ranks are shown." if len(timelines) > len(shown) else ""),
    )
    return Section("timeline", "A few steps, rank by rank", charts=[chart], short="Timeline")


def _explain_rows(lanes: set[str]) -> str:
    beside = [
        *(["“input”, the batches that threads made"] if "input" in lanes else []),
        *(["a row for each buffer of gradients while it was summed over the ranks"] if "all-reduce" in lanes else []),
    ]
    says = "The row “step” is what a step is made of."
    return f"{says} Beside it went on: {', and '.join(beside)}." if beside else says


def _read_spans(timeline: TimelineTaken) -> list[dict[str, Any]]:
    """The spans that are ones."""
    found = []
    told: list[object] = list(timeline.spans)
    for span in told:
        if not isinstance(span, dict):
            continue
        start, end = number(span.get("start_s")), number(span.get("end_s"))
        if start is not None and end is not None and end >= start:
            named = {key: str(span.get(key, "")) for key in ("lane", "name")}
            found.append({**named, "step": number(span.get("step")), "start_s": start, "end_s": end})
    return found


def _list_rows(timeline: TimelineTaken) -> list[str]:
    """The step itself, its input, then the others as they come."""
    rows = dict.fromkeys(_name_row(span) for span in _read_spans(timeline))
    first = ["step", "input"]
    return sorted(rows, key=lambda row: first.index(row) if row in first else 2)[:MOST_ROWS_A_RANK]


def _name_row(span: Mapping[str, Any]) -> str:
    """The lane, of which each buffer of gradients has one of its own."""
    return str(span["name"] if span["lane"] == "all-reduce" else span["lane"])


def _name_tick(rank: int, row: str) -> str:
    """A rank's first row has its number; a buffer's bytes stand in its bars."""
    shown = label(row.partition(" (")[0])
    return f"rank {rank} · {shown}" if row == "step" else shown


def _draw_spans(
    spans: list[tuple[int, dict[str, Any]]], heights: Mapping[tuple[int, str], int]
) -> list[dict[str, Any]]:
    traces: dict[str, dict[str, Any]] = {}
    for rank, span in spans:
        height = heights.get((rank, _name_row(span)))
        if height is None:
            continue
        is_step = span["lane"] == "step"
        name = (
            SPAN_NAMES.get(span["name"], span["name"])
            if is_step
            else BESIDE_NAMES.get(span["lane"], f"beside: {span['lane']}")
        )
        color = (SPAN_COLORS if is_step else BESIDE_COLORS).get(span["name"] if is_step else span["lane"], "--gray")
        trace = traces.setdefault(name, _begin_spans(name, color, is_step))
        trace["base"].append(round(span["start_s"] * 1e3, 4))
        trace["x"].append(round((span["end_s"] - span["start_s"]) * 1e3, 4))
        trace["y"].append(height)
        trace["text"].append(label(span["name"]))
    _hide_unseen(traces.values())
    order = [SPAN_NAMES.get(name, name) for name in SPAN_COLORS]
    return sorted(traces.values(), key=lambda trace: order.index(trace["name"]) if trace["name"] in order else 99)


def _hide_unseen(traces: Iterable[dict[str, Any]]) -> None:
    """What is too short to be seen has no place in the legend."""
    lengths = [sum(trace["x"]) for trace in traces]
    for trace, length in zip(traces, lengths, strict=True):
        if not length > LEAST_SHARE * sum(lengths):
            trace["showlegend"] = False


def _begin_spans(name: str, color: str, is_step: bool) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(name),
        "base": [],
        "x": [],
        "y": [],
        "text": [],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": "--on-faint" if color in PALE else "--on-color", "size": 11},
        "width": 0.78,
        "opacity": 1 if is_step else 0.8,
        "marker": {"color": color, "line": {"color": "--paper", "width": 1}},
        "hovertemplate": "%{text}: %{x:.3f} ms, from %{base:.3f}<extra></extra>",
    }


def _find_edges(timeline: TimelineTaken) -> list[float]:
    """Where steps begin, the first one apart."""
    starts: dict[float, float] = {}
    for span in _read_spans(timeline):
        if span["lane"] == "step" and span["step"] is not None:
            starts[span["step"]] = min(span["start_s"], starts.get(span["step"], span["start_s"]))
    return sorted(starts.values())[1:100]


def _draw_edge(start_s: float, rows: Sequence[tuple[int, str]], rank: int) -> dict[str, Any]:
    """Through the rows of that rank alone."""
    x = start_s * 1e3
    own = [place for place, (one, _) in enumerate(rows) if one == rank]
    line = {"color": "--ink", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": own[0] - 0.5, "y1": own[-1] + 0.5, "line": line}


def _sum_spans(timeline: TimelineTaken) -> dict[str, float]:
    """Seconds by what a step is made of."""
    sums: dict[str, float] = {}
    for span in _read_spans(timeline):
        if span["lane"] == "step":
            sums[span["name"]] = sums.get(span["name"], 0.0) + span["end_s"] - span["start_s"]
    return sums


def _say_timeline(timeline: TimelineTaken, total: float, took: str) -> str:
    sums = _sum_spans(timeline)
    known = {name: seconds for name, seconds in sums.items() if seconds > LEAST_SHARE * total}
    shares = (
        ", ".join(f"{SPAN_NAMES.get(name, name)} {percent(seconds / total)}" for name, seconds in known.items())
        if total > 0
        else ""
    )
    beside = f": {shares}" if shares else ""
    return f"{plural(timeline.num_steps, 'step')} of rank {timeline.rank} {took} {total * 1e3:,.2f} ms{beside}."


def _tell_lanes(shown: list[TimelineTaken]) -> Numbers:
    sums = {timeline.rank: _sum_spans(timeline) for timeline in shown}
    names = list(dict.fromkeys(name for one in sums.values() for name in one))
    rows = [
        [SPAN_NAMES.get(name, name), *(f"{sums[rank].get(name, 0.0) * 1e3:,.2f}" for rank in sums)] for name in names
    ]
    rows.append(["together", *(f"{sum(one.values()) * 1e3:,.2f}" for one in sums.values())])
    return Numbers(["milliseconds", *(f"rank {rank}" for rank in sums)], rows)
