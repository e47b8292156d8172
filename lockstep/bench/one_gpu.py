"""A whole training step on one GPU beside the best a user assembles from torchvision, in one run.

The peer's settings are the ones people write: channels-last, autocast with a loss scaler, torch.compile, fused SGD;
all of them are measured and the best counts. Both sides stay in memory and take turns. Compilation is timed apart.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lockstep.bench.results import check_files, write_rows
from lockstep.comm.world import World, join_world
from lockstep.config import DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.engine.build import assemble, build_network, set_number_formats
from lockstep.engine.execution import choose_execution
from lockstep.engine.tune import fake_batch
from lockstep.errors import LockstepError
from lockstep.models import RESNET_DEPTHS
from lockstep.optim.schedule import Schedule

Step = Callable[[], object]
CLASSES = 1000
IMAGE_SIZE = 224
LR, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.9, 5e-5
# By name: number format, channels-last, how torch.compile is called.
PEERS: dict[str, tuple[str, bool, str]] = {
    "fp32": ("fp32", False, ""),
    "tf32": ("tf32", False, ""),
    "fp16": ("fp16", True, ""),
    "fp16-compiled": ("fp16", True, "default"),
    "bf16-compiled": ("bf16", True, "default"),
    "fp16-compiled-graphs": ("fp16", True, "reduce-overhead"),
}


def parse_batches(text: str) -> list[int]:
    """Batch sizes from "256,512"."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise LockstepError(f"--batch {text} is no list of batch sizes; write them as 256,512.")
    return sizes


def pick_peers(text: str) -> list[str]:
    """Peers by name, with commas; all if nothing is said, none for "none"."""
    names = [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PEERS]:
        raise LockstepError(f"--peers knows no {unknown[0]}; choose from {', '.join(PEERS)}, or none.")
    return names if text else list(PEERS)


@dataclass(frozen=True)
class Row:
    """One side at one batch size."""

    name: str
    setting: str
    model: str
    batch: int
    images_per_second: float
    step_s: float
    spread_s: float
    prepare_s: float  # building, compiling and recording, until the first timed step
    memory_bytes: int
    tflops: float
    matrix_share: float  # of the speed of one large FP16 matrix product, measured in the same run


@dataclass
class Side:
    """A step that can be taken, with what it cost to get there."""

    name: str
    setting: str
    step: Step
    prepare_s: float
    memory_bytes: int


