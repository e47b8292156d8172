"""Rows of benchmarks, or of sweeps, beside each other: matched by what they are, with everything both have measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lockstep.errors import LockstepError
from lockstep.report.compare import NONE, head_changes, list_differing, tell_changes
from lockstep.report.history import number
from lockstep.report.page.charts import Numbers
from lockstep.report.quantities import Quantity, describe_quantity

# What says which row of a benchmark is which; everything else in a row was measured, or is a remark.
IDENTITY = (
    *("case", "model", "network", "batch", "ranks", "topology", "precision", "side", "name", "pass", "way", "stage"),
    *("algorithm", "group_size", "bytes", "channels", "kind", "victim", "phase", "setting_name", "seed"),
)


@dataclass(frozen=True)
class Measured:
    """One number of a row."""

    value: float
    deviation: float | None = None  # over seeds, where there are several
    note: str = ""  # behind the number
    is_count: bool = False  # such as rounds: of interest where it differs


@dataclass(frozen=True)
class Row:
    """What a row is, in words, and what was measured of it."""

    identity: tuple[str, ...]
    measures: Mapping[str, Measured]


@dataclass(frozen=True)
class RowFile:
    """One of several files of rows."""

    name: str
    kind: Literal["benchmark", "sweep"]
    rows: Sequence[Row]
    facts: Mapping[str, str] = field(default_factory=dict)  # what was asked for, and chosen


@dataclass(frozen=True)
class Compared:
    """One quantity of a row, in each file."""

    identity: tuple[str, ...]
    key: str
    values: list[Measured | None]

    @property
    def numbers(self) -> list[float | None]:
        return [None if value is None else value.value for value in self.values]


def read_bench_row(row: Mapping[str, Any], position: int) -> Row:
    """A row as a benchmark's file has it; its place says which it is where nothing else does."""
    told = [
        f"{key} {row[key]}" if isinstance(row[key], int) else str(row[key]) for key in IDENTITY if _is_told(row, key)
    ]
    measures = {
        key: Measured(measured, is_count=isinstance(value, int))
        for key, value in row.items()
        if key not in IDENTITY and (measured := number(value)) is not None
    }
    return Row(tuple(part for part in told if part) or (f"row {position + 1}",), measures)


def _is_told(row: Mapping[str, Any], key: str) -> bool:
    return isinstance(row.get(key), str | int | float)  # a table inside a table would be no name


def number_repeats(rows: Sequence[Row]) -> list[Row]:
    """The same rows, with a number behind those that are called like an earlier one."""
    seen: dict[tuple[str, ...], int] = {}
    numbered = []
    for row in rows:
        seen[row.identity] = times = seen.get(row.identity, 0) + 1
        numbered.append(row if times == 1 else replace(row, identity=(*row.identity, f"no. {times}")))
    return numbered


def compare_rows(files: Sequence[RowFile]) -> list[Compared]:
    """Everything that was measured in at least two of the files."""
    found: dict[tuple[tuple[str, ...], str], Compared] = {}
    for place, file in enumerate(files):
        for row in number_repeats(file.rows):
            match = tuple(sorted(row.identity))  # a sweep may have its grid in another order
            for key, measured in row.measures.items():
                one = found.setdefault((match, key), Compared(row.identity, key, [None] * len(files)))
                one.values[place] = measured
    counts = {one.key for one in found.values() for value in one.values if value and value.is_count}
    return [
        one
        for one in found.values()
        if sum(value is not None for value in one.values) > 1 and not (one.key in counts and len(set(one.numbers)) == 1)
    ]


def describe_quantities(rows: Sequence[Compared]) -> dict[str, Quantity]:
    """How each quantity is shown, in the order in which rows have them."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row.key, []).extend(value for value in row.numbers if value is not None)
    return {key: describe_quantity(key, found) for key, found in values.items()}


def tabulate_rows(files: Sequence[RowFile]) -> Numbers:
    """Every quantity side by side, and how each file's differs from the first's."""
    rows = compare_rows(files)
    if not rows:
        kind = files[0].kind
        raise LockstepError(f"These files have no row in common; compare files of the same {kind}.")
    quantities = describe_quantities(rows)
    names = [file.name for file in files]
    table = []
    for row in rows:
        quantity = quantities[row.key]
        shown = [_show(value, quantity) for value in row.values]
        changes = tell_changes(row.numbers, quantity.is_share)
        table.append([", ".join(row.identity), quantity.words, *shown, *changes])
    return Numbers(["row", "quantity", *names, *head_changes(names)], table)


def _show(value: Measured | None, quantity: Quantity) -> str:
    return NONE if value is None else quantity.show(value.value, value.deviation) + value.note


def compare_facts(files: Sequence[RowFile]) -> Numbers | None:
    """What was asked for and chosen, where that differs; None where nothing does."""
    rows = list_differing([file.facts for file in files])
    return Numbers(["setting", *(file.name for file in files)], rows) if rows else None
