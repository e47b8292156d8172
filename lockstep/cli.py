"""The commands. Each imports its package only when it runs, so that --help and mistakes answer at once."""

import io
import os
import shlex
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from lockstep import __version__
from lockstep.bench.commands import bench
from lockstep.bench.profile_command import add_profile
from lockstep.engine.starting import Resume
from lockstep.errors import Followed, LockstepError, SharedError
from lockstep.processes import (
    follow_launcher,
    name_process,
    quit_on_interrupt,
    say_interrupted,
    spare_imports,
    speaks_for_all,
    speaks_for_node,
    stop_status,
)
from lockstep.recipes import read
from lockstep.recipes.complaints import describe_option
from lockstep.recipes.recipe_commands import recipes
from lockstep.report.export_commands import exports
from lockstep.report.page_commands import add_commands as add_page_commands
from lockstep.report.plan_commands import add_plan_command
from lockstep.restarts import OUTCOME, leave_outcome
from lockstep.sweep_command import add_sweep_command
from lockstep.terminal import drop_failed, escape, is_of_output, say
from lockstep.use_commands import add_use_commands

if TYPE_CHECKING:
    from lockstep.plan.profile import Profile


class Program(TyperGroup):
    """All commands: Ctrl-C in any of them has a word, where typer would end without one."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say_interrupted()
            raise typer.Exit(130) from None


app = typer.Typer(
    name="lockstep",
    cls=Program,
    help="Train image models by synchronous data parallelism, from a laptop to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(recipes, name="recipes")
data = typer.Typer(help="Pack images into shards, check them, and say what they hold.", no_args_is_help=True)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
add_profile(app)
add_page_commands(app)
add_plan_command(app)
app.add_typer(exports)
add_use_commands(app)
add_sweep_command(app)


def main() -> None:
    """Run a command; output that cannot be written is a non-zero exit without a word."""
    try:
        _answer_mistakes()
    except SystemExit as end:
        if drop_failed(sys.stdout) and not end.code:
            raise SystemExit(1) from None
        raise
    except OSError as error:
        if not drop_failed(sys.stdout) and not is_of_output(error, sys.stdout):
            raise
        sys.exit(1)


def _answer_mistakes() -> None:
    """Run a command; a user's mistake is one sentence and a non-zero exit."""
    try:
        with spare_imports():
            _run_command()
    except LockstepError as error:
        if _is_said_here(error):
            say(f"lockstep: {escape(str(error))}", sys.stderr)
        # What all ranks have come to would come again; a rank that lost the others is to be started again.
        sys.exit(leave_outcome(1, os.environ) if isinstance(error, SharedError) else 1)
    except KeyboardInterrupt:
        say_interrupted()
        sys.exit(130)


def _is_said_here(error: LockstepError) -> bool:
    """Whether it is this process that says it, where several would."""
    if isinstance(error, SharedError):
        return speaks_for_all(os.environ)
    return not isinstance(error, Followed) or speaks_for_node(os.environ)


def _run_command() -> None:
    follow_launcher(os.environ)
    if "RANK" in os.environ:
        name_process(f"lockstep:{os.environ['RANK']}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text
    app()


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


class TrainCommand(TyperCommand):
    """An option of another trainer is a sentence that says what it is here, and --resume may have no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {option for parameter in self.params for option in parameter.opts}
        for argument, after in zip_longest(args, args[1:], fillvalue=""):
            option, equals, text = argument.partition("=")
            if option == "--out" and not (text if equals else after):  # a path without a name is the current folder
                raise LockstepError("--out was given no name; name the run's folder, or leave --out away.")
            if not option.startswith("--") or option in known:
                continue
            text = text if equals or after.startswith("-") else after
            if sentence := describe_option(option, read.toml_value(text) if text else None):
                raise LockstepError(sentence)
        return super().parse_args(ctx, spell_resume(args))


def spell_resume(arguments: list[str]) -> list[str]:
    """The arguments with a value for every --resume: without one it would take the recipe's name for it."""
    spelt: list[str] = []
    for argument in arguments:
        if argument == "auto" and spelt[-1:] == ["--resume=yes"]:
            spelt[-1] = "--resume=auto"
        else:
            spelt.append("--resume=yes" if argument == "--resume" else argument)
    return spelt


@app.command(cls=TrainCommand)
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
    resume: Annotated[
        Resume,
        typer.Option(
            metavar="[=auto]",
            show_default=False,
            help="Go on from the run's last good checkpoint; =auto: start the run in --out, or go on with it there.",
        ),
    ] = "no",
    restarts: Annotated[
        int, typer.Option(min=0, help="How often ranks are started again, from where they were, when one is lost.")
    ] = 0,
    log: Annotated[str, typer.Option(help="Also log to tensorboard, wandb, mlflow, mlperf; several by commas.")] = "",
) -> None:
    """Train a recipe. Under torchrun or srun, join that world; otherwise start the ranks."""
    from lockstep.api import Asked, carry_out

    try:
        ended = carry_out(Asked(target, tuple(settings or ()), out, resume, ranks, restarts, log))
    finally:
        drop_failed(sys.stdout, sys.stderr)  # the end of a run is not that of its words
    if ended.outcome == "interrupted":
        # Ranks that one launcher started leave the same word, whichever of them the signal came to.
        raise typer.Exit(leave_outcome(130, os.environ) if OUTCOME in os.environ else stop_status())
    if ended.status:
        raise typer.Exit(ended.status)


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
        from lockstep.engine.build import open_sources
        from lockstep.engine.launch import choose_num_ranks, has_gpu, launch_ranks
        from lockstep.engine.passes import check_shares
        from lockstep.engine.planning import tune_recipe
        from lockstep.engine.run import explain_failures
        from lockstep.engine.setup import default_plan_folder
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
                _show_profile(profile, folder, console, "remembered")
        return
    _, wanted = read.load_recipe(target, settings or [])
    membership = read_membership(os.environ)
    if membership is None:
        with Template() as template:
            _, num_ranks = choose_num_ranks(ranks)
            if num_ranks == 1 and not has_gpu():
                raise LockstepError("One rank without a GPU has nothing to choose; ask for more with --ranks.")
            check_shares(wanted, num_ranks)
            open_sources(wanted.data, progress("Preparing images", console))
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


def _show_profile(
    profile: "Profile", folder: Path, console: Console, source: Literal["measured", "remembered"] = "measured"
) -> None:
    """What was measured, what was chosen, and why."""
    from lockstep.report.plan_tables import build_message_table, describe_choice, describe_fits, describe_setup

    for line in describe_setup(profile.setup):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"kept in {folder}", highlight=False, soft_wrap=True)
    if profile.messages:
        console.print("\nAll-reduces in milliseconds by the size of a message, the best of each size marked:")
        console.print(build_message_table(profile.messages))
    for line in [*describe_fits(profile), *describe_choice(profile, source)]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print()


def _say_data(folder: Path) -> str:
    """The settings that train on what lies in a folder."""
    return f"--set data.source=folder --set {shlex.quote(f'data.path={folder}')}"


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
        f"{sum(len(index.shards) for index in indexes):,} shards; train on them with {_say_data(target)}"
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
    print(f"Found {sum(index.num_samples for index in indexes):,} samples; train on them with {_say_data(target)}")


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
