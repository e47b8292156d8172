"""Lockstep from Python, and what the command `train` calls (step 0 on the walk). One page: docs/api.md.

    result = lockstep.train("quickstart", set={"train.duration": "2ep"}, out="runs/mine")
    print(result.accuracy, result.load().classes)

One process is the only rank, or joins the world of torchrun or Slurm. More ranks than one that a program asks for are
processes of their own (`apart.py`): the program may have threads and a GPU in use, and cannot be forked.
"""

import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from lockstep.config import RunConfig, to_toml
from lockstep.engine.starting import (
    MAX_SUMMARY_BYTES,
    Resume,
    Start,
    has_finished,
    phrase_finished,
    phrase_go_on,
    plan_start,
)
from lockstep.errors import LockstepError, SharedError
from lockstep.events import Event, Notice
from lockstep.files import read_small
from lockstep.named import GIVEN, describe, find_name, is_name, name_being_imported
from lockstep.processes import end_on_second, quit_on_interrupt
from lockstep.recipe_values import show
from lockstep.recipes.read import describe_kept_rate, write_setting
from lockstep.report.sinks import parse_viewers

if TYPE_CHECKING:
    from torch import nn

    from lockstep.comm.world import World
    from lockstep.data.given import GivenImage
    from lockstep.engine.brought import Brought
    from lockstep.engine.export import Exported
    from lockstep.engine.inference import Prediction, TrainedNetwork
    from lockstep.engine.reuse import Kept
    from lockstep.engine.scoring import Score
    from lockstep.events import Sink

Settings = Mapping[str, Any] | Sequence[str]
OnEvent = Callable[[Event], object]
Outcome = Literal["finished", "interrupted", "stopped"]
# What the command line's words are in a program.
OPTIONS = {
    r"--resume=auto\b": 'resume="auto"',
    r"--resume\b": "resume=True",
    r"--set ([\w.]+=[^\s;,()]*[^\s;,().])": r"set=['\1']",  # the value may stand in double quotes
    r"--set\b": "set=",
    r"--out\b": "out=",
    r"--ranks (\S+ is not possible|\d+)": r"ranks=\1",
    r"--log (\w+)": r'log="\1"',
    r"--(ranks|restarts|log)\b": r"\1",
}


@dataclass(frozen=True)
class Asked:
    """What is to be done, as the command line says it."""

    target: str  # a recipe's name, a file, or a run's folder
    settings: tuple[str, ...] = ()  # each `key=value`
    out: Path | None = None
    resume: Resume = "no"
    ranks: str | None = None
    restarts: int = 0
    log: str = ""
    quiet: bool = False


@dataclass(frozen=True)
class Ended:
    """How it ended: a word, or the status that a launcher's ranks left."""

    folder: Path
    outcome: Outcome
    status: int = 0


@dataclass(frozen=True)
class Result:
    """A run that has ended well, or that the program itself has stopped."""

    folder: Path
    summary: dict[str, Any]  # as `summary.json` has it; empty on a rank that does not see that file
    _model: Any = field(default=None, repr=False)

    @property
    def accuracy(self) -> float | None:
        """Top-1 on the validation data, in [0, 1], of the network that `load` gives; None before an evaluation."""
        average = self.summary.get("average_top1")
        return self.summary.get("top1") if average is None else average

    def load(self, *, device: "str | Any | None" = None, average: bool | None = None) -> "TrainedNetwork":
        """The trained network, its classes and its configuration, from the newest checkpoint."""
        return load(self.folder, model=self._model, device=device, average=average)

    def __repr__(self) -> str:
        accuracy = "none yet" if self.accuracy is None else f"{self.accuracy:.4f}"
        return f"Result({str(self.folder)!r}, {self.summary.get('status', 'no summary')}, accuracy {accuracy})"


