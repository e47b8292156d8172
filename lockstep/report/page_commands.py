"""The commands that show a run: its page, several beside each other, and one that still goes on."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import LockstepError


def add_commands(app: typer.Typer) -> None:
    """Give the command line `report`, `compare` and `watch`."""
    app.command("report")(report)
    app.command("compare")(compare)
    app.command("watch")(watch)


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its events.jsonl.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page; report.html in the run's folder.")] = None,
) -> None:
    """Draw what a run did as one page that opens offline, whether it has ended or not."""
    from lockstep.report.page.run_page import write_report

    print(f"Wrote {write_report(run.expanduser(), out.expanduser() if out else None)}")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders, or JSON files of benchmarks.", metavar="RUN…")],
    out: Annotated[Path | None, typer.Option(help="Also write a page with the curves over each other.")] = None,
) -> None:
    """Say how runs differ in settings and results, or what two runs of a benchmark measured."""
    from rich.console import Console

    from lockstep.report.compare import (
        Benchmark,
        Run,
        build_rich,
        compare_results,
        compare_settings,
        read_subjects,
        tabulate_rows,
    )

    subjects = read_subjects([run.expanduser() for run in runs])
    console = Console()
    chosen = [one for one in subjects if isinstance(one, Run)]
    benchmarks = [one for one in subjects if isinstance(one, Benchmark)]
    if chosen:
        settings = compare_settings(chosen)
        console.print(build_rich(settings, "Settings that differ") if settings else "All settings are the same.")
        console.print()
        console.print(build_rich(compare_results(chosen), "Results"))
    else:
        console.print(build_rich(tabulate_rows(benchmarks), "Measured"))
    if out is None:
        return
    from lockstep.files import write_whole
    from lockstep.report.page.compare_page import build_bench_comparison, build_run_comparison

    page = build_run_comparison(chosen) if chosen else build_bench_comparison(benchmarks)
    try:
        write_whole(out.expanduser(), page)
    except OSError as error:
        raise LockstepError(f"Cannot write {out}: {error.strerror}.") from None
    print(f"Wrote {out}")


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
