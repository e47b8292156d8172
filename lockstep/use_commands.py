"""The commands that use a trained network, evaluate, predict and export: what `engine` finds, told by `report`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.errors import LockstepError
from lockstep.processes import quit_on_interrupt

if TYPE_CHECKING:
    from lockstep.engine.inference import Prediction, TrainedNetwork
    from lockstep.engine.scoring import Score

Run = Annotated[Path, typer.Argument(parser=Path, help="A run's folder, or one of its checkpoints.", metavar="RUN")]
Average = Annotated[
    bool | None,
    typer.Option(
        "--average/--no-average",
        help="The averaged weights, or those of the last step; averaged ones where there are some, if not given.",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write all of it as JSON.")]
MOST_SHOWN = 10  # classes and mistakes in the terminal; all of them are in the JSON file
FEW_IMAGES = 100  # take no time worth a word
LEAST_FOR_TOP5 = 6  # classes: of five, one of the first five is always right


def add_use_commands(app: typer.Typer) -> None:
    """Give the command line `evaluate`, `predict` and `export`."""
    app.command("evaluate")(evaluate)
    app.command("predict")(predict)
    app.command("export")(export)


def predict(
    run: Run,
    images: Annotated[
        list[Path], typer.Argument(parser=Path, help="Images, or folders that hold some.", metavar="IMAGE|FOLDER…")
    ],
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many classes to name for each image.")] = 5,
    json_file: Json = None,
    html: Annotated[Path | None, typer.Option(help="Write a contact sheet that opens offline.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda; a GPU if there is one, if not given.")] = None,
    average: Average = None,
) -> None:
    """Say what is in images, by the names of the run's classes. Exits with 1 if an image could not be read."""
    with quit_on_interrupt():
        from lockstep.data.given import find_images
        from lockstep.engine.inference import load_run
        from lockstep.engine.inference import predict as ask
        from lockstep.report.display import print_plain, progress

    _check_targets(json_file, html)
    files, notes = find_images([place.expanduser() for place in images])
    for note in notes:
        _warn(note)
    trained = load_run(run, device=device, average=average, warn=_warn)
    show = progress("Predicting", Console(stderr=True)) if len(files) > FEW_IMAGES else None
    answers = ask(trained, files, top=top, progress=show)
    console = Console()
    for answer in answers:
        print_plain(console, f"{answer.name}: {_phrase(answer)}")
    if json_file:
        _write(json_file, _dump(_list_predictions(trained, answers, notes)))
    if html:
        _write(html, _draw_sheet(trained, files, answers))
    if broken := [answer for answer in answers if answer.failure]:
        raise LockstepError(
            f"{len(broken):,} of {len(answers):,} images could not be read, as listed; all others were looked at."
        )


def _phrase(answer: "Prediction") -> str:
    from lockstep.report.phrases import percent

    if answer.failure:
        return f"could not be read ({answer.failure})"
    return ", ".join(f"{guess.name} {percent(guess.probability)}" for guess in answer.guesses)


def _list_predictions(trained: "TrainedNetwork", answers: "list[Prediction]", notes: tuple[str, ...]) -> dict[str, Any]:
    return _name_network(trained) | {
        "images": [
            {
                "file": answer.name,
                "top": [
                    {"class": guess.name, "label": guess.label, "probability": guess.probability}
                    for guess in answer.guesses
                ],
            }
            for answer in answers
            if not answer.failure
        ],
        "unreadable": [{"file": answer.name, "reason": answer.failure} for answer in answers if answer.failure],
        "notes": list(notes),
    }


def _draw_sheet(trained: "TrainedNetwork", files: list[Path], answers: "list[Prediction]") -> str:
    from lockstep.data.given import GivenImages
    from lockstep.engine.mistakes import draw_small
    from lockstep.report.page.contact_sheet import MOST_IMAGES, Shot, build_contact_sheet

    source = GivenImages(files)
    readable = [place for place, answer in enumerate(answers) if not answer.failure]
    shots = [
        Shot(
            answers[place].name,
            [(guess.name, guess.probability) for guess in answers[place].guesses],
            draw_small(source, place) if number < MOST_IMAGES else "",
        )
        for number, place in enumerate(readable)
    ]
    unreadable = [(answer.name, answer.failure) for answer in answers if answer.failure]
    return build_contact_sheet(name_weights(trained), shots, unreadable)


