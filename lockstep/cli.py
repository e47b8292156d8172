"""The commands. Each imports its package only when it runs, so that --help and mistakes answer at once."""

import io
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep import __version__
from lockstep.bench.commands import bench
from lockstep.bench.profile_command import add_profile
from lockstep.config import RunConfig
from lockstep.errors import LockstepError, SharedError
from lockstep.processes import end_on_second, follow_launcher, name_process, quit_on_interrupt
from lockstep.recipes import read
from lockstep.report.export_commands import exports
from lockstep.report.page_commands import add_commands as add_page_commands
from lockstep.report.plan_commands import add_plan_command
from lockstep.restarts import count_restarts, leave_outcome

if TYPE_CHECKING:
    from lockstep.comm.world import World
    from lockstep.events import Sink
    from lockstep.plan.profile import Profile

app = typer.Typer(
    name="lockstep",
    help="Train image models by synchronous data parallelism, from a laptop to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes = typer.Typer(help="List, show and copy the packaged recipes.", invoke_without_command=True)
app.add_typer(recipes, name="recipes")
data = typer.Typer(help="Pack images into shards, check them, and say what they hold.", no_args_is_help=True)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
add_profile(app)
add_page_commands(app)
add_plan_command(app)
app.add_typer(exports)


def main() -> None:
    """Run a command; a user's mistake is one sentence and a non-zero exit."""
    follow_launcher(os.environ)
    if "RANK" in os.environ:
        name_process(f"lockstep:{os.environ['RANK']}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text
    try:
        app()
    except LockstepError as error:
        if not isinstance(error, SharedError) or os.environ.get("RANK", "0") == "0":
            print(f"lockstep: {error}", file=sys.stderr)
        # What all ranks have come to would come again; a rank that lost the others is to be started again.
        sys.exit(leave_outcome(1, os.environ) if isinstance(error, SharedError) else 1)
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
        str | None,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Ranks to start, or the least and the most; one per GPU, or 1 on the CPU, if not given.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting, such as optim.momentum=0.95; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/<recipe>-<time> if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last good checkpoint.")] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often ranks are started again, from where they were, when one is lost.")
    ] = 0,
    log: Annotated[str, typer.Option(help="Also log to tensorboard, wandb, mlflow, mlperf; several by commas.")] = "",
) -> None:
    """Train a recipe. Under torchrun or srun, join that world; otherwise start the ranks."""
    from lockstep.report.sinks import parse_viewers

    viewers = parse_viewers(log)
    resume = resume or _was_begun(target, out)
    name, folder, wanted = _plan_run(target, settings or [], out, resume=resume)

    with quit_on_interrupt():
        from lockstep.comm.world import read_membership
        from lockstep.engine.build import check_shares, open_sources
        from lockstep.engine.launch import choose_num_ranks, launch_ranks, read_range
        from lockstep.engine.owner import check_unowned
        from lockstep.engine.run import prepare_folder, run_rank
        from lockstep.engine.snapshot import clear_memory, find_memory
        from lockstep.engine.template import Template
        from lockstep.report.display import progress

    membership = read_membership(os.environ)
    console = Console()
    if membership is None:
        with Template() as template:  # first of all: before there are threads, and before a GPU is asked anything
            # What is wrong with the ranks, the data or the folder is said once, before any rank starts.
            least, most = choose_num_ranks(ranks)
            for num_ranks in range(least, most + 1):
                check_shares(wanted, num_ranks)
            open_sources(wanted.data, progress("Rendering images", console))
            check_unowned(folder)
            if not resume:
                prepare_folder(folder)
            if most > 1 or restarts:
                arguments = ["train", target, "--out", str(folder), *(["--resume"] if resume else [])]
                arguments += [f"--set={setting}" for setting in settings or []] + ([f"--log={log}"] if log else [])
                with end_on_second((signal.SIGINT, signal.SIGTERM)):  # and with the launcher its ranks
                    try:
                        status = launch_ranks(template, (least, most), arguments, restarts)
                    finally:
                        clear_memory(find_memory(folder))  # nobody starts these ranks again
                raise typer.Exit(status)
    elif ranks is not None and not (wanted_ranks := read_range(ranks))[0] <= membership.size <= wanted_ranks[1]:
        raise LockstepError(f"--ranks {ranks} was given, but this world was started with {membership.size} ranks.")
    open_sink = partial(_open_sink, viewers=viewers)
    status_word = run_rank(wanted, name, folder, resume=resume, membership=membership, open_sink=open_sink)
    if status_word == "interrupted":
        raise typer.Exit(leave_outcome(130, os.environ))


