"""A whole training step on one GPU beside the best a user assembles from torchvision, in one run.

The peer's settings are the ones people write: channels-last, autocast with a loss scaler, torch.compile, fused SGD;
all of them are measured and the best counts. Another checkout of Lockstep, such as the one before a change, may take
part too. Every side has a process of its own and they take turns (`turns.py`); this process never touches the GPU.
Compilation is timed apart.
"""

import importlib
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lockstep.bench import torchvision_peers
from lockstep.bench.results import check_files, write_rows
from lockstep.bench.torchvision_peers import CLASSES, IMAGE_SIZE, LR, MOMENTUM, PEERS, WEIGHT_DECAY
from lockstep.bench.turns import Entry, Outcome, Step, take_turns
from lockstep.comm.world import join_world
from lockstep.config import DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.engine.apply import apply_plan
from lockstep.engine.build import assemble, build_network, set_number_formats
from lockstep.engine.measure import fake_batch
from lockstep.engine.planning import choose_plan
from lockstep.errors import LockstepError
from lockstep.models import RESNET_DEPTHS, build_model
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import explain_choice
from lockstep.report.phrases import describe_trials

PRODUCT_SIZE = 8192
PRODUCT_ROUNDS, PRODUCT_TURN_S = 5, 0.02
OURS, PEER = "lockstep", "torchvision"  # what the names of sides begin with
NOTED_PEAK = 1.02  # a peak beyond this much of the steady state is shown beside it


@dataclass(frozen=True)
class Row:
    """One side at one batch size; memory as `turns.Ready` defines it."""

    name: str
    setting: str
    model: str
    batch: int
    images_per_second: float
    step_s: float
    spread_s: float
    prepare_s: float  # building, compiling and recording, until the first timed step
    memory_bytes: int
    peak_bytes: int
    tflops: float
    matrix_share: float  # of the speed of one large FP16 matrix product, measured in the same run


def parse_batches(text: str) -> list[int]:
    """Batch sizes from "256,512"."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise LockstepError(f"--batch {text} is no list of batch sizes; write them as 256,512.")
    return sizes


def run(
    *,
    models: list[str],
    batches: list[int],
    peers: list[str],
    rounds: int,
    before: Path | None = None,
    json_file: Path | None = None,
) -> None:
    """Measure every model and batch; print a table and write the rows. `before` is another checkout of Lockstep."""
    if unknown := [model for model in models if model not in ("alexnet", *RESNET_DEPTHS)]:
        raise LockstepError(f"--model {unknown[0]} is unknown; choose alexnet or {', '.join(RESNET_DEPTHS)}.")
    if before is not None and not (before / "lockstep" / "bench" / "one_gpu.py").is_file():
        raise LockstepError(f"--before {before} is no checkout of Lockstep with this benchmark; name its top folder.")
    check_files(json_file, None)
    if not torch.cuda.is_available():
        raise LockstepError("`bench step --against torchvision` needs a GPU, and this machine shows none.")
    flops = {model: _count_both(model, peers) for model in models}
    console = Console()
    matrix_flops = measure_matrix_product(console)
    rows: list[Row] = []
    for model in models:
        for batch in batches:
            console.print(f"{model}, batch {batch}", highlight=False)
            for outcome in measure(model, batch, peers, rounds, console, before):
                own = not outcome.name.startswith(PEER)
                rows.append(_row(outcome, model, batch, flops[model][own] * batch, matrix_flops))
            if json_file is not None:
                write_rows(json_file, [asdict(row) for row in rows])
    describe(rows, console)
    for row in rows:
        if _is_ours(row.name):
            console.print(f"{row.model}, batch {row.batch}: {row.setting}", highlight=False)


def measure(
    model: str, batch: int, peers: list[str], rounds: int, console: Console, before: Path | None = None
) -> list[Outcome]:
    """Ours, ours of another checkout, and the peers in turns."""
    entries = [Entry(f"{OURS}, fp16, LARS", build_ours, (model, batch))]
    if before is not None:
        entries.append(Entry(f"before, {before.name}", build_before, (str(before.resolve()), model, batch)))
    for peer in peers:
        entries.append(Entry(f"{PEER}, {peer}", torchvision_peers.build_peer, (model, batch, *PEERS[peer])))
    return take_turns(entries, rounds=rounds, say=lambda line: _say(line, console))


def build_ours(model: str, batch: int) -> tuple[str, Step]:
    """Our whole step: FP16, dynamic loss scale, LARS; executed the way the measurement before step 0 chooses."""
    config = RunConfig(
        data=DataConfig(image_size=IMAGE_SIZE),
        model=ModelConfig(name=model),
        optim=OptimConfig(name="lars", lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, label_smoothing=0.0),
        precision=PrecisionConfig(compute="fp16"),
        train=TrainConfig(global_batch=batch, duration="1ep", max_batch_per_rank=batch),  # type: ignore[arg-type]
    )
    set_number_formats(config.precision)
    with join_world(None) as world:  # of one rank: nothing is left to close
        parts = assemble(config, world, build_network(config, CLASSES), Schedule("constant", LR, total_steps=1))
        chosen = choose_plan(config, parts, world)
        plan = chosen.plan
        step = apply_plan(plan.execution, plan.reduction, parts, batch, batch, recording=chosen.recording)
        images = fake_batch(config, world)
    lines = describe_trials(explain_choice(chosen.profile.trials), batch)
    return "\n".join([str(plan.execution), *lines]), lambda: step(images, LR, False)


def build_before(folder: str, model: str, batch: int) -> tuple[str, Step]:
    """The same step by another checkout, whose modules take the place of ours in this process.

    But for those that let sides take turns: what this process answers must be of the classes that its parent knows.
    """
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "lockstep" and name != take_turns.__module__
    ]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    other = importlib.import_module("lockstep.bench.one_gpu")
    if not Path(str(other.__file__)).is_relative_to(folder):
        raise LockstepError(f"{other.__file__} was found in place of the module of {folder}.")
    found: tuple[str, Step] = other.build_ours(model, batch)
    return found


def measure_matrix_product(console: Console) -> float:
    """Floating-point operations per second of one large FP16 matrix product."""
    entry = Entry("one large matrix product", build_matrix_product)
    found = take_turns([entry], rounds=PRODUCT_ROUNDS, turn_s=PRODUCT_TURN_S, say=lambda line: _say(line, console))
    if not found:
        raise LockstepError("The GPU failed at one large matrix product, as said above; check it with nvidia-smi.")
    return float(2 * PRODUCT_SIZE**3 / min(found[0].times))


def build_matrix_product() -> tuple[str, Step]:
    """A large FP16 matrix product as a step."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=torch.float16) for _ in range(2))
    return "", lambda: a @ b


