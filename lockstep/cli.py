"""The commands. Each imports its package only when it runs, so that --help and mistakes answer at once."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep import __version__, config
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.comm.world import World
    from lockstep.events import Sink

app = typer.Typer(
    name="lockstep",
    help="Train image models by synchronous data parallelism, from a laptop to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes = typer.Typer(help="List, show and copy the packaged recipes.", invoke_without_command=True)
app.add_typer(recipes, name="recipes")
bench = typer.Typer(help="Measure this system beside its peers, in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run a command; a user's mistake is one sentence and a non-zero exit."""
    try:
        app()
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("lockstep: interrupted.", file=sys.stderr)
        sys.exit(130)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train image models by synchronous data parallelism, from a laptop to a cluster."""


@app.command()
def train(
    target: Annotated[str, typer.Argument(help="A recipe's name, a TOML file, or a run's folder.", metavar="RECIPE")],
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start; one per GPU, or 1 on the CPU, if not given.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting, such as optim.momentum=0.95; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/<recipe>-<time> if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last good checkpoint.")] = False,
) -> None:
    """Train a recipe. Under torchrun or srun, join that world; otherwise start the ranks."""
    name, folder, wanted = _plan_run(target, settings or [], out, resume=resume)

    import os

    from lockstep.comm.world import read_membership
    from lockstep.engine.build import check_shares, open_sources
    from lockstep.engine.launch import choose_num_ranks, launch_ranks
    from lockstep.engine.run import run_rank
    from lockstep.report.display import progress

    membership = read_membership(os.environ)
    console = Console()
    if membership is None:
        # What is wrong with the ranks or the data is said once, before any rank starts.
        num_ranks = choose_num_ranks(ranks)
        check_shares(wanted, num_ranks)
        open_sources(wanted.data, progress("Rendering images", console))
        if num_ranks > 1:
            arguments = ["train", target, "--out", str(folder), *(["--resume"] if resume else [])]
            status = launch_ranks(num_ranks, [*arguments, *(f"--set={setting}" for setting in settings or [])])
            raise typer.Exit(status)
    elif ranks is not None and ranks != membership.size:
        raise LockstepError(f"--ranks {ranks} was given, but this world was started with {membership.size} ranks.")
    status_word = run_rank(wanted, name, folder, resume=resume, membership=membership, open_sink=_open_sink)
    if status_word == "interrupted":
        raise typer.Exit(130)


def _plan_run(
    target: str, settings: list[str], out: Path | None, *, resume: bool
) -> tuple[str, Path, config.RunConfig]:
    """The run's name, folder and configuration; on --resume the configuration is the one the run was started with."""
    if resume:
        folder = out or (Path(target) if Path(target).is_dir() else _find_last_run(target))
        if not (folder / "config.toml").is_file():
            raise LockstepError(
                f"{folder} is not a run's folder, so there is nothing to resume; start without --resume."
            )
        _, wanted = config.load_recipe(str(folder), settings)
        return folder.name, folder, wanted
    name, wanted = config.load_recipe(target, settings)
    return name, out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", wanted


def _find_last_run(target: str) -> Path:
    name, _ = config.load_recipe(target)
    runs = sorted(Path("runs").glob(f"{name}-[0-9]*-[0-9]*/checkpoints/step-*/manifest.json"))
    if not runs:
        raise LockstepError(
            f"No run of {name} with a checkpoint lies under runs/; start without --resume, or give --out."
        )
    return runs[-1].parents[2]


def _open_sink(world: "World", folder: Path) -> "Sink":
    """Rank 0 writes the event log, draws the display and leaves the summary; the others say nothing."""
    from lockstep.report.display import build_display
    from lockstep.report.run import RunSink, SilentSink

    return RunSink(folder, build_display(Console(), folder)) if world.is_first else SilentSink()


@recipes.callback()
def list_recipes(context: typer.Context) -> None:
    """List the packaged recipes."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", style="cyan", no_wrap=True)
    table.add_column("what it reproduces")
    for recipe in config.list_recipes():
        table.add_row(recipe.name, recipe.summary)
    Console().print(table)


@recipes.command("show")
def show_recipe(name: str) -> None:
    """Print a recipe."""
    print(config.recipe_text(name), end="")


@recipes.command("copy")
def copy_recipe(name: str, file: Path) -> None:
    """Copy a recipe to FILE, to change it and train with it."""
    config.copy_recipe(name, file)
    print(f"Copied {name} to {file}; train it with: lockstep train {file}")


@bench.command("step")
def bench_step(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to compare with DDP on.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Turns each side takes; the median of the ratios counts.")] = 40,
    round_s: Annotated[float, typer.Option(help="Seconds of one turn.")] = 0.3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Append the rows to this file as JSON.")] = None,
) -> None:
    """A whole training step beside PyTorch's DDP on several ranks and beside a bare loop on one."""
    import os

    from lockstep.comm.world import read_membership
    from lockstep.engine.launch import launch_ranks

    membership = read_membership(os.environ)
    if membership is not None:
        from lockstep.bench.step import run_rank

        run_rank(membership, rounds=rounds, round_s=round_s, json_file=json_file)
        return
    arguments = ["bench", "step", "--rounds", str(rounds), "--round-s", str(round_s)]
    if json_file is not None:
        try:  # before minutes of measuring
            json_file.write_text("[]\n")
        except OSError as error:
            raise LockstepError(f"{json_file} cannot be written ({error.strerror}); choose another --json.") from error
        arguments += ["--json", str(json_file)]
    for count in (1, ranks):
        if status := launch_ranks(count, arguments):
            raise typer.Exit(status)
