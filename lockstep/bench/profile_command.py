"""`lockstep profile`: measure a recipe's step on this machine for a planner, and say what was found."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep.config import DataConfig
from lockstep.errors import LockstepError
from lockstep.processes import quit_on_interrupt
from lockstep.recipes import read

if TYPE_CHECKING:
    from lockstep.data.sources import Source

NUM_PHOTOS = 48
PHOTO_SAMPLES = 1 << 16  # that they stand for: enough that no epoch ends while the input is measured


def add_profile(app: typer.Typer) -> None:
    """Give the command line `profile`."""
    app.command("profile")(profile)


def profile(
    target: Annotated[str, typer.Argument(help="A recipe's name or a TOML file.", metavar="RECIPE")],
    batches: Annotated[
        str, typer.Option("--batch", help="Images of one device, with commas; 16 to 512 on a GPU, 4 to 16 on a CPU.")
    ] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads of a CPU; 0: as many as cores.")] = 0,
    note: Annotated[str, typer.Option(help="Words to keep with it, such as the commit.")] = "",
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting; repeatable.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the profile to this file.")] = None,
) -> None:
    """Measure a recipe's step on this device over batches: layers, gradients, memory, update, input."""
    _, wanted = read.load_recipe(target, settings or [])
    with quit_on_interrupt():
        import torch

        from lockstep.bench.one_gpu import parse_batches
        from lockstep.bench.results import check_files
        from lockstep.comm.world import count_cores, join_world
        from lockstep.engine.profiling import profile_device
        from lockstep.files import write_whole
        from lockstep.plan.device import LONGEST_TEXT, MAX_BATCH, to_json
        from lockstep.report.device_table import build_batch_table, build_layer_table, describe_profile

    sizes = parse_batches(batches) if batches else []
    if sizes and max(sizes) > MAX_BATCH:
        raise LockstepError(f"--batch {max(sizes)} is more than the {MAX_BATCH:,} images that a device may have.")
    if threads > count_cores():
        raise LockstepError(f"--threads {threads} is more than the {count_cores()} cores of this machine.")
    if len(note) > LONGEST_TEXT // 2 or "[/" in note:
        raise LockstepError(f"--note is to be plain text of at most {LONGEST_TEXT // 2} characters.")
    check_files(json_file, None)
    console = Console()
    source, origin = open_images(wanted.data, console)
    with join_world(None) as world:
        if threads:
            torch.set_num_threads(threads)
            world = replace(world, num_threads=threads)
        found = profile_device(
            wanted,
            world,
            source,
            sizes,
            note="; ".join(filter(None, [note, origin])),
            say=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
        )
    for line in describe_profile(found):
        console.print(line, highlight=False, soft_wrap=True)
    for way in found.executions:
        console.print(build_batch_table([row for row in found.batches if row.execution == way]))
    console.print(build_layer_table(found.at(max(row.batch for row in found.batches))))
    if json_file is not None:
        write_whole(json_file, to_json(found))
        console.print(f"Wrote {json_file}", highlight=False, soft_wrap=True)


def open_images(data: DataConfig, console: Console) -> tuple["Source", str]:
    """The recipe's images, or photos of a thousand classes where it has none here; and a word on which."""
    from lockstep.bench.photos import Repeated, build_photos
    from lockstep.data.generated import default_cache
    from lockstep.data.sources import scan_folder
    from lockstep.engine.build import open_sources
    from lockstep.report.display import progress

    if data.source == "generated" or Path(data.path).expanduser().is_dir():
        return open_sources(data, progress("Preparing images", console)).train, ""
    folder = build_photos(default_cache(), NUM_PHOTOS, progress("Rendering photos", console))
    console.print(f"data.path = {data.path} is not here: generated photos take its place", markup=False)
    return Repeated(scan_folder(folder.parent, (folder.name,)), PHOTO_SAMPLES), "input from generated photos"
