"""Names of rows beside a chart's bars: short, over several lines, and never two alike."""

import textwrap
from collections.abc import Sequence

from lockstep.report.page.charts import label

WIDTH = 20  # characters of a line, so that bars keep most of the width
MOST_LINES = 4

Identity = tuple[str, ...]


def name_rows(identities: Sequence[Identity], width: int = WIDTH) -> list[str]:
    """What tells each row from the others, as plotly shall show it."""
    shared = list_shared(identities)
    own = [tuple(part for part in identity if part not in shared) or identity for identity in identities]
    names: dict[str, None] = {}
    for identity in own:
        name = whole = _wrap(identity, width)
        times = 1
        while name in names:  # they differ in what was cut off
            times += 1
            name = f"{whole} ({times})"
        names[name] = None
    return list(names)


def list_shared(identities: Sequence[Identity]) -> list[str]:
    """What all rows have in common; nothing where there is only one."""
    if len(identities) < 2:
        return []
    others = [set(identity) for identity in identities[1:]]
    return [part for part in identities[0] if all(part in other for other in others)]


def _wrap(identity: Identity, width: int) -> str:
    """A name over several lines, broken at its commas where it can be."""
    lines: list[str] = []
    for part in ", ".join(identity).split(", "):
        if lines and len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f", {part}"
        else:
            lines += textwrap.wrap(part, width)
    if len(lines) > MOST_LINES:  # from the middle: which side a row is of stands at its end
        lines = [*lines[: MOST_LINES - 2], "…", lines[-1]]
    return "<br>".join(map(label, lines))
