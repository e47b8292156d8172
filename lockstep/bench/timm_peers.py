"""The loop that a user of timm writes, in timm's own words, and Lockstep's step on the same: sides of `beside_timm.py`.

Both train the same network from the same images with the same crops, flips, number format, AdamW and batch. timm's side
takes its data set, loader and optimiser from timm, as its `train.py` does, with what that script offers for speed:
channels-last, autocast, a fused optimiser, worker processes that outlive the epochs, torch.compile.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.bench.input_peers import AREA, MEAN, RATIO, STD
from lockstep.bench.turns import Step
from lockstep.comm.world import count_cores, join_world
from lockstep.config import DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.engine.apply import apply_plan
from lockstep.engine.build import assemble, build_network, build_train_pipeline, open_sources, set_number_formats
from lockstep.engine.compiler import guard_compiled
from lockstep.engine.measure import fake_batch
from lockstep.engine.planning import choose_plan
from lockstep.errors import LockstepError
from lockstep.models.outside import require
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import explain_choice
from lockstep.report.phrases import describe_trials

LR, WEIGHT_DECAY = 1e-3, 0.05
CENTRE = 224 / 256  # share of the resized image's side that an evaluation sees
# Of a run that is worth compiling for, as one is whose peer is compiled.
NUM_STEPS = 100_000
PEERS: dict[str, str] = {
    "plain": "",
    "compiled": "default",
    "compiled-graphs": "reduce-overhead",
}  # torch.compile's mode
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """What both sides train."""

    model: str  # timm:NAME
    batch: int
    image_size: int
    precision: Literal["fp32", "fp16", "bf16"]
    classes: int
    data: str = ""  # an image folder; noise in memory if empty
    threads: int = 1  # a DataLoader's workers
    # Batches of what is timed as one step: as many as may lie ready while a side waits, so that they do not count.
    chunk: int = 1


def pick_peers(text: str) -> list[str]:
    """Settings of timm's loop by name, with commas; all if nothing is said, none for "none"."""
    names = [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PEERS]:
        raise LockstepError(f"--peers knows no {unknown[0]} of timm's; choose from {', '.join(PEERS)}, or none.")
    return names if text else list(PEERS)


def build_timm(case: Case, compiled: str) -> tuple[str, Step]:
    """A step as timm's script takes it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, optimizer = start_timm(case, device)
    batches = load_with_timm(case, device) if case.data else repeat(_make_noise(case, device))
    guard_compiled()
    forward: Any = torch.compile(network, mode=compiled) if compiled else network
    update = build_update(case, device, forward, optimizer)

    def step() -> None:
        for _ in range(case.chunk):
            update(*next(batches))

    return "", step


def start_timm(
    case: Case, device: torch.device, *, lr: float = LR, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """timm's network and optimiser, in a process that is set up as its script would."""
    timm = require("timm", "A benchmark beside timm")
    torch.manual_seed(seed)
    torch.set_num_threads(count_cores())  # as the one rank of ours
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    network: nn.Module = timm.create_model(case.model.partition(":")[2], num_classes=case.classes)
    network = network.to(device).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer: torch.optim.Optimizer = import_module("timm.optim").create_optimizer_v2(
        network, opt="adamw", lr=lr, weight_decay=WEIGHT_DECAY, fused=True
    )
    return network, optimizer


def build_update(
    case: Case,
    device: torch.device,
    forward: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    label_smoothing: float = 0.0,
) -> Callable[[Tensor, Tensor], None]:
    """One batch forward, back and into the weights."""
    scaler = torch.amp.GradScaler(device.type, enabled=case.precision == "fp16")

    def update(images: Tensor, labels: Tensor) -> None:
        images = images.contiguous(memory_format=torch.channels_last)
        with in_precision(case, device):
            loss = nn.functional.cross_entropy(forward(images), labels, label_smoothing=label_smoothing)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return update


def in_precision(case: Case, device: torch.device) -> AbstractContextManager[Any]:
    """While inside, PyTorch computes in the case's precision."""
    half = HALF.get(case.precision)
    return torch.autocast(device.type, half) if half else nullcontext()


def _make_noise(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch in memory, in the precision ours get it in: autocast would cast it in every step."""
    images = torch.randn(case.batch, 3, case.image_size, case.image_size, device=device)
    images = images.to(HALF.get(case.precision, torch.float32), memory_format=torch.channels_last)
    return images, torch.randint(0, case.classes, (case.batch,), device=device)


def load_with_timm(case: Case, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches by timm's own data set and loader, epoch after epoch."""
    loader = build_loader(case, device, "train")
    while True:
        yield from loader


def build_loader(case: Case, device: torch.device, split: Literal["train", "val"]) -> Any:
    """timm's loader of one split: random crops and flips to train with, the centre to evaluate."""
    timm_data = import_module("timm.data")
    on_gpu, is_training = device.type == "cuda", split == "train"
    drawn = {"scale": AREA, "ratio": RATIO, "hflip": 0.5, "color_jitter": None, "use_multi_epochs_loader": True}
    return timm_data.create_loader(
        timm_data.create_dataset("", root=case.data, split=split, is_training=is_training),
        input_size=(3, case.image_size, case.image_size),
        batch_size=case.batch,
        is_training=is_training,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        num_workers=case.threads,
        pin_memory=on_gpu,
        img_dtype=HALF.get(case.precision, torch.float32),
        device=device,
        use_prefetcher=on_gpu,  # which copies and normalises on a stream of its own
        **(drawn if is_training else {"crop_pct": CENTRE}),
    )


def build_ours(case: Case, resident: Literal["auto", "off"]) -> tuple[str, Step]:
    """Lockstep's whole step, executed as the measurement before step 0 chooses, fed as a run would be."""
    given: dict[str, Any] = {"source": "folder", "path": case.data} if case.data else {}
    config = RunConfig(
        data=DataConfig(
            image_size=case.image_size, crop_area=AREA, crop_ratio=RATIO, mean=MEAN, std=STD, resident=resident, **given
        ),
        model=ModelConfig(name=case.model),
        optim=OptimConfig(name="adamw", lr=LR, weight_decay=WEIGHT_DECAY, label_smoothing=0.0),
        precision=PrecisionConfig(compute=case.precision),
        train=TrainConfig(global_batch=case.batch, duration="1ep", max_batch_per_rank=case.batch),  # type: ignore[arg-type]
    )
    set_number_formats(config.precision)
    with join_world(None) as world:  # of one rank: nothing is left to close
        network = build_network(config, case.classes)
        parts = assemble(config, world, network, Schedule("constant", LR, total_steps=1))
        chosen = choose_plan(config, parts, world, num_steps=NUM_STEPS)
        plan = chosen.plan
        take = apply_plan(plan.execution, plan.reduction, parts, case.batch, case.batch, recording=chosen.recording)
        lines = [str(plan.execution), *describe_trials(explain_choice(chosen.profile.trials), case.batch)]
        if case.data:
            # Open for as long as the process lives.
            pipeline = build_train_pipeline(config, world, open_sources(config.data).train, Cursor(), plan.input)
            batches: Iterator[Batch] = pipeline.__enter__()
            lines.append(pipeline.describe())
        else:
            batches = repeat(fake_batch(config, world))

    def step() -> None:
        for _ in range(case.chunk):
            take(next(batches), LR, False)

    return "\n".join(lines), step
