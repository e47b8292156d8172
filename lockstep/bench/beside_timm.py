"""A whole training step of timm's networks beside the loop that a user of timm writes, in one run.

On data in memory it is the step alone; from an image folder, reading, decoding and cropping too. Every side has a
process of its own and they take turns (`turns.py`); what they are is `timm_peers.py`.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from lockstep.bench import timm_peers
from lockstep.bench.results import check_files, write_rows
from lockstep.bench.timm_peers import PEERS, Case
from lockstep.bench.turns import Entry, Outcome, take_turns
from lockstep.comm.world import count_cores
from lockstep.config import DataConfig
from lockstep.engine.build import Sources, open_sources
from lockstep.errors import LockstepError
from lockstep.models.outside import require

MODELS = "timm:convnext_tiny,timm:vit_small_patch16_224"
CLASSES = 1000  # of noise in memory
LIMIT_S = 480.0  # for compiling, on both sides
READY_BATCHES = 2  # that each worker of a DataLoader keeps ready; ours keep no more
WARM_UP_STEPS = 2  # of a turn, which are not timed
OURS = "lockstep"


@dataclass(frozen=True)
class Row:
    """One side of one case; memory as `turns.Ready` defines it."""

    name: str
    setting: str
    model: str
    data: str  # the folder, or "memory"
    batch: int
    image_size: int
    precision: str
    images_per_second: float
    step_s: float
    spread_s: float
    ratio: float  # speed of Lockstep as a run would feed it over this side's: the median over the rounds
    rounds: int
    prepare_s: float
    memory_bytes: int
    peak_bytes: int


def run(
    *,
    models: str | None = None,
    batches: Sequence[int],
    image_size: int | None = None,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
    data: Path | None = None,
    peers: list[str],
    rounds: int,
    json_file: Path | None = None,
    console: Console | None = None,
) -> None:
    """Measure every network and batch; print a table and write the rows."""
    console = console or Console()
    names = parse_models(models or MODELS)
    check_files(json_file, None)
    require("timm", "`bench step --against timm`")
    on_gpu = torch.cuda.is_available()
    case = Case(names[0], 1, image_size or 224, precision or ("bf16" if on_gpu else "fp32"), CLASSES)
    if data is not None:
        case = open_case(case, data, smallest=max(batches))
    rows: list[Row] = []
    for name in names:
        for batch in batches:
            asked = replace(case, model=name, batch=batch)
            _say(f"{name}, batch {batch}, {case.image_size} pixels, {case.precision}, from {_place(case)}", console)
            rows += build_rows(asked, measure(asked, peers, rounds, console))
            if json_file is not None:
                write_rows(json_file, [asdict(row) for row in rows])
    describe(rows, console)


def parse_models(text: str) -> list[str]:
    """Networks of timm's from "timm:convnext_tiny,timm:vit_small_patch16_224"."""
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if not name.startswith("timm:")]:
        raise LockstepError(f"--model {wrong[0][:80]} is none of timm's; write timm:NAME, such as timm:convnext_tiny.")
    return names


def open_case(case: Case, data: Path, smallest: int) -> Case:
    """The same, fed from an image folder that both sides can read: `train/<class>/…`, and `val/` for ours."""
    train = open_images(data, smallest).train
    threads = count_cores()
    chunk = -(-READY_BATCHES * (threads + 1) // WARM_UP_STEPS)
    folder = str(data.expanduser().absolute())
    return replace(case, data=folder, classes=len(train.classes), threads=threads, chunk=chunk)


def open_images(data: Path, smallest: int, needed: Sequence[str] = ("train",)) -> Sources:
    """An image folder with at least a batch to train with."""
    folder = data.expanduser().absolute()
    if missing := [split for split in needed if not (folder / split).is_dir()]:
        raise LockstepError(
            f"--data {data} holds no {missing[0]}/; name an image folder with train/<class>/ and val/<class>/."
        )
    sources = open_sources(DataConfig(source="folder", path=str(folder)))
    if sources.train.num_samples < smallest:
        raise LockstepError(
            f"--data {data} has {sources.train.num_samples:,} images to train with, fewer than a batch of {smallest}; "
            "lower --batch."
        )
    return sources


def measure(case: Case, peers: list[str], rounds: int, console: Console) -> list[Outcome]:
    """Ours and timm's in turns."""
    entries = [Entry(OURS, timm_peers.build_ours, (case, "auto"))]
    if case.data and torch.cuda.is_available():  # where decoded images may stay on the device, which timm has no way to
        entries.append(Entry(f"{OURS}, every image decoded", timm_peers.build_ours, (case, "off")))
    entries += [Entry(f"timm, {peer}", timm_peers.build_timm, (case, PEERS[peer])) for peer in peers]
    return take_turns(entries, rounds=rounds, limit_s=LIMIT_S, say=lambda line: _say(line, console))


def build_rows(case: Case, outcomes: Sequence[Outcome]) -> list[Row]:
    """Each side's speed, and ours over it, round by round."""
    ours = next((outcome for outcome in outcomes if outcome.name == OURS), None)
    rows = []
    for outcome in outcomes:
        seconds = [time_s / case.chunk for time_s in outcome.times]
        pairs = zip(outcome.times, ours.times, strict=True) if ours else ()
        quartiles = statistics.quantiles(seconds, n=4)
        rows.append(
            Row(
                name=outcome.name,
                setting=outcome.ready.setting,
                model=case.model,
                data=case.data or "memory",
                batch=case.batch,
                image_size=case.image_size,
                precision=case.precision,
                images_per_second=case.batch / statistics.median(seconds),
                step_s=statistics.median(seconds),
                spread_s=quartiles[2] - quartiles[0],
                ratio=statistics.median([theirs / own for theirs, own in pairs]) if ours else 0.0,
                rounds=len(seconds),
                prepare_s=outcome.ready.prepare_s,
                memory_bytes=outcome.ready.memory_bytes,
                peak_bytes=outcome.ready.peak_bytes,
            )
        )
    return rows


def describe(rows: list[Row], console: Console) -> None:
    """A table, and how Lockstep took its steps."""
    table = Table(box=None, header_style="bold")
    for column in ("model", "batch", "images/s", "ms", "± ms", "GiB", "ready in", "ratio", "side"):
        table.add_column(column, justify="left" if column in ("model", "side") else "right", overflow="fold")
    for row in rows:
        table.add_row(
            row.model,
            str(row.batch),
            f"{row.images_per_second:,.0f}",
            f"{row.step_s * 1e3:.2f}",
            f"{row.spread_s * 1e3:.2f}",
            f"{row.memory_bytes / 2**30:.1f}",
            f"{row.prepare_s:.0f} s",
            f"{row.ratio:.2f}x" if row.ratio else "-",
            row.name,
        )
    console.print(table)
    _say(
        "ratio: Lockstep's speed over this side's, the median over the rounds; ±: the distance of the quartiles",
        console,
    )
    for row in rows:
        if row.name.startswith(OURS) and row.setting:
            _say(f"{row.model}, batch {row.batch}, {row.name}: {row.setting}", console)


def _place(case: Case) -> str:
    return case.data or "memory"


def _say(line: str, console: Console) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
