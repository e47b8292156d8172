"""The ranks beside each other: what a step cost each one before it waited for the others."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.report.history import History, number
from lockstep.report.page.charts import Chart, Numbers
from lockstep.report.page.document import Section
from lockstep.report.phrases import plural

MOST_RANKS = 32  # bars; of more ranks the slowest are shown


class Cost(NamedTuple):
    """Seconds of a step."""

    rank: int
    input_s: float
    compute_s: float

    @property
    def together_s(self) -> float:
        return self.input_s + self.compute_s


def tell_ranks(history: History) -> Section | None:
    """A bar for each rank, and by how much the slowest is behind; nothing of one rank, which waits for nobody."""
    costs = _read_costs(history)
    if len(costs) < 2:
        return None
    slowest = sorted(costs, key=lambda cost: -cost.together_s)
    shown, left_out = sorted(slowest[:MOST_RANKS]), len(slowest) - MOST_RANKS
    note = "Medians over the run" if len(history.parts) == 1 else "Medians since the last resume"
    chart = Chart(
        name="ranks",
        title="Milliseconds of a step before it waited for other ranks",
        says=_say(slowest[0], slowest[-1]),
        traces=[
            _draw("computing", "--blue", [cost.compute_s for cost in shown]),
            _draw("waiting for input", "--green", [cost.input_s for cost in shown]),
        ],
        layout={
            "barmode": "stack",
            "xaxis": {"title": {"text": "milliseconds"}, "rangemode": "tozero"},
            "yaxis": {
                "autorange": "reversed",
                "tickvals": list(range(len(shown))),
                "ticktext": [f"rank {cost.rank}" for cost in shown],
                "showgrid": False,
            },
        },
        height=120 + 26 * len(shown),
        wide=True,
        numbers=_tell_costs(slowest[:MOST_RANKS], slowest[-1]),
        note=f"{note}; {plural(left_out, 'quicker rank')} not drawn." if left_out > 0 else f"{note}.",
    )
    return Section("ranks", "Rank beside rank", charts=[chart], short="Ranks")


def _say(slowest: Cost, quickest: Cost) -> str:
    behind_s = slowest.together_s - quickest.together_s
    if not behind_s > 0:
        return f"All ranks took {_show(slowest.together_s)} ms."
    return (
        f"Rank {slowest.rank} took longest: {_show(slowest.together_s)} ms, {_show(behind_s)} ms more than rank "
        f"{quickest.rank}, the quickest."
    )


def _tell_costs(slowest: Sequence[Cost], quickest: Cost) -> Numbers:
    rows = [
        [
            f"rank {cost.rank}",
            *map(_show, (cost.compute_s, cost.input_s, cost.together_s, cost.together_s - quickest.together_s)),
        ]
        for cost in slowest
    ]
    return Numbers(["milliseconds", "computing", "waiting for input", "together", "behind the quickest"], rows)


def _show(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _read_costs(history: History) -> list[Cost]:
    """Those of the last part; what is no pair of times says nothing of any rank."""
    told: list[object] = list(history.ended.rank_times) if history.ended else []
    costs = []
    for rank, pair in enumerate(told):
        times = [number(one) for one in pair] if isinstance(pair, list) else []
        known = [one for one in times if one is not None and one >= 0]
        if len(known) != 2 or len(times) != 2:
            return []
        costs.append(Cost(rank, *known))
    return costs


def _draw(name: str, color: str, seconds: list[float]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": [round(one * 1e3, 4) for one in seconds],
        "y": list(range(len(seconds))),
        "marker": {"color": color, "line": {"color": "--paper", "width": 1}},
        "hovertemplate": f"%{{x:,.2f}} ms<extra>{name}</extra>",
    }
