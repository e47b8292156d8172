"""What came of whole trainings beside timm: a row for each, and a table with a line for each network and side."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lockstep.bench.timm_training import Trained, Training
from lockstep.commit import read_commit

OURS, TIMM = "lockstep", "timm"  # the sides


@dataclass(frozen=True)
class Row:
    """One training; speed and memory as `Trained` defines them."""

    name: str  # of the side
    model: str
    seed: int
    data: str
    batch: int
    image_size: int
    precision: str
    epochs: int
    lr: float
    weights: str
    compiled: bool
    top1: float
    correct: int
    total: int
    images: int
    images_per_second: float
    seconds: float  # from the start of the process to its end
    memory_bytes: int | None
    commit: str


def build_row(name: str, asked: Training, trained: Trained, seconds: float) -> Row:
    """All that is known of one training."""
    case = asked.case
    return Row(
        name=name,
        model=case.model,
        seed=asked.seed,
        data=case.data,
        batch=case.batch,
        image_size=case.image_size,
        precision=case.precision,
        epochs=asked.epochs,
        lr=asked.lr,
        weights=asked.weights,
        compiled=asked.compiled,
        top1=trained.correct / trained.total,
        correct=trained.correct,
        total=trained.total,
        images=trained.images,
        images_per_second=trained.images_per_second,
        seconds=seconds,
        memory_bytes=trained.memory_bytes,
        commit=read_commit(),
    )


def describe(rows: Sequence[Row], console: Console) -> None:
    """A table with a line for each network and side."""
    table = Table(box=None, header_style="bold")
    for column in ("model", "side", "seeds", "top-1 %", "difference", "images/s", "seconds", "GiB"):
        is_name = column in ("model", "side")
        table.add_column(column, justify="left" if is_name else "right", overflow="fold", no_wrap=column != "model")
    for model in dict.fromkeys(row.model for row in rows):
        by_side = {side: [row for row in rows if (row.model, row.name) == (model, side)] for side in (OURS, TIMM)}
        for name, found in by_side.items():
            if found:
                others = by_side[TIMM] if name == OURS else []
                table.add_row(model, name, *describe_side(found, others))
    console.print(table)
    console.print(
        "top-1: mean ± standard deviation over the seeds; difference: of the means, in points, ± its standard error; "
        "images/s: median, over the epochs after the first; seconds: median, of the whole process",
        highlight=False,
        soft_wrap=True,
    )


def describe_side(found: Sequence[Row], others: Sequence[Row]) -> list[str]:
    """The cells of one side, and how far its mean is from the others'."""
    mean, deviation = spread([row.top1 for row in found])
    difference = "-"
    if others:
        other_mean, other_deviation = spread([row.top1 for row in others])
        error = math.hypot(deviation / math.sqrt(len(found)), other_deviation / math.sqrt(len(others)))
        difference = f"{100 * (mean - other_mean):+.2f} ± {_points(error)}"
    memory = [row.memory_bytes for row in found if row.memory_bytes is not None]
    return [
        str(len(found)),
        f"{100 * mean:.2f} ± {_points(deviation)}",
        difference,
        f"{statistics.median(row.images_per_second for row in found):,.0f}",
        f"{statistics.median(row.seconds for row in found):,.0f}",
        f"{max(memory) / 2**30:.1f}" if memory else "-",
    ]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, which one value does not have."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def _points(share: float) -> str:
    return "?" if math.isnan(share) else f"{100 * share:.2f}"
