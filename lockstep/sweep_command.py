"""The command `sweep`: a table of settings × seeds as runs, and what came of them (docs/sweeps.md)."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.errors import LockstepError
from lockstep.processes import quit_on_interrupt, stopping_by_exception

WIDTH = 140  # columns of a table that goes to a file
WORKER = re.compile(r"(\d{1,4})/(\d{1,4})")


def add_sweep_command(app: typer.Typer) -> None:
    """Give the command line `sweep`."""
    app.command("sweep")(sweep)


def sweep(
    file: Annotated[Path, typer.Argument(parser=Path, help="A sweep file in TOML.", metavar="FILE")],
    out: Annotated[Path | None, typer.Option(help="The sweep's folder; runs/<name of the file> if not given.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting for all trials, such as train.duration=2ep; repeatable."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="List the trials and what is known of them, run nothing.")
    ] = False,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run a table of settings × seeds, and draw what came of it. The same command goes on with one that was stopped."""
    with quit_on_interrupt():
        from lockstep.comm.world import read_membership
        from lockstep.report.display import print_plain
        from lockstep.report.sweep_rows import build_table, find_places
        from lockstep.sweeps import (
            list_gpus,
            open_sweep,
            retry_failed,
            spread_over,
            take_share,
            work,
            write_results,
            write_table,
        )

    if read_membership(os.environ) is not None:
        raise LockstepError("A sweep starts its own ranks; run it as one process, without torchrun or srun.")
    console = Console()
    found = open_sweep(file.expanduser(), out.expanduser() if out else None, settings or [])
    if show:
        for row in found.rows():
            print_plain(console, f"{row.trial.folder}: {row.trial.phrase()}: {row.status}")
        print_plain(console, found.phrase_go_on())
        return

    def say(text: str) -> None:
        print_plain(console, text)

    def tell(text: str) -> None:
        """Of a trial that has ended; a process that is killed at the next one has left it in the table."""
        say(text)
        with suppress(LockstepError):  # a full disk is said at the end
            write_table(found)

    turn, num_workers = _read_worker(worker)
    if worker:
        take_share(turn, num_workers)
        with stopping_by_exception():
            raise typer.Exit(0 if work(found, say, turn * len(found.places()) // num_workers) else 130)
    retry_failed(found)
    say(f"{found.name}: {found.num_trials} trials in {found.root}")
    devices = list_gpus()
    is_alone = len(devices) < 2 or any(trial.ranks != "1" for trial in found.trials)
    try:
        with stopping_by_exception():
            is_done = work(found, tell) if is_alone else spread_over(found, devices, tell)
    except KeyboardInterrupt:
        is_done = False
    files = write_results(found)
    console.print()
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(width=WIDTH)
    console.print(build_table(found.file, find_places(found.rows(), found.file.measure), found.name))
    say(f"Wrote {' and '.join(map(str, files))}")
    rows = found.rows()
    if is_done and not any(row.status == "finished" for row in rows):
        raise LockstepError(f"No trial of this sweep ended well; the first says: {rows[0].reason}")
    if not is_done:
        say(f"Interrupted: {found.phrase_go_on()}")
        raise typer.Exit(130)


def _read_worker(text: str) -> tuple[int, int]:
    """Which process of how many this is."""
    match = WORKER.fullmatch(text) if text else None
    if not text:
        return 0, 1
    if not match or not int(match[1]) < int(match[2]):
        raise LockstepError(f"--worker {text[:20]} must be a place among processes, such as 0/4.")
    return int(match[1]), int(match[2])