@app.command()
def tune(
    target: Annotated[str, typer.Argument(help="A recipe's name or a TOML file.", metavar="RECIPE")] = "quickstart",
    ranks: Annotated[
        str | None, typer.Option(metavar="N", help="Ranks to start; one per GPU, or 1 on the CPU, if not given.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting; repeatable.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Explain every plan remembered, measure nothing.")] = False,
) -> None:
    """Measure how a recipe's step is best taken on these ranks, and remember it for later runs."""
    with quit_on_interrupt():
        from lockstep.comm.world import join_world, read_membership
        from lockstep.engine.build import check_shares, open_sources
        from lockstep.engine.launch import choose_num_ranks, has_gpu, launch_ranks
        from lockstep.engine.planning import default_plan_folder, tune_recipe
        from lockstep.engine.run import explain_failures
        from lockstep.engine.template import Template
        from lockstep.plan.folder import read_profile
        from lockstep.report.display import progress

    console = Console()
    if show:
        found = {folder: read_profile(folder) for folder in sorted(default_plan_folder().glob("*"))}
        if not any(found.values()):
            raise LockstepError("Nothing has been tuned yet; run `lockstep tune RECIPE --ranks N` first.")
        for folder, profile in found.items():
            if profile:
                _show_profile(profile, folder, console)
        return
    _, wanted = read.load_recipe(target, settings or [])
    membership = read_membership(os.environ)
    if membership is None:
        with Template() as template:
            _, num_ranks = choose_num_ranks(ranks)
            if num_ranks == 1 and not has_gpu():
                raise LockstepError("One rank without a GPU has nothing to choose; ask for more with --ranks.")
            check_shares(wanted, num_ranks)
            open_sources(wanted.data, progress("Rendering images", console))
            if num_ranks > 1:
                arguments = ["tune", target, *(f"--set={setting}" for setting in settings or [])]
                raise typer.Exit(launch_ranks(template, (num_ranks, num_ranks), arguments))
    with (
        join_world(membership, backend=wanted.comm.backend, timeout_s=wanted.comm.timeout_s) as world,
        explain_failures(world),
    ):
        chosen, folder = tune_recipe(wanted, world)
        if world.is_first:
            _show_profile(chosen.profile, folder, console)


def _show_profile(profile: "Profile", folder: Path, console: Console) -> None:
    """What was measured, what was chosen, and why."""
    from lockstep.plan.choose import explain_choice
    from lockstep.report.phrases import describe_trials
    from lockstep.report.plan_tables import build_message_table, describe_fits, describe_setup

    for line in describe_setup(profile.setup):
        console.print(line, highlight=False)
    console.print(f"measured in {profile.seconds:.1f} s, kept in {folder}", highlight=False, soft_wrap=True)
    if profile.messages:
        console.print(build_message_table(profile.messages))
    for line in [*describe_fits(profile.fits), *describe_trials(explain_choice(profile.trials), profile.setup.batch)]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print()


def _plan_run(target: str, settings: list[str], out: Path | None, *, resume: bool) -> tuple[str, Path, RunConfig]:
    """The run's name, folder and configuration; on --resume the configuration is the one the run was started with."""
    if resume:
        folder = out or (Path(target) if Path(target).is_dir() else _find_last_run(target))
        if not (folder / "config.toml").is_file():
            raise LockstepError(
                f"{folder} is not a run's folder, so there is nothing to resume; start without --resume."
            )
        _, wanted = read.load_recipe(str(folder), settings)
        return folder.name, folder, wanted
    name, wanted = read.load_recipe(target, settings)
    return name, out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", wanted


def _was_begun(target: str, out: Path | None) -> bool:
    """Whether this rank was started again, and the run had left its configuration before it was lost."""
    if not count_restarts(os.environ):
        return False
    if out is None:
        name, _ = read.load_recipe(target)
        return any(Path("runs").glob(f"{name}-[0-9]*-[0-9]*/config.toml"))
    return (out / "config.toml").is_file()


def _find_last_run(target: str) -> Path:
    name, _ = read.load_recipe(target)
    runs = sorted(file.parent for file in Path("runs").glob(f"{name}-[0-9]*-[0-9]*/config.toml"))
    if not runs:
        raise LockstepError(f"No run of {name} lies under runs/; start without --resume, or give --out.")
    # One that ended before its first checkpoint is gone on with only if there is no other.
    return next((run for run in reversed(runs) if any(run.glob("checkpoints/step-*/manifest.json"))), runs[-1])


def _open_sink(world: "World", folder: Path, viewers: list[str]) -> "Sink":
    """Rank 0 writes the event log, draws the display and leaves the summary; the others say nothing."""
    from lockstep.report.display import build_display
    from lockstep.report.run import RunSink, SilentSink
    from lockstep.report.sinks import open_viewers

    if not world.is_first:
        return SilentSink()
    return RunSink(folder, build_display(Console(), folder), open_viewers(viewers, folder))