def measure(model: str, batch: int, peers: list[str], world: World, rounds: int, console: Console) -> list[Row]:
    """Build every side, then let them take turns."""
    sides = []
    for build in _builders(model, batch, peers, world):
        try:
            sides.append(_prepare(build))
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            console.print(f"left out: {' '.join(str(error).split())[:160]}", highlight=False)
        gc.collect()
        torch.cuda.empty_cache()
        if sides:
            console.print(f"  {sides[-1].name} ready after {sides[-1].prepare_s:.0f} s", highlight=False)
    counts = [max(2, int(0.25 / _time(side.step, 2))) for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, count, values in zip(sides, counts, times, strict=True):
            side.step()
            values.append(_time(side.step, count))
    flops, peak = count_flops(model, batch, world), measure_matrix_product(world)
    return [_row(side, model, batch, values, flops, peak) for side, values in zip(sides, times, strict=True)]


def _row(side: Side, model: str, batch: int, times: list[float], flops: float, peak: float) -> Row:
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    return Row(
        name=side.name,
        setting=side.setting,
        model=model,
        batch=batch,
        images_per_second=batch / median,
        step_s=median,
        spread_s=quartiles[2] - quartiles[0],
        prepare_s=side.prepare_s,
        memory_bytes=side.memory_bytes,
        tflops=flops / median / 1e12,
        matrix_share=flops / median / peak,
    )


def _time(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def _prepare(build: Callable[[], tuple[str, str, Step]]) -> Side:
    """Build a side and take its first steps, with the memory it takes at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    name, setting, step = build()
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    return Side(name, setting, step, time.perf_counter() - start, torch.cuda.max_memory_allocated() - before)


def _builders(model: str, batch: int, peers: list[str], world: World) -> Iterator[Callable[[], tuple[str, str, Step]]]:
    yield lambda: _build_lockstep(model, batch, world)
    for peer in peers:
        yield lambda peer=peer: (f"torchvision, {peer}", "", build_peer(model, batch, world.device, *PEERS[peer]))  # type: ignore[misc]


def _build_lockstep(model: str, batch: int, world: World) -> tuple[str, str, Step]:
    """Our whole step: FP16, dynamic loss scale, LARS; executed the way the measurement before step 0 chooses."""
    config = RunConfig(
        data=DataConfig(image_size=IMAGE_SIZE),
        model=ModelConfig(name=model),  # type: ignore[arg-type]
        optim=OptimConfig(name="lars", lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, label_smoothing=0.0),
        precision=PrecisionConfig(compute="fp16"),
        train=TrainConfig(global_batch=batch, duration="1ep", max_batch_per_rank=batch),  # type: ignore[arg-type]
    )
    said: list[str] = []
    set_number_formats(config.precision)
    parts = assemble(config, world, build_network(config, CLASSES), Schedule("constant", LR, total_steps=1))
    step = choose_execution(config, parts, world, 1, said.append)
    images = fake_batch(config, world)
    return "lockstep, fp16, LARS", said[-1], lambda: step(images, LR, False)


def build_peer(
    model: str, batch: int, device: torch.device, precision: str, channels_last: bool, compiled: str
) -> Step:
    """The loop everyone writes, with torchvision's network."""
    import torchvision

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network: nn.Module = getattr(torchvision.models, model)(weights=None, num_classes=CLASSES)
    network = network.to(device).to(memory_format=layout).train()  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    images = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE, device=device).to(memory_format=layout)
    labels = torch.randint(0, CLASSES, (batch,), device=device)
    forward: Any = torch.compile(network, mode=compiled) if compiled else network

    def step() -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", half) if half else nullcontext():
            loss = nn.functional.cross_entropy(forward(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def count_flops(model: str, batch: int, world: World) -> float:
    """Floating-point operations of a step, as PyTorch counts those of convolutions and matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    config = RunConfig(
        data=DataConfig(image_size=IMAGE_SIZE),
        model=ModelConfig(name=model),  # type: ignore[arg-type]
        optim=OptimConfig(name="sgd", lr=LR),
        train=TrainConfig(global_batch=2, duration="1ep"),  # type: ignore[arg-type]
    )
    network = build_network(config, CLASSES).to(world.device).train()
    with FlopCounterMode(display=False) as counter:
        network(torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, device=world.device)).sum().backward()
    return float(counter.get_total_flops() * batch / 2)


def measure_matrix_product(world: World) -> float:
    """Floating-point operations per second of one large FP16 matrix product."""
    size = 8192
    a, b = (torch.randn(size, size, device=world.device, dtype=torch.float16) for _ in range(2))
    return float(2 * size**3 / min(_time(lambda: a @ b, 10) for _ in range(5)))


def describe(rows: list[Row], console: Console) -> None:
    """A table, the quickest peer marked, and our ratio to it."""
    table = Table(box=None, header_style="bold")
    for column in ("model", "batch", "images/s", "ms", "TFLOP/s", "of a matmul", "GiB", "prepared in", "ratio", "side"):
        table.add_column(column, justify="left" if column in ("model", "side") else "right")
    for row in rows:
        alike = [other for other in rows if (other.model, other.batch) == (row.model, row.batch)]
        ours = next((other for other in alike if other.name.startswith("lockstep")), row)
        best = max((other for other in alike if other is not ours), key=lambda r: r.images_per_second, default=row)
        table.add_row(
            row.model,
            str(row.batch),
            f"{row.images_per_second:,.0f}",
            f"{row.step_s * 1e3:.2f}",
            f"{row.tflops:.0f}",
            f"{100 * row.matrix_share:.0f} %",
            f"{row.memory_bytes / 2**30:.1f}",
            f"{row.prepare_s:.0f} s",
            f"{ours.images_per_second / row.images_per_second:.2f}x" + (" *" if row is best else ""),
            row.name,
        )
    console.print(table)
    console.print("ratio: Lockstep's speed over this side's; * the quickest peer", highlight=False)


def run(*, models: list[str], batches: list[int], peers: list[str], rounds: int, json_file: Path | None = None) -> None:
    """Measure every model and batch; print a table and write the rows."""
    if unknown := [model for model in models if model not in ("alexnet", *RESNET_DEPTHS)]:
        raise LockstepError(f"--model {unknown[0]} is unknown; choose alexnet or {', '.join(RESNET_DEPTHS)}.")
    check_files(json_file, None)
    if not torch.cuda.is_available():
        raise LockstepError("`bench step --against torchvision` needs a GPU, and this machine shows none.")
    console = Console()
    if peers:
        try:
            import torchvision  # noqa: F401
        except ImportError:
            raise LockstepError(
                "torchvision is not installed; `pip install torchvision` to measure beside it."
            ) from None
    rows: list[Row] = []
    with join_world(None) as world:
        for model in models:
            for batch in batches:
                console.print(f"{model}, batch {batch}", highlight=False)
                rows += measure(model, batch, peers, world, rounds, console)
                gc.collect()
                torch.cuda.empty_cache()
                torch.compiler.reset()
                if json_file is not None:
                    write_rows(json_file, [asdict(row) for row in rows])
        describe(rows, console)
        for row in rows:
            if row.name.startswith("lockstep"):
                console.print(f"{row.model}, batch {row.batch}: {row.setting}", highlight=False)
