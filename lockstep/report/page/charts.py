"""What a chart is: plain data for plotly.js, with a sentence that says the same to who cannot see it.

Colours are names of the page's palette, which `page.js` looks up, so that a chart follows light and dark. A curve has
three x axes; `page.js` takes the one that the reader chose. Text that plotly shows is escaped here, once: plotly reads
tags in it.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.report.history import Spot, number, thin
from lockstep.report.phrases import clock

LONGEST_LABEL = 60  # characters of a name in a chart; more would leave no room for the chart


@dataclass(frozen=True)
class Numbers:
    """A small table: what a chart shows, to be read."""

    heads: list[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """One drawing."""

    name: str
    title: str
    says: str  # one sentence instead of the picture
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 300
    marks: list[dict[str, Any]] = field(default_factory=list)  # upright lines: {"at": {axis: x}, "text"}
    wide: bool = False  # takes the whole width
    numbers: Numbers | None = None
    note: str = ""  # what a reader should know, under the chart

    def as_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "traces": self.traces,
            "layout": self.layout,
            "marks": self.marks,
            "height": self.height,
        }


def label(text: object) -> str:
    """Text of a run as plotly shall show it: as it is, tags included, and not too long."""
    shown = str(text)
    # Quotes are no danger in text, and plotly would show what they are escaped as.
    return html.escape(shown if len(shown) <= LONGEST_LABEL else f"{shown[: LONGEST_LABEL - 1]}…", quote=False)


def draw_curve(
    name: str,
    spots: Sequence[Spot],
    values: Sequence[float | None],
    color: str,
    *,
    dash: str = "solid",
    mode: str = "lines",
    template: str = "%{y:.4g}",
    details: Sequence[str] | None = None,
    heights: Mapping[str, Sequence[float | None]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A line over the axis that the reader chose, thinned to what a screen can show; `heights` by axis, where they
    differ."""
    kept = thin(values)
    places = [spots[index] for index in kept]
    return {
        "type": "scatter",
        "mode": mode if len(kept) > 1 else "markers",  # a line of one point cannot be seen
        "name": name,
        "y": [number(values[index]) for index in kept],
        "at": place(places),
        "line": {"color": color, "width": 2, "dash": dash},
        "marker": {"color": color, "size": 7},
        "hovertemplate": f"{template}<extra>{name}</extra>",
        **({"customdata": [details[index] for index in kept]} if details else {}),
        **({"heights": {axis: [number(y[index]) for index in kept] for axis, y in heights.items()}} if heights else {}),
        **more,
    }


def place(spots: Sequence[Spot]) -> dict[str, list[float | None]]:
    """Where points lie on each axis."""
    return {
        "step": [spot.step for spot in spots],
        "epoch": [shorten(spot.epoch, 4) for spot in spots],
        "wall": [shorten(spot.wall_s, 2) for spot in spots],
    }


def draw_marks(spots: Sequence[Spot], text: str) -> list[dict[str, Any]]:
    """Upright lines through a chart."""
    return [{"at": {axis: values[0] for axis, values in place([spot]).items()}, "text": text} for spot in spots]


def shorten(value: object, digits: int) -> float | None:
    """A number with no more digits than can be seen: a page of many points stays small."""
    found = number(value)
    return None if found is None else round(found, digits)


def sample_rows(count: int, most: int = 12) -> list[int]:
    """Which of many points a table shows: evenly, both ends among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def tell_time(seconds: object) -> str:
    """A length of time with its unit: 7.2 s, 12:34 min or 1:02:03 h; what is no number is none."""
    known = number(seconds) or 0.0
    if known < 59.95:
        return f"{known:.1f} s"
    return f"{clock(known)} {'min' if known < 3599.5 else 'h'}"