@recipes.callback()
def list_recipes(context: typer.Context) -> None:
    """List the packaged recipes."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", style="cyan", no_wrap=True)
    table.add_column("what it reproduces")
    for recipe in read.list_recipes():
        table.add_row(recipe.name, recipe.summary)
    Console().print(table)


@recipes.command("show")
def show_recipe(name: str) -> None:
    """Print a recipe."""
    print(read.recipe_text(name), end="")


@recipes.command("copy")
def copy_recipe(name: str, file: Path) -> None:
    """Copy a recipe to FILE, to change it and train with it."""
    read.copy_recipe(name, file)
    print(f"Copied {name} to {file}; train it with: lockstep train {file}")


@data.command("pack")
def pack_data(
    source: Annotated[
        Path,
        typer.Argument(parser=Path, help="A folder that holds train/ and val/, or Parquet files.", metavar="SRC"),
    ],
    target: Annotated[
        Path, typer.Argument(parser=Path, help="The shards' folder: new, empty, or a pack to finish.", metavar="DST")
    ],
    shard_mb: Annotated[float, typer.Option(min=0.001, help="About how many MB of files go into a shard.")] = 256.0,
    short_side: Annotated[
        int, typer.Option(min=0, help="Make images with a longer short side this small, in pixels; 0: keep all bytes.")
    ] = 0,
    quality: Annotated[int, typer.Option(min=1, max=100, help="JPEG quality of images made smaller.")] = 90,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")] = 0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave broken files out, and name them.")] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="Decode every image, rather than look at its header and its end.")
    ] = False,
    shuffle: Annotated[bool, typer.Option(help="Mix the samples in the shards; runs keep the folder's order.")] = True,
    val_share: Annotated[
        float, typer.Option(min=0, max=0.99, help="Keep this share of train/ for validation, instead of val/.")
    ] = 0.0,
) -> None:
    """Pack an image folder into tar shards with an index. Stopped at any time, the same command goes on."""
    from lockstep.data.pack import pack_folder
    from lockstep.report.display import progress

    console = Console()
    indexes = pack_folder(
        source.expanduser(),
        target.expanduser(),
        shard_mb=shard_mb,
        short_side=short_side,
        quality=quality,
        skip_bad=skip_bad,
        decode=decode,
        shuffle=shuffle,
        val_share=val_share,
        workers=workers,
        progress=lambda title: progress(title, console),
        say=print,
    )
    for name in (name for index in indexes for name in index.skipped):
        print(f"left out: {name}")
    print(
        f"Packed {sum(index.num_samples for index in indexes):,} samples of {len(indexes[0].classes):,} classes into "
        f"{sum(len(index.shards) for index in indexes):,} shards; train on them with --set data.path={target}"
    )


@data.command("index")
def index_data(
    target: Annotated[Path, typer.Argument(parser=Path, help="A folder of WebDataset's tar files.", metavar="DST")],
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")] = 0,
) -> None:
    """Read every byte of tar files of others, and leave an index with checksums beside them."""
    from lockstep.data.webdataset import index_tars
    from lockstep.report.display import progress

    indexes = index_tars(target.expanduser(), workers, progress("Reading", Console()))
    for name in (name for index in indexes for name in index.skipped):
        print(f"left out: {name}")
    print(f"Found {sum(index.num_samples for index in indexes):,} samples; train on them with --set data.path={target}")


@data.command("verify")
def verify_data(
    target: Annotated[Path, typer.Argument(parser=Path, help="A folder of packed shards.", metavar="DST")],
    decode: Annotated[bool, typer.Option("--decode", help="Decode every image too.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")] = 0,
) -> None:
    """Check every byte of packed shards, and name every damaged sample."""
    from lockstep.data.verify import verify_shards
    from lockstep.report.display import progress

    verdict = verify_shards(
        target.expanduser(), decode=decode, workers=workers, progress=progress("Verifying", Console())
    )
    for damage in verdict.damages:
        print(damage)
    if verdict.damages:
        raise LockstepError(
            f"{verdict.num_damaged:,} of {verdict.num_samples:,} samples in {target} are damaged, as listed; "
            "copy those shards again, or pack again into an empty folder."
        )
    print(f"All {verdict.num_samples:,} samples in {target} are whole.")


@data.command("info")
def show_data(
    path: Annotated[Path, typer.Argument(parser=Path, help="A folder of packed shards, or of images.", metavar="DST")],
) -> None:
    """Say what packed shards or an image folder hold."""
    from rich.table import Table

    from lockstep.data.inventory import take_inventory
    from lockstep.report.display import progress
    from lockstep.report.phrases import size

    console = Console()
    splits, settings = take_inventory(path.expanduser(), lambda title: progress(title, console))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("split", style="cyan")
    for heading in ("samples", "classes", "shards", "bytes", "mean"):
        table.add_column(heading, justify="right")
    for split in splits:
        counts = (split.num_samples, split.num_classes, split.num_shards)
        cells = [*(f"{count:,}" for count in counts), size(split.num_bytes), size(split.num_bytes // split.num_samples)]
        table.add_row(split.name, *cells)
    console.print(table)
    print(settings)