def train(
    recipe: "str | Path | RunConfig",
    *,
    set: Settings = (),
    out: "str | Path | None" = None,
    ranks: "int | str | None" = None,
    resume: "bool | Literal['auto']" = False,
    model: "str | nn.Module | Callable[..., nn.Module] | None" = None,
    data: Any = None,
    loss: "str | Callable[..., Any] | None" = None,
    on_event: OnEvent | None = None,
    restarts: int = 0,
    log: str = "",
    quiet: bool = False,
) -> Result:
    """Train a recipe and wait for its end; a mistake is a LockstepError of one sentence.

    `recipe` is a name, a file, a run's folder or a RunConfig. `model`, `data` and `loss` replace the recipe's own, and
    `on_event` hears every record of `lockstep.events`. Ctrl-C leaves a checkpoint and is then raised.
    """
    if module := name_being_imported():
        raise LockstepError(
            f'{module} trains while it is being imported; put the call under if __name__ == "__main__".'
        )
    if not isinstance(resume, bool) and resume != "auto":
        raise LockstepError(f'resume = {show(resume)} is not possible; give True, False or "auto".')
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise LockstepError(f"restarts = {show(restarts)} is not possible; give a whole number from 0 on.")
    if on_event is not None and not callable(on_event):
        raise LockstepError(f"on_event = {describe(on_event)} cannot be called; give a function that takes a record.")
    settings, brought = bring(set, model, data, loss)
    with _as_target(recipe) as target, _speak_python():
        asked = Asked(
            target,
            settings,
            Path(out) if out is not None else None,
            "auto" if resume == "auto" else "yes" if resume else "no",
            str(ranks) if ranks is not None else None,
            restarts,
            log,
            quiet,
        )
        ended = carry_out(asked, brought, on_event, is_guest=True)
    if ended.outcome == "interrupted":
        raise KeyboardInterrupt(f"{ended.folder} was interrupted, and goes on with resume=True.")
    return Result(ended.folder, _read_summary(ended.folder), brought.model)


def load(
    run: "str | Path | Result",
    *,
    model: "nn.Module | Callable[..., nn.Module] | None" = None,
    device: "str | Any | None" = None,
    average: bool | None = None,
) -> "TrainedNetwork":
    """The network of a run's folder or of one checkpoint's; `model` again where the program had given it.

    Its weights are the averaged ones where there are some; with `average=False` those of the last step.
    """
    from lockstep.engine.inference import load_run

    path, brought = _find_run(run, model)
    return load_run(path, device=device, average=average, brought=brought)


def predict(
    trained: "str | Path | Result | TrainedNetwork",
    images: "GivenImage | Iterable[GivenImage]",
    *,
    top: int = 5,
    model: "nn.Module | Callable[..., nn.Module] | None" = None,
    device: "str | Any | None" = None,
    average: bool | None = None,
) -> "list[Prediction]":
    """The `top` classes of each image: files, folders of some, encoded images in memory, or PIL's; or of one alone."""
    from lockstep.engine.inference import TrainedNetwork, load_run, predict

    if isinstance(trained, TrainedNetwork):
        _refuse_with_loaded(model=model, device=device, average=average)
    else:
        path, brought = _find_run(trained, model)
        with _guest_manners():
            trained = load_run(path, device=device, average=average, brought=brought)
    return predict(trained, images, top=top)


def evaluate(
    trained: "str | Path | Result | TrainedNetwork",
    data: Any = None,
    *,
    model: "nn.Module | Callable[..., nn.Module] | None" = None,
    device: "str | Any | None" = None,
    average: bool | None = None,
) -> "Score":
    """How good a network is, class by class: on the run's own validation data, or on `data`, as `train` takes it.

    A network that is loaded is measured as it is, one of a run's folder in the run's own number format. `data` may
    also be one data set alone. All of it is measured here, in this process.
    """
    from lockstep.engine.inference import TrainedNetwork, choose_device, world_of
    from lockstep.engine.run import explain_failures

    if isinstance(trained, TrainedNetwork):
        _refuse_with_loaded(model=model, device=device, average=average)
        world = world_of(trained.device)
    else:
        world = world_of(choose_device(device))
    with _guest_manners(), explain_failures(world):
        _, result = evaluate_in(world, trained, data, model=model, average=average)
    assert result is not None  # the only rank is the first
    return result


