"""The command `lockstep plan`: how long a recipe would take on a cluster, before anyone rents it. Torch-free."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.plan.prediction import Prediction

MAX_SIZES = 200  # in one plan


def add_plan_command(app: typer.Typer) -> None:
    """Give the command line `plan`."""
    app.command("plan")(plan)


def plan(
    target: Annotated[
        str | None, typer.Argument(help="A recipe's name or a TOML file; `clusters` lists them.", metavar="RECIPE")
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="A cluster of `lockstep plan clusters`, or a cluster file; the recipe's if not given.")
    ] = "",
    devices: Annotated[str, typer.Option(help="How many devices, by commas.")] = "8,64,512,2048",
    batch_per_device: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="Images for each device under weak scaling; 0: as many as fit.")
    ] = 0,
    target_minutes: Annotated[
        float, typer.Option(min=0, help="Find the fewest devices that take no longer; 0: do not.")
    ] = 0.0,
    profile: Annotated[
        Path | None, typer.Option(help="A device profile of `lockstep profile`, for a device that none ships for.")
    ] = None,
    images: Annotated[int, typer.Option(min=0, max=10**12, help="Training images; 0: as ImageNet has.")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting; repeatable.")] = None,
    rules: Annotated[bool, typer.Option("--rules", help="Compare update rules, whole and sharded.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all of it as JSON.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with sliders for devices, batch and network.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Leave a run's folder for one size, as if it had run; `lockstep report` draws it."),
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Predict published runs, and the paper's claims, instead of a recipe.")
    ] = False,
) -> None:
    """Predict time, scaling, cost and what binds for a recipe on a cluster; nothing runs."""
    from rich.console import Console

    console = Console()
    if validate:
        if target is not None:
            raise LockstepError("--validate predicts published runs; leave the recipe out.")
        if html_file is not None:
            raise LockstepError("--validate has no page; leave --html out, or give a recipe.")
        _validate(console, json_file)
        return
    if target is None:
        raise LockstepError("Give a recipe to plan, `clusters` to list clusters, or --validate.")
    if target == "clusters":
        from lockstep.plan.cluster import list_clusters
        from lockstep.report.plan_display import build_cluster_table

        clusters = list_clusters()
        console.print(build_cluster_table(clusters))
        for one in clusters:
            console.print(f"{one.name}: {one.summary}", highlight=False, markup=False)
        return
    _plan_recipe(
        console,
        target,
        settings or [],
        cluster,
        _read_sizes(devices),
        batch_per_device,
        target_minutes,
        profile,
        images,
        rules,
        json_file,
        html_file,
        out,
    )


def _read_sizes(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(words) > MAX_SIZES or not all(w.isascii() and w.isdigit() and 1 <= len(w) <= 9 for w in words):
        raise LockstepError(f"--devices {text[:60]} is no list of sizes; write some such as 8,64,512.")
    return sorted({int(word) for word in words})


def _plan_recipe(
    console: "Console",
    target: str,
    settings: list[str],
    cluster_name: str,
    sizes: list[int],
    batch_per_device: int,
    target_minutes: float,
    profile_file: Path | None,
    images: int,
    rules: bool,
    json_file: Path | None,
    html_file: Path | None,
    out: Path | None,
) -> None:
    from lockstep.plan.cluster import read_planned
    from lockstep.plan.grid import build_grid
    from lockstep.plan.optimizers import compare_rules
    from lockstep.plan.predicted import write_predicted
    from lockstep.plan.prediction import Impossible, Prediction, to_json
    from lockstep.plan.search import build_case, predict, search
    from lockstep.plan.shipped import read_file
    from lockstep.plan.sweep import find_smallest, plan_sizes
    from lockstep.plan.workload import describe_workload, find_profile, refuse_changed
    from lockstep.recipes.read import load_recipe
    from lockstep.report.page.forecast_page import build_forecast
    from lockstep.report.plan_display import build_rule_table, describe_impossible

    name, config = load_recipe(target, settings)
    cluster_name = cluster_name or config.comm.cluster
    if not cluster_name:
        raise LockstepError("A plan needs --cluster; `lockstep plan clusters` lists them, and a file may be given.")
    workload = describe_workload(name, config, images)
    cluster = read_planned(cluster_name)
    if profile_file:
        device = read_file(profile_file.expanduser())
    else:
        refuse_changed(name, config)
        device = find_profile(cluster.machine.device, workload.model)
    if device.model != workload.model:
        raise LockstepError(f"The profile is of {device.model}, and {name} trains {workload.model}; give one of that.")
    if target_minutes:
        best, seen = find_smallest(workload, device, cluster, 60 * target_minutes)
        if best is None:
            quickest = min(seen, key=lambda one: one.train_s)
            raise LockstepError(
                f"No cluster of {cluster.name} trains {name} in {target_minutes:g} minutes: {quickest.devices:,} "
                f"devices take {quickest.train_s / 60:.3g}, and more help no further. {quickest.advice}"
            )
        console.print(f"{best.devices:,} devices are the fewest of {cluster.name} in {target_minutes:g} minutes:")
        sizes = [best.devices]
    if html_file is not None and not os.access(html_file.expanduser().absolute().parent, os.W_OK):
        raise LockstepError(f"{html_file} cannot be written; choose another --html.")  # before seconds of simulating
    if out is not None:
        if len(sizes) != 1:
            raise LockstepError("--out leaves one run's folder; give one size with --devices.")
        case = build_case(workload, device, cluster, sizes[0], batch_per_device)
        found = search(case)
        write_predicted(out.expanduser(), case, found, predict(case, found), config)
        console.print(f"Wrote a predicted run to {out}; draw it with: lockstep report {out}", highlight=False)
    rows = plan_sizes(workload, device, cluster, sizes, batch_per_device)
    possible = [row for row in rows if isinstance(row, Prediction)]
    impossible = [row for row in rows if isinstance(row, Impossible)]
    if not any(row.scaling == "strong" for row in possible):  # the recipe as it is cannot run at any of these sizes
        raise LockstepError(impossible[0].reason)
    if json_file:
        _write(json_file, to_json(rows))
    _show_plan(console, possible)
    for row in impossible:
        console.print(describe_impossible(row), highlight=False, soft_wrap=True, markup=False)
    if html_file:
        console.print("Simulating every setting of the page's sliders ...", highlight=False)
        grid = build_grid(workload, device, cluster, sizes, batch_per_device)
        _write(html_file, build_forecast(rows, grid, workload, cluster))
        console.print(f"Wrote {grid.num_settings:,} settings to {html_file}", highlight=False, markup=False)
    if rules:
        console.print(build_rule_table(compare_rules(workload, device, cluster, sizes, batch_per_device)))


def _show_plan(console: "Console", predictions: "list[Prediction]") -> None:
    from lockstep.report.plan_display import (
        LEGEND,
        build_need_table,
        build_plan_table,
        describe_size,
        draw_scaling,
        draw_steps,
    )

    first = predictions[0]
    console.print(f"{first.recipe} on {first.cluster}, {first.device}", highlight=False, markup=False)
    console.print(f"profile {first.profile}", highlight=False, markup=False, soft_wrap=True)
    for scaling in ("strong", "weak"):
        rows = [one for one in predictions if one.scaling == scaling]
        if not rows:
            continue
        what = f"global batch {rows[0].global_batch:,}" if scaling == "strong" else f"{rows[0].batch_per_device:,} each"
        console.print(build_plan_table(rows, f"{scaling} scaling, {what}, {rows[0].epochs:g} epochs"))
        console.print(build_need_table(rows))
        for heading, lines in (
            ("images per second of each device; dots: up to its best", draw_scaling(rows)),
            (f"a step: {LEGEND}", draw_steps(rows)),
            ("", [line for one in rows for line in describe_size(one)]),
        ):
            console.print(heading, highlight=False, style="bold", markup=False)
            for line in lines:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print()
    for note in dict.fromkeys(note for one in predictions for note in one.notes):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def _validate(console: "Console", json_file: Path | None) -> None:
    from lockstep.plan.published import check_claims, check_published
    from lockstep.report.plan_display import build_checked_table, build_claim_table, list_check_notes

    rows = check_published()
    if json_file:
        _write(json_file, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    claims = check_claims()
    console.print(build_checked_table(rows))
    for line in list_check_notes(rows):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(build_claim_table(claims))
    for claim in claims:
        console.print(f"{claim.claim}: {claim.verdict}", highlight=False, markup=False, soft_wrap=True)


def _write(file: Path, text: str) -> None:
    from lockstep.files import write_whole

    try:
        write_whole(file.expanduser(), text)
    except OSError as error:
        raise LockstepError(f"{file} cannot be written ({error.strerror}); choose another file.") from None