def _count_both(model: str, peers: list[str]) -> dict[bool, float]:
    """Operations on one image of our network (True) and of torchvision's, which differ for AlexNet."""
    with torch.device("meta"):
        networks = {True: build_model(model, CLASSES, image_size=IMAGE_SIZE)}
        if peers:
            networks[False] = torchvision_peers.build_network(model)
    return {is_ours: count_flops(network) for is_ours, network in networks.items()}


def count_flops(network: nn.Module) -> float:
    """Floating-point operations of a step on one image, as PyTorch counts convolutions and matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        network.train()(torch.empty(2, 3, IMAGE_SIZE, IMAGE_SIZE, device="meta")).sum().backward()
    return float(counter.get_total_flops() / 2)


def _row(outcome: Outcome, model: str, batch: int, flops: float, matrix_flops: float) -> Row:
    median = statistics.median(outcome.times)
    quartiles = statistics.quantiles(outcome.times, n=4)
    return Row(
        name=outcome.name,
        setting=outcome.ready.setting,
        model=model,
        batch=batch,
        images_per_second=batch / median,
        step_s=median,
        spread_s=quartiles[2] - quartiles[0],
        prepare_s=outcome.ready.prepare_s,
        memory_bytes=outcome.ready.memory_bytes,
        peak_bytes=outcome.ready.peak_bytes,
        tflops=flops / median / 1e12,
        matrix_share=flops / median / matrix_flops,
    )


def describe(rows: list[Row], console: Console) -> None:
    """A table, the quickest peer marked, and our ratio to it."""
    table = Table(box=None, header_style="bold")
    for column in ("model", "batch", "images/s", "ms", "TFLOP/s", "of a matmul", "GiB", "prepared in", "ratio", "side"):
        table.add_column(column, justify="left" if column in ("model", "side") else "right")
    for row in rows:
        alike = [other for other in rows if (other.model, other.batch) == (row.model, row.batch)]
        ours = next((other for other in alike if _is_ours(other.name)), None)
        best = max(
            (other for other in alike if other.name.startswith(PEER)), key=lambda r: r.images_per_second, default=None
        )
        ratio = f"{ours.images_per_second / row.images_per_second:.2f}x" if ours else "-"
        table.add_row(
            row.model,
            str(row.batch),
            f"{row.images_per_second:,.0f}",
            f"{row.step_s * 1e3:.2f}",
            f"{row.tflops:.0f}",
            f"{100 * row.matrix_share:.0f} %",
            _describe_memory(row),
            f"{row.prepare_s:.0f} s",
            ratio + (" *" if row is best else ""),
            row.name,
        )
    console.print(table)
    console.print("ratio: Lockstep's speed over this side's; * the quickest peer", highlight=False)
    console.print("GiB: at most during a step, and while preparing where that was more", highlight=False)
    if any(row.model == "alexnet" for row in rows):
        console.print(
            "alexnet: torchvision's has no batch norm and fewer channels than ours; it is the peer all the same",
            highlight=False,
        )


def _describe_memory(row: Row) -> str:
    text = f"{row.memory_bytes / 2**30:.1f}"
    return text + (f" (peak {row.peak_bytes / 2**30:.1f})" if row.peak_bytes > NOTED_PEAK * row.memory_bytes else "")


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _say(line: str, console: Console) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