def evaluate(
    run: Run,
    data: Annotated[
        Path | None,
        typer.Argument(
            parser=Path,
            help="A folder of what train reads, or class folders; the run's own validation data if not given.",
            metavar="DATA",
        ),
    ] = None,
    json_file: Json = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="N", help="Ranks to start; one per GPU, or 1 on the CPU, if not given.")
    ] = None,
    average: Average = None,
) -> None:
    """Measure a run's network: top-1, top-5, class by class, and what it takes for what."""
    with quit_on_interrupt():
        from lockstep.api import evaluate_in
        from lockstep.comm.world import join_world, read_membership
        from lockstep.engine.inference import find_run, load_run
        from lockstep.engine.launch import choose_num_ranks, launch_ranks
        from lockstep.engine.run import explain_failures
        from lockstep.engine.scoring import open_scored
        from lockstep.engine.template import Template
        from lockstep.recipes.read import load_recipe

    _check_targets(json_file)
    folder, _ = find_run(run.expanduser())
    _, config = load_recipe(str(folder / "config.toml"))
    membership = read_membership(os.environ)
    if membership is None:
        with Template() as template:
            _, num_ranks = choose_num_ranks(ranks)
            if num_ranks > 1:
                # Once, before any rank starts: it may have to be indexed or packed, and what is wrong is said once.
                _ = open_scored(load_run(run, device="cpu", average=average), str(data) if data else None)
                arguments = ["evaluate", str(run), *([str(data)] if data else [])]
                arguments += [f"--json={json_file}"] if json_file else []
                arguments += [] if average is None else ["--average" if average else "--no-average"]
                raise typer.Exit(launch_ranks(template, (num_ranks, num_ranks), arguments))
    with (
        join_world(membership, backend=config.comm.backend, timeout_s=config.comm.timeout_s) as world,
        explain_failures(world),
    ):
        warn = _warn if world.is_first else _ignore
        trained, result = evaluate_in(world, run, str(data) if data else None, average=average, warn=warn)
    if result:
        told = f"the validation data of {trained.run.name}" if data is None else str(data)
        _show_score(trained, result, told)
        if json_file:
            _write(json_file, _dump(_list_score(trained, result, told)))


def _show_score(trained: "TrainedNetwork", result: "Score", told: str) -> None:
    from lockstep.report.compare import build_rich
    from lockstep.report.display import print_plain
    from lockstep.report.page.charts import Numbers
    from lockstep.report.phrases import percent, plural

    console, accuracy, names = Console(), result.accuracy, trained.classes
    mirror = ", each with its mirror image" if trained.config.data.eval_flip else ""
    print_plain(console, f"{name_weights(trained)}, on {told}: {plural(accuracy.total, 'image')}{mirror}")
    absent = [names[place] for place, (_, total) in enumerate(result.classes) if not total]
    if absent:
        listed = ", ".join(absent[:MOST_SHOWN]) + (", …" if len(absent) > MOST_SHOWN else "")
        print_plain(console, f"{len(absent):,} of the network's {len(names):,} classes have no image here: {listed}")
    for note in result.notes:
        print_plain(console, note)
    for name in result.unreadable[:MOST_SHOWN]:
        print_plain(console, f"left out: {name}")
    if len(result.unreadable) > MOST_SHOWN:
        print_plain(console, f"left out: {len(result.unreadable) - MOST_SHOWN:,} more")
    print_plain(console, f"top-1  {percent(accuracy.top1)}  ({accuracy.correct1:,} of {accuracy.total:,})")
    if len(names) >= LEAST_FOR_TOP5:
        print_plain(console, f"top-5  {percent(accuracy.top5)}  ({accuracy.correct5:,} of {accuracy.total:,})")
    else:
        print_plain(console, f"top-5  says nothing of {len(names)} classes")
    print_plain(console, f"loss   {accuracy.loss:.4f}")
    present = [(right / total, place) for place, (right, total) in enumerate(result.classes) if total]
    rows = [
        [names[place], percent(share), f"{result.classes[place][0]:,}", f"{result.classes[place][1]:,}"]
        for share, place in sorted(present)[:MOST_SHOWN]
    ]
    if rows:
        console.print(build_rich(Numbers(["class", "accuracy", "right", "images"], rows), "Classes, the worst first"))
    wrong = [[names[label], names[answer], f"{times:,}"] for label, answer, times in result.mistakes[:MOST_SHOWN]]
    if wrong:
        console.print(build_rich(Numbers(["class", "taken for", "how often"], wrong), "The most frequent mistakes"))