def evaluate_in(
    world: "World",
    trained: "str | Path | Result | TrainedNetwork",
    data: Any = None,
    *,
    model: Any = None,
    average: bool | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> "tuple[TrainedNetwork, Score | None]":
    """The same as a rank of a world, which shares the images: the network, and on the first rank what it came to."""
    import torch

    from lockstep.engine.build import set_number_formats
    from lockstep.engine.inference import TrainedNetwork, choose_compute, find_run, load_run
    from lockstep.engine.scoring import open_scored, score
    from lockstep.recipes.read import load_recipe

    try:
        if not isinstance(trained, TrainedNetwork):
            path, brought = _find_run(trained, model)
            _, config = load_recipe(str(find_run(path)[0] / "config.toml"))
            # In the run's own number format, whatever the device: the counts shall be the run's own.
            compute = choose_compute(config, world.device, keeps=True)
            trained = load_run(path, device=world.device, compute=compute, average=average, warn=warn, brought=brought)
        source = open_scored(trained, data)
    except LockstepError as error:
        if world.size == 1:
            raise
        raise SharedError(str(error)) from error  # every rank comes to the same
    set_number_formats(trained.configure().precision)
    with torch.cuda.device(world.device) if world.device.type == "cuda" else nullcontext():
        return trained, score(trained, source, world)


def export(
    trained: "str | Path | Result | TrainedNetwork",
    format: "str | Sequence[str]" = "safetensors",
    out: "str | Path | None" = None,
    *,
    batch: int | None = None,
    card: bool = True,
    model: "nn.Module | Callable[..., nn.Module] | None" = None,
    average: bool | None = None,
) -> "list[Exported]":
    """Write the checkpoint's network for other programs, one file for each format, and a model card beside the first.

    Formats are safetensors, onnx and torch-export. `out` is RUN/export/model with the format's suffix if not given;
    with several formats each has its suffix. `batch` images at a time, or any number of them.
    """
    return list(export_each(trained, format, out, batch=batch, card=card, model=model, average=average))


def export_each(
    trained: "str | Path | Result | TrainedNetwork",
    format: "str | Sequence[str]",
    out: "str | Path | None",
    *,
    batch: int | None = None,
    card: bool = True,
    model: Any = None,
    average: bool | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> "Iterator[Exported]":
    """The same, heard of file by file."""
    from lockstep.engine.export import SUFFIXES, parse_formats
    from lockstep.engine.export import export as write
    from lockstep.engine.inference import TrainedNetwork, load_run

    names = [format] if isinstance(format, str) else format
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise LockstepError(f"format = {show(format)} is not possible; give one or more of {', '.join(SUFFIXES)}.")
    wanted = parse_formats(",".join(names))
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise LockstepError(f"batch = {show(batch)} is not possible; give a whole number from 1 on, or none for any.")
    if isinstance(trained, TrainedNetwork):
        _refuse_with_loaded(model=model, average=average)
        # From the FP32 weights of its checkpoint: those that are loaded may be rounded, and stay as they are.
        path, brought, average = trained.checkpoint, trained.brought, trained.is_average
    else:
        path, brought = _find_run(trained, model)
    files: dict[Path, str] = {}
    for kind in wanted:
        # Each anew: an exporter may leave its marks on a network.
        with _guest_manners():
            loaded = load_run(path, device="cpu", compute="fp32", average=average, warn=warn, brought=brought)
            base = Path(out).expanduser() if out is not None else loaded.run / "export" / "model.safetensors"
            file = base if out is not None and len(wanted) == 1 else base.with_suffix(SUFFIXES[kind])
            written = write(loaded, kind, file, batch)
        files[file] = kind
        yield written
    if card:
        _write_card(loaded, files)


def find_card(file: Path) -> Path:
    """Where the model card of an exported file lies."""
    return file.with_suffix(".md") if file.suffix != ".md" else file.with_name(f"{file.name}.md")


def _write_card(trained: "TrainedNetwork", files: Mapping[Path, str]) -> None:
    from lockstep import __version__
    from lockstep.engine.export import hide_places
    from lockstep.events import read_events
    from lockstep.files import write_whole
    from lockstep.report.model_card import Subject, build_card

    try:
        events = read_events(trained.run)
    except LockstepError:  # weights without records are still weights
        events = []
    config, names = hide_places(trained.config), {file.name: kind for file, kind in files.items()}
    subject = Subject(
        trained.run.name, trained.step, trained.classes, config, __version__, names, is_average=trained.is_average
    )
    target = find_card(next(iter(files)))
    try:
        write_whole(target, build_card(subject, events))
    except OSError as error:
        raise LockstepError(f"{target} cannot be written ({error.strerror}); choose another file.") from None


def _find_run(trained: "str | Path | Result", model: Any) -> "tuple[Path, Brought]":
    """The folder of a run or a checkpoint, and what the program gave to it."""
    from lockstep.engine.brought import Brought

    if isinstance(trained, Result):
        return trained.folder, Brought(model=trained._model if model is None else model)
    if not isinstance(trained, str | Path):
        raise LockstepError(
            f"{describe(trained)} is no trained network; give a run's folder, or what lockstep.load gives."
        )
    return Path(trained).expanduser(), Brought(model=model)


def _refuse_with_loaded(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise LockstepError(
                f"{name} = … is for a run's folder; this network is loaded already: give it to lockstep.load."
            )


def bring(set: Settings, model: Any, data: Any, loss: Any) -> "tuple[tuple[str, ...], Brought]":
    """Arguments as settings; what has no name that another process could look up stays an object."""
    from lockstep.engine.brought import Brought

    settings = [*_list_settings(set)]
    objects: dict[str, Any] = {}
    if data is not None and (isinstance(data, Path) or (isinstance(data, str) and not is_name(data))):
        settings += [write_setting("data.source", "folder"), write_setting("data.path", str(data))]
        data = None
    for argument, key, value in (
        ("model", "model.name", model),
        ("data", "data.source", data),
        ("loss", "optim.loss", loss),
    ):
        if value is None:
            continue
        name = value if isinstance(value, str) else find_name(value)
        settings.append(write_setting(key, name or GIVEN))
        if not name:
            objects[argument] = value
    return tuple(settings), Brought(**objects)


def _list_settings(given: Settings) -> list[str]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise LockstepError(f"set = {show(given)} must be a mapping of settings, or a list of texts key=value.")
    if isinstance(given, Mapping):
        return [write_setting(str(key), value) for key, value in given.items()]
    return [str(text) for text in given]


@contextmanager
def _speak_python() -> Iterator[None]:
    """Sentences that name options of the command name the arguments of `train`; whole commands stay as they are."""
    try:
        yield
    except LockstepError as error:
        text = str(error)
        if "lockstep train" not in text:
            for option, argument in OPTIONS.items():
                text = re.sub(option, argument, text)
            error.args = (text,)
        raise


@contextmanager
def _as_target(recipe: "str | Path | RunConfig") -> Iterator[str]:
    """A recipe as the command line takes it: a configuration becomes a file while it is needed."""
    if not isinstance(recipe, RunConfig):
        yield str(recipe)
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        file = Path(folder) / "custom.toml"
        file.write_text(to_toml(recipe), encoding="utf-8")
        yield str(file)


def _read_summary(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads(read_small(folder / "summary.json", MAX_SUMMARY_BYTES))
    except (OSError, ValueError, RecursionError):  # on another node, or the disk was full
        return {}
    return summary if isinstance(summary, dict) else {}


def carry_out(
    asked: Asked,
    brought: "Brought | None" = None,
    on_event: OnEvent | None = None,
    *,
    is_guest: bool = False,
    kept: "Kept | None" = None,
) -> Ended:
    """Start a run, or go on with it: as the one rank, as a rank of the world that this process is in, or by launching.

    A guest in somebody's program neither forks nor ends the process, and leaves PyTorch's settings as they were. One of
    several runs of a process finds what those before it have `kept`, and draws no page of its own.
    """
    viewers = parse_viewers(asked.log)
    start = plan_start(asked.target, list(asked.settings), asked.out, asked.resume)
    folder = start.folder
    with nullcontext() if is_guest else quit_on_interrupt():
        from lockstep.comm.world import read_membership
        from lockstep.engine.brought import NOTHING
        from lockstep.engine.launch import choose_num_ranks, read_range
        from lockstep.engine.run import run_rank
        from lockstep.engine.template import Template

    brought = brought or NOTHING
    membership = read_membership(os.environ)
    ranks = asked.ranks
    if membership is None:
        if asked.resume == "auto" and start.resume and has_finished(folder):
            if not asked.quiet:
                print(phrase_finished(folder))
            return Ended(folder, "finished")
        # First of all: before there are threads, and before a GPU is asked anything.
        with nullcontext() if is_guest else Template() as template:
            least, most = choose_num_ranks(ranks)
            is_alone = most == 1 and not asked.restarts
            if is_guest and not is_alone:
                return _launch_apart(asked, start, brought, on_event)
            _check_start(start, least, most, brought, is_alone=is_alone, kept=kept)
            ranks = ranks or str(most)
            if template is not None and not is_alone:
                return Ended(folder, "finished", _launch(template, asked, start, (least, most)))
    elif ranks is not None and not (wanted_ranks := read_range(ranks))[0] <= membership.size <= wanted_ranks[1]:
        raise LockstepError(f"--ranks {ranks} was given, but this world was started with {membership.size} ranks.")
    go_on = _phrase_go_on(start, ranks, asked)
    kept_rate = "" if start.resume else describe_kept_rate(asked.target, asked.settings)
    with _guest_manners() if is_guest else nullcontext():
        outcome = run_rank(
            start.config,
            start.name,
            folder,
            resume=start.resume,
            membership=membership,
            open_sink=partial(
                _open_sink, viewers=viewers, go_on=go_on, quiet=asked.quiet, draws=kept is None, warning=kept_rate
            ),
            may_be_finished=asked.resume == "auto",
            brought=brought,
            on_event=on_event,
            is_guest=is_guest,
            kept=kept,
        )
    return Ended(folder, outcome)


def _check_start(
    start: Start, least: int, most: int, brought: "Brought", *, is_alone: bool, kept: "Kept | None"
) -> None:
    """What is wrong with the ranks, the data or the folder is said once, before any rank starts."""
    from lockstep.engine.brought import has_own_data
    from lockstep.engine.build import open_sources
    from lockstep.engine.owner import check_unowned
    from lockstep.engine.passes import check_shares
    from lockstep.engine.run import prepare_folder
    from lockstep.report.display import progress

    for num_ranks in range(least, most + 1):
        check_shares(start.config, num_ranks)
    if not (is_alone and has_own_data(start.config.data.source)):  # whose labels may take long to ask for
        open_now = partial(open_sources, start.config.data, progress("Preparing images", Console()), brought)
        _ = kept.open_sources(start.config.data, open_now) if kept else open_now()
    check_unowned(start.folder)
    if not start.resume:
        prepare_folder(start.folder)


def _launch(template: Any, asked: Asked, start: Start, ranks: tuple[int, int]) -> int:
    """Be the launcher of ranks, which are children of this process, to their end; returns the exit status."""
    from lockstep.engine.identity import read_identity
    from lockstep.engine.launch import launch_ranks
    from lockstep.engine.owner import check_unowned
    from lockstep.engine.snapshot import clear_memory, find_memory

    # The number of ranks for what they say at the end.
    number = asked.ranks or str(ranks[1])
    with end_on_second((signal.SIGINT, signal.SIGTERM)):  # and with the launcher its ranks
        try:
            return launch_ranks(template, ranks, _spell(asked, start, number), asked.restarts)
        finally:
            with suppress(LockstepError):  # the folder is another launcher's run, which has snapshots of its own
                check_unowned(start.folder)
                if run := read_identity(start.folder):
                    clear_memory(find_memory(start.folder, run))  # nobody starts these ranks again


def _spell(asked: Asked, start: Start, ranks: str | None) -> list[str]:
    """The arguments of `lockstep` for a process that takes part in this run."""
    words = ["train", asked.target, "--out", str(start.folder), *(["--resume"] if start.resume else [])]
    words += [f"--set={setting}" for setting in asked.settings] + ([f"--log={asked.log}"] if asked.log else [])
    return [*words, *([f"--ranks={ranks}"] if ranks else []), f"--restarts={asked.restarts}"]


def _launch_apart(asked: Asked, start: Start, brought: "Brought", on_event: OnEvent | None) -> Ended:
    """Several ranks for a program: a launcher of their own, whose records the program hears as they are written."""
    from lockstep.apart import run_apart

    for argument in ("model", "data", "loss"):
        if (value := getattr(brought, argument)) is not None:
            raise LockstepError(
                f"{argument} = {describe(value)} has no name that other ranks could import; put it into a module as a "
                "function or class, start the program itself with torchrun, or ask for ranks=1 and no restarts."
            )
    outcome = run_apart(_spell(asked, start, asked.ranks), start.folder, on_event, quiet=asked.quiet)
    return Ended(start.folder, outcome)


def _phrase_go_on(start: Start, ranks: str | None, asked: Asked) -> str:
    """How to go on with the run: a program's own things only a program can give."""
    config = start.config
    given = {"model": config.model.name, "data": config.data.source, "loss": config.optim.loss}
    words = [f"{argument}=…" for argument, name in given.items() if name == GIVEN]
    if words:
        return f'lockstep.train("{start.folder}", resume=True, {", ".join(words)})'
    return phrase_go_on(start.folder, ranks, asked.restarts, asked.log)


def _open_sink(
    world: "World", folder: Path, viewers: list[str], go_on: str, quiet: bool, draws: bool, warning: str
) -> "Sink":
    """Rank 0 writes the event log, draws the display and leaves the summary; the others say nothing."""
    from lockstep.report.display import build_display
    from lockstep.report.run import RunSink, SilentSink
    from lockstep.report.sinks import open_viewers

    if not world.is_first:
        return SilentSink()
    display = SilentSink() if quiet else build_display(Console(), folder, go_on)
    sink = RunSink(folder, display, open_viewers(viewers, folder), draws=draws)
    if warning:
        sink.emit(Notice(level="warning", text=warning))
    return sink


@contextmanager
def _guest_manners() -> Iterator[None]:
    """While inside, PyTorch's switches and random state are the run's; then they are the program's again."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    switches: list[tuple[Any, str]] = [
        (matmul, "allow_tf32"),
        (matmul, "allow_fp16_reduced_precision_reduction"),
        (matmul, "allow_bf16_reduced_precision_reduction"),
        (cudnn, "allow_tf32"),
        (cudnn, "benchmark"),
    ]
    before = [getattr(place, name) for place, name in switches]
    num_threads = torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
            for (place, name), value in zip(switches, before, strict=True):
                setattr(place, name, value)
