"""The commands that show a run: its page, several beside each other, and one that still goes on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.report.compare_rows import RowFile
    from lockstep.report.compare_runs import Run


def add_commands(app: typer.Typer) -> None:
    """Give the command line `report`, `compare` and `watch`."""
    app.command("report")(report)
    app.command("compare")(compare)
    app.command("watch")(watch)


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its events.jsonl.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page; report.html in the run's folder.")] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Dollars that a device costs by the hour; the page says the sum."),
    ] = None,
) -> None:
    """Draw what a run did as one page that opens offline, whether it has ended or not."""
    from lockstep.report.page.run_page import write_report

    if price is not None and price != price:  # NaN lies in every range
        raise LockstepError("--price nan is not a number; give the dollars that a device costs by the hour.")
    print(f"Wrote {write_report(run.expanduser(), out.expanduser() if out else None, price)}")


def compare(
    subjects: Annotated[
        list[Path],
        typer.Argument(help="Runs' folders, JSON files of benchmarks, or folders of sweeps.", metavar="RUN…"),
    ],
    out: Annotated[Path | None, typer.Option(help="Also write a page with curves over each other, or bars.")] = None,
) -> None:
    """Say how runs differ in settings and results, or what two runs of a benchmark or of a sweep measured."""
    from lockstep.report.compare_rows import RowFile
    from lockstep.report.compare_runs import Run
    from lockstep.report.compare_subjects import read_subjects

    found = read_subjects([path.expanduser() for path in subjects])
    runs = [one for one in found if isinstance(one, Run)]
    files = [one for one in found if isinstance(one, RowFile)]
    if runs:
        _print_runs(runs)
    else:
        _print_rows(files)
    if out is None:
        return
    from lockstep.files import write_whole
    from lockstep.report.page.compare_page import build_run_comparison
    from lockstep.report.page.compare_rows_page import build_row_comparison

    page = build_run_comparison(runs) if runs else build_row_comparison(files)
    try:
        write_whole(out.expanduser(), page)
    except OSError as error:
        raise LockstepError(f"Cannot write {out}: {error.strerror}.") from None
    print(f"Wrote {out}")


def _print_runs(runs: "Sequence[Run]") -> None:
    from rich.console import Console

    from lockstep.report.compare import build_rich
    from lockstep.report.compare_runs import compare_results, compare_settings, list_status, split_changes

    console = Console()
    settings = compare_settings(runs)
    results, *changes = split_changes(compare_results(runs), len(runs))
    console.print(build_rich(settings, "Settings that differ") if settings else "All settings are the same.")
    console.print()
    status = ["status", *list_status(runs)]
    console.print(build_rich(replace(results, rows=[status, *results.rows]), "Results"))
    for table in changes:
        console.print()
        console.print(build_rich(table, table.caption))


def _print_rows(files: "Sequence[RowFile]") -> None:
    from rich.console import Console

    from lockstep.report.compare import build_rich
    from lockstep.report.compare_rows import compare_facts, tabulate_rows

    console = Console()
    measured, facts = tabulate_rows(files), compare_facts(files)
    if facts:
        console.print(build_rich(facts, "Settings that differ"))
        console.print()
    before = ["", *(row[0] for row in measured.rows)]
    # A row's name once, so that the eye finds where the next one begins.
    rows = [["" if row[0] == last else row[0], *row[1:]] for row, last in zip(measured.rows, before, strict=False)]
    console.print(build_rich(replace(measured, rows=rows), "Measured"))


def watch(
    run: Annotated[Path, typer.Argument(help="A run's folder, here or on a shared disk.", metavar="RUN")],
    web: Annotated[bool, typer.Option("--web", help="Live curves in a browser, for this machine alone.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of --web; 0: any that is free.")] = 0,
) -> None:
    """Follow a run that goes on elsewhere, in this terminal or in a browser. Ctrl-C ends the watching, not the run."""
    if port and not web:
        raise LockstepError("--port is for --web; add it, or leave the port out.")
    if web:
        from lockstep.report.live import watch_web

        watch_web(run.expanduser(), port)
    else:
        from lockstep.report.watch import watch_terminal

        watch_terminal(run.expanduser())