def _list_score(trained: "TrainedNetwork", result: "Score", told: str) -> dict[str, Any]:
    accuracy = result.accuracy
    top5 = {"top5": accuracy.top5, "correct5": accuracy.correct5} if len(trained.classes) >= LEAST_FOR_TOP5 else {}
    return _name_network(trained) | {
        "data": told,
        "total": accuracy.total,
        "top1": accuracy.top1,
        "correct1": accuracy.correct1,
        **top5,
        "loss": accuracy.loss,
        "classes": [
            {"class": name, "correct": right, "total": total, "accuracy": right / total if total else None}
            for name, (right, total) in zip(trained.classes, result.classes, strict=True)
        ],
        "confusion": [
            {"class": trained.classes[label], "taken_for": trained.classes[answer], "count": times}
            for label, answer, times in result.confusion
        ],
        "unreadable": result.unreadable,
        "notes": list(result.notes),
    }


def export(
    run: Run,
    formats: Annotated[
        str, typer.Option("--format", help="safetensors, onnx or torch-export; several by commas.")
    ] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="RUN/export/model.safetensors, .onnx or .pt2 if not given.")] = None,
    batch: Annotated[
        str, typer.Option(help="Images at a time in onnx and torch-export: dynamic, or a number.", metavar="N|dynamic")
    ] = "dynamic",
    card: Annotated[bool, typer.Option(help="Write a model card beside, by the file's name with .md.")] = True,
    average: Average = None,
) -> None:
    """Write a run's network for other programs, each file checked against the network before it is there."""
    with quit_on_interrupt():
        from lockstep.api import export_each, find_card
        from lockstep.engine.export import TOLERANCE
        from lockstep.report.phrases import size

    if batch != "dynamic" and not (batch.isascii() and batch.isdecimal() and len(batch) < 8 and int(batch) > 0):
        raise LockstepError(f'--batch {batch[:40]} is not possible; give a number from 1 on, or "dynamic".')
    files: list[Path] = []
    count = None if batch == "dynamic" else int(batch)
    for written in export_each(run, formats, out, batch=count, card=card, average=average, warn=_warn):
        files.append(written.file)
        agrees = f"; its logits are the network's to within {written.difference:.1e}, {TOLERANCE:g} being allowed"
        is_checked = written.kind != "safetensors"
        print(f"Wrote {written.file} ({size(written.num_bytes)}){agrees if is_checked else ''}.")
    if card:
        print(f"Wrote {find_card(files[0])}")


def name_weights(trained: "TrainedNetwork") -> str:
    """Which weights these are, in a few words."""
    return f"{trained.run.name}, step {trained.step:,}{', averaged weights' if trained.is_average else ''}"


def _name_network(trained: "TrainedNetwork") -> dict[str, Any]:
    names = {"run": trained.run.name, "step": trained.step, "class_names": list(trained.classes)}
    return names | ({"average": True} if trained.is_average else {})


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _check_targets(*files: Path | None) -> None:
    """Say what is wrong with where results shall go before they are computed."""
    for file in files:
        if file and (file.expanduser().is_dir() or not file.expanduser().absolute().parent.is_dir()):
            raise LockstepError(f"{file} cannot be written: it is a folder, or lies in none; choose another file.")


def _write(file: Path, text: str) -> None:
    from lockstep.files import write_whole

    try:
        write_whole(file.expanduser(), text)
    except OSError as error:
        raise LockstepError(f"{file} cannot be written ({error.strerror}); choose another file.") from None
    print(f"Wrote {file}")


def _warn(text: str) -> None:
    typer.echo(f"lockstep: {text}", err=True)


def _ignore(text: str) -> None:
    """Another rank says it."""
