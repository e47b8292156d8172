"""What every comparison shares: what differs, how a change is told, and tables for a terminal."""

import math
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from lockstep.report.page.charts import Numbers

NONE = "–"


def list_differing(facts: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """(name, its value in each) for what is not the same everywhere."""
    names = dict.fromkeys(name for one in facts for name in one)
    rows = [[name, *(one.get(name, NONE) for one in facts)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def head_changes(names: Sequence[str]) -> list[str]:
    """The heads of the columns that compare each with the first."""
    first, *others = names
    return ["difference"] if len(others) == 1 else [f"{other} against {first}" for other in others]


def tell_changes(values: Sequence[float | None], is_share: bool) -> list[str]:
    """How each value differs from the first: shares by points, everything else by how many times the first it is."""
    return [_tell_change(values[0], other, is_share) for other in values[1:]]


def _tell_change(first: float | None, other: float | None, is_share: bool) -> str:
    if first is None or other is None or not (first or is_share):
        return NONE
    change = 100 * (other - first) if is_share else other / first
    if not math.isfinite(change):  # a stranger's numbers
        return NONE
    if is_share:
        return f"{round(change, 2) + 0.0:+.2f} points"  # + 0.0: nothing is -0.00 points away
    return f"{change:.3f} ×" if 1e-3 <= abs(change) < 1e6 else f"{change:.3g} ×"


def build_rich(numbers: Numbers, title: str) -> Table:
    """The same table for a terminal; what a run says is printed as text, control characters left out."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold", pad_edge=False)
    for place, head in enumerate(numbers.heads):
        table.add_column(clean(head), justify="right" if place else "left", overflow="fold")
    for row in numbers.rows:
        table.add_row(*(Text(clean(cell), style="" if place else "cyan") for place, cell in enumerate(row)))
    return table


def clean(text: str) -> str:
    """Text that cannot steer a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
