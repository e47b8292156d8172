"""Whole trainings of timm's networks through Lockstep beside the loop of timm's users: accuracy, speed, seconds.

Each training is a process of its own, sides in turns from seed to seed; what both do is `timm_training.py`, and the
table is `trainings_report.py`. One that fails is named and left out.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import torch
from rich.console import Console

from lockstep.bench.beside_timm import MODELS, open_images, parse_models
from lockstep.bench.results import check_files, write_rows
from lockstep.bench.timm_peers import Case
from lockstep.bench.timm_training import Trained, Training, ask_ours, ask_timm, read_ours, read_timm
from lockstep.bench.trainings_report import OURS, TIMM, Row, build_row, describe
from lockstep.comm.world import count_cores
from lockstep.errors import LockstepError
from lockstep.models.outside import require
from lockstep.models.weights import read_weights
from lockstep.processes import LAUNCHER

PREFIX = "lockstep: "  # of a process's last sentence
LONGEST = 300  # characters of what others say
Precision = Literal["fp32", "fp16", "bf16"]


class Side(NamedTuple):
    """Who trains: what is typed after `python -m`, and how the result is read back."""

    name: str
    ask: Callable[[Training, Path], list[str]]
    read: Callable[[Training, Path], Trained]


SIDES = (Side(OURS, ask_ours, read_ours), Side(TIMM, ask_timm, read_timm))


def run(
    *,
    data: Path | None,
    models: str | None = None,
    epochs: int = 5,
    seeds: str = "0,1,2",
    batch: int = 256,
    image_size: int = 224,
    precision: Precision | None = None,
    lr: float = 1e-3,
    weights: Path | None = None,
    compiled: bool | None = None,
    json_file: Path | None = None,
    console: Console | None = None,
) -> None:
    """Train every network with every seed on both sides; print a table and write the rows."""
    console = console or Console()
    names, numbers = parse_models(models or MODELS), parse_seeds(seeds)
    check_files(json_file, None)
    require("timm", "`bench train`")
    on_gpu = torch.cuda.is_available()
    case = Case(names[0], batch, image_size, precision or ("bf16" if on_gpu else "fp32"), 0, threads=count_cores())
    asked = Training(case, 0, epochs, 0, lr, check_weights(weights), on_gpu if compiled is None else compiled)
    asked = open_training(asked, data)
    rows: list[Row] = []
    for name in names:
        asked = replace(asked, case=replace(asked.case, model=name))
        _say(describe_training(asked), console)
        for place, seed in enumerate(numbers):
            for side in SIDES if place % 2 == 0 else reversed(SIDES):  # whoever comes first finds files unread
                row = measure(side, replace(asked, seed=seed), lambda line: _say(line, console))
                rows += [row] if row else []
                if json_file is not None:
                    write_rows(json_file, [asdict(row) for row in rows])
    if not rows:
        raise LockstepError("No training came to its end, for the reasons above; nothing was measured.")
    describe(rows, console)


def parse_seeds(text: str) -> list[int]:
    """Different seeds from "0,1,2"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise LockstepError(f"--seeds {text[:80]} is no list of seeds; write whole numbers as 0,1,2.")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) < len(numbers):
        raise LockstepError(f"--seeds {text[:80]} names a seed twice, which would count as chance; name each once.")
    return numbers


def check_weights(file: Path | None) -> str:
    """Where the weights lie, once they have been read without a mistake."""
    if file is None:
        return ""
    if not file.expanduser().is_file():
        raise LockstepError(f"--weights {file} is no file; give a state_dict as .safetensors or .pth.")
    path = file.expanduser().absolute()
    read_weights(path)
    return str(path)


def open_training(asked: Training, data: Path | None) -> Training:
    """The same, from a folder that both sides read alike."""
    if data is None:
        raise LockstepError("--data is missing; name an image folder with train/<class>/ and val/<class>/.")
    sources = open_images(data, asked.case.batch, ("train", "val"))
    case = replace(asked.case, data=str(data.expanduser().absolute()), classes=len(sources.train.classes))
    return replace(asked, case=case, samples=sources.train.num_samples)


def describe_training(asked: Training) -> str:
    """What both sides are about to do."""
    case, start = asked.case, asked.weights or "drawn weights"
    return (
        f"{case.model}: {asked.epochs} epochs of {asked.samples:,} images, {case.classes} classes, batch {case.batch}, "
        f"{case.image_size} pixels, {case.precision}, lr {asked.lr:g}, {'' if asked.compiled else 'not '}compiled, "
        f"from {case.data}, starting from {start}"
    )


def measure(side: Side, asked: Training, say: Callable[[str], None]) -> Row | None:
    """One training to its end; None, and a word, if it fails."""
    case, name = asked.case, f"{side.name}, seed {asked.seed}"
    with TemporaryDirectory(prefix="lockstep-train-") as folder:
        start = time.perf_counter()
        failure = run_apart(side.ask(asked, Path(folder)))
        seconds = time.perf_counter() - start
        try:
            if failure:
                raise LockstepError(failure)
            trained = side.read(asked, Path(folder))
        except (LockstepError, OSError) as error:
            say(f"left out: {case.model}, {name}: {error}")
            return None
    for note in trained.notes:
        say(f"  {name}: {note}")
    rate = trained.images_per_second
    say(f"  {name}: {trained.correct:,} of {trained.total:,} right, {rate:,.0f} images/s, {seconds:.0f} s")
    return build_row(side.name, asked, trained, seconds)


def run_apart(words: Sequence[str]) -> str:
    """Run a program of ours to its end; why it failed, or nothing."""
    places = [str(Path(place).absolute()) for place in sys.path]  # modules are found where this process finds them
    done = subprocess.run(
        [sys.executable, "-m", *words],
        # It ends with this process, however this one ends.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), LAUNCHER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for this process to act on
    )
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    said = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)] or lines[-1:]
    return said[0][:LONGEST] if said else f"its process ended with exit code {done.returncode}"


def _say(line: str, console: Console) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
