"""What faults came to: rows, tables, and files of several parts that add up to one table. Torch-free."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from lockstep import __version__
from lockstep.commit import read_commit
from lockstep.errors import LockstepError
from lockstep.files import write_whole

DEAD = ("SIGKILL", "SIGSEGV")  # of a rank: a dead process
HEADINGS = {
    "resume": "started again with --resume",
    "restarts": "--restarts",
    "two nodes": "two nodes, started again",
    "two nodes, restarts": "two nodes, --max-restarts",
}
CAPTION = (
    "Seconds, median and 99th percentile. Noticed: from the fault until the part has ended; healed: until the old "
    "ranks are gone; a blocked read: until it is named. Went on: until the first step, from the command that goes on; "
    "healed: from the fault."
)
Record = TypeVar("Record")


@dataclass(frozen=True)
class Row:
    """One fault and what came of it."""

    run: int
    way: str
    kind: str
    victim: str
    phase: str
    step: int  # reported when it struck
    came: bool  # False where the run had ended before its moment came
    ended: bool  # whether it ended the run's part
    healed: bool  # whether the launcher started the ranks again by itself
    status: int | None  # with which exit status the part ended
    detection_s: float | None
    recovery_s: float | None
    hung: bool


@dataclass
class Verdict:
    """What was wrong with a run in the end; nothing if all is well."""

    run: int
    problems: list[str] = field(default_factory=list)
    other_weights: bool = False  # than the run without faults; no problem where two such runs differ as well


@dataclass(frozen=True)
class UsefulTime:
    """How much of a disturbed run's time went into steps that count."""

    every_s: float
    wall_s: float
    num_faults: int
    num_steps: int  # that count in the end
    lost_s: float  # until the run was as far again as it had been before each fault
    share: float
    problems: list[str] = field(default_factory=list)


@dataclass
class Report:
    """One part of a campaign, as its file has it."""

    seed: int
    num_ranks: int
    commit: str
    seconds: float = 0.0
    backend: str = "auto"
    left_out: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    useful: list[UsefulTime] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        found = [problem for verdict in self.verdicts for problem in verdict.problems]
        return found + [problem for time in self.useful for problem in time.problems]

    @property
    def num_hung(self) -> int:
        return sum(row.hung for row in self.rows)

    @property
    def is_clean(self) -> bool:
        return not self.problems and not self.num_hung

    def write(self, file: Path | None) -> None:
        """Leave it as JSON, if a file is asked for."""
        if file is not None:
            write_whole(file, json.dumps(asdict(self), indent=1) + "\n")

    def describe(self) -> str:
        """One line of counts."""
        came = sum(row.came for row in self.rows) + sum(time.num_faults for time in self.useful)
        num_runs = len(self.verdicts) + len(self.useful)
        over = "" if self.backend == "auto" else f" over {self.backend}"
        others = sum(verdict.other_weights for verdict in self.verdicts) if self.backend == "nccl" else 0
        return (
            f"seed {self.seed}, {self.num_ranks} ranks{over}, commit {self.commit}: {came} faults in {num_runs} "
            f"runs, {self.num_hung} hangs, {len(self.problems)} problems, {self.seconds:.0f} s"
            + (f"; {others} runs ended with other weights, as two runs on a GPU may" if others else "")
        )


def read_report(file: Path) -> Report:
    """One file that `--json` wrote."""
    try:
        values = json.loads(file.read_text())
        report = Report(**values)
        report.rows = _read_records(Row, report.rows)
        report.verdicts = _read_records(Verdict, report.verdicts)
        report.useful = _read_records(UsefulTime, report.useful)
        report.describe()
    except OSError as error:
        raise LockstepError(f"{file} cannot be read ({error.strerror}).") from None
    except (ValueError, TypeError, AttributeError):
        raise LockstepError(f"{file} was not written by `lockstep bench chaos --json` of this version.") from None
    return report


def _read_records(kind: Callable[..., Record], values: Sequence[Any]) -> list[Record]:
    return [kind(**value) for value in values]


def show(reports: Sequence[Report], console: Console) -> bool:
    """Print one table of all, a line for each part and what was wrong; True if nothing was."""
    if rows := [row for report in reports for row in report.rows]:
        console.print(build_table(rows))
    if useful := [time for report in reports for time in report.useful]:
        console.print(build_useful_table(useful))
    for report in reports:
        for problem in report.problems:
            console.print(f"problem, seed {report.seed}: {problem}", highlight=False, soft_wrap=True, markup=False)
    for report in reports:
        console.print(report.describe(), highlight=False, soft_wrap=True)
    if len(reports) > 1:
        came, problems = sum(row.came for row in rows), sum(len(report.problems) for report in reports)
        hung = sum(report.num_hung for report in reports)
        console.print(f"all: {came} faults, {hung} hangs, {problems} problems.", highlight=False)
    return all(report.is_clean for report in reports)


def build_table(rows: Sequence[Row]) -> Table:
    """A line for each kind of fault, for dead ranks and for all, by the way in which runs go on."""
    table = Table(box=None, header_style="bold", caption=CAPTION, caption_justify="left", pad_edge=False)
    for column in ("fault", "came", "ended", "healed", "hung", "noticed", "went on"):
        table.add_column(column, justify="left" if column == "fault" else "right", no_wrap=True)
    for way in dict.fromkeys(row.way for row in rows):
        own = [row for row in rows if row.way == way]
        table.add_row(f"[bold]{HEADINGS.get(way, way)}[/bold]")
        for kind in dict.fromkeys(row.kind for row in own):
            _add(table, kind, [row for row in own if row.kind == kind])
        _add(table, "a dead rank", [row for row in own if row.kind in DEAD and row.victim != "launcher"])
        _add(table, "all", own)
    return table


def _add(table: Table, name: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    counts = (sum(flags) for flags in zip(*((row.came, row.ended, row.healed, row.hung) for row in rows), strict=True))
    times = (describe([row.detection_s for row in rows]), describe([row.recovery_s for row in rows]))
    table.add_row(f"  {name}", *map(str, counts), *times)


def build_useful_table(times: Sequence[UsefulTime]) -> Table:
    """A line for each measurement."""
    table = Table(box=None, header_style="bold")
    for column in ("a fault every, s", "for, s", "faults", "steps that count", "lost, s", "useful time"):
        table.add_column(column, justify="right", no_wrap=True)
    for time in times:
        counts = (f"{time.every_s:g}", f"{time.wall_s:.0f}", f"{time.num_faults}", f"{time.num_steps:,}")
        table.add_row(*counts, f"{time.lost_s:.1f}", f"{time.share:.1%}")
    return table


def describe(values: Sequence[float | None]) -> str:
    """Median and 99th percentile; of few values, that is the largest."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return ""
    return f"{statistics.median(found):.1f}, {found[math.ceil(0.99 * len(found)) - 1]:.1f}"


def name_source() -> str:
    """What is run: the commit of a checkout, the version of an installed package."""
    return read_commit() or __version__
