"""One whole training: timm's network by the loop that its users write, or the recipe that asks Lockstep for the same.

The sides of `trainings.py`. Both have the same images, crops, flips, batch, AdamW, warm-up, cosine, label smoothing,
number format and evaluation. timm's side is this file run as a program, with data set, loader, optimiser and schedule
from timm as its `train.py` has them; ours is `lockstep train`. Two things differ, and stay so because users get them:
timm's loader drops what is left of an epoch behind the last whole batch, and Lockstep saves a checkpoint at the end.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from os import environ
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.bench.input_peers import AREA, MEAN, RATIO, STD
from lockstep.bench.timm_peers import CENTRE, WEIGHT_DECAY, Case, build_loader, build_update, in_precision, start_timm
from lockstep.bench.turns import first_line
from lockstep.config import DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig, to_toml
from lockstep.data.order import steps_per_epoch
from lockstep.engine.account import forget_peak, read_peak
from lockstep.engine.compiler import guard_compiled
from lockstep.errors import LockstepError
from lockstep.events import EpochDone, Evaluated, Notice, RunEnded, StepDone, read_events
from lockstep.files import write_whole
from lockstep.models.weights import read_weights
from lockstep.processes import follow_launcher

LABEL_SMOOTHING = 0.1
WARMUP_LR = 1e-5  # of the first step; timm's default
LOG_EVERY = 10  # steps, as any run of ours
RESULT, RECIPE, RUN = "trained.json", "beside-timm.toml", "run"  # in the folder of a training


@dataclass(frozen=True)
class Training:
    """What either side is asked for."""

    case: Case
    samples: int  # to train with
    epochs: int
    seed: int
    lr: float
    weights: str = ""  # a file to start from; drawn weights if empty
    compiled: bool = False

    @property
    def warmup_lr(self) -> float:
        return min(WARMUP_LR, self.lr)


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    correct: int  # of all validation images, after the last epoch
    total: int
    images: int  # that were trained with
    images_per_second: float  # over the epochs after the first: decoding anew and compiling have been done by then
    memory_bytes: int | None  # that the GPU had reserved at most; None where there is no GPU
    notes: list[str]  # on the weights it started from


def ask_ours(asked: Training, folder: Path) -> list[str]:
    """The words that a user would type after `python -m`, with the recipe written for them."""
    write_whole(folder / RECIPE, to_toml(build_config(asked)))
    # One rank, as timm's loop is.
    return ["lockstep", "train", str(folder / RECIPE), f"--out={folder / RUN}", "--ranks=1"]


def build_config(asked: Training) -> RunConfig:
    """The recipe of our side."""
    case = asked.case
    return RunConfig(
        data=DataConfig(
            source="folder",
            path=case.data,
            image_size=case.image_size,
            eval_resize=math.floor(case.image_size / CENTRE),
            crop_area=AREA,
            crop_ratio=RATIO,
            mean=MEAN,
            std=STD,
        ),
        model=ModelConfig(name=case.model, weights=asked.weights),
        optim=OptimConfig(
            name="adamw",
            lr=asked.lr,
            weight_decay=WEIGHT_DECAY,
            label_smoothing=LABEL_SMOOTHING,
            schedule="cosine",
            warmup="1ep",  # type: ignore[arg-type]
            warmup_lr=asked.warmup_lr,
        ),
        precision=PrecisionConfig(compute=case.precision),
        train=TrainConfig(
            global_batch=case.batch,
            duration=f"{asked.epochs}ep",  # type: ignore[arg-type]
            seed=asked.seed,
            eval_every="0st",  # type: ignore[arg-type]
            checkpoint_every="0st",  # type: ignore[arg-type]
            log_every=min(LOG_EVERY, steps_per_epoch(asked.samples, case.batch)),
            compile="auto" if asked.compiled else "off",
        ),
    )


def read_ours(asked: Training, folder: Path) -> Trained:
    """What our run says it did."""
    events = read_events(folder / RUN)
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    ended = [event for event in events if isinstance(event, RunEnded) and event.status == "finished"]
    if not (evaluated and ended):
        raise LockstepError("The run left no evaluation behind, or did not come to its end; train it by itself.")
    steps = [event for event in events if isinstance(event, StepDone)]
    notes = [event.text for event in events if isinstance(event, Notice) and asked.weights]
    return Trained(
        correct=evaluated[-1].correct1,
        total=evaluated[-1].total,
        images=asked.samples * sum(isinstance(event, EpochDone) for event in events),  # which the run certifies
        images_per_second=measure_rate(steps, steps_per_epoch(asked.samples, asked.case.batch)),
        memory_bytes=ended[-1].memory_bytes,
        notes=[note for note in notes if note.startswith("model.weights")],
    )


def measure_rate(steps: Sequence[StepDone], in_epoch: int) -> float:
    """Images a second from the first record behind the first epoch to the last: a record waits for the device."""
    first = next(place for place, record in enumerate(steps) if record.step >= in_epoch)
    images = sum(
        record.images_per_second * record.step_s * (record.step - before.step)
        for before, record in zip(steps[first:], steps[first + 1 :], strict=False)
    )
    return images / (steps[-1].time_s - steps[first].time_s)


def ask_timm(asked: Training, folder: Path) -> list[str]:
    """The same for the other side: this file as a program."""
    return [__name__, json.dumps(asdict(asked)), str(folder / RESULT)]


def read_timm(asked: Training, folder: Path) -> Trained:
    """What timm's side left."""
    return Trained(**json.loads((folder / RESULT).read_text()))


def train_with_timm(asked: Training) -> Trained:
    """timm's network by timm's means, from the first image to the accuracy."""
    case = asked.case
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, optimizer = start_timm(case, device, lr=asked.lr, seed=asked.seed)
    notes = load_fitting(network, asked.weights) if asked.weights else []
    loader = build_loader(case, device, "train")
    schedule = build_schedule(optimizer, len(loader), asked)
    guard_compiled()
    forward: Any = torch.compile(network) if asked.compiled else network
    update = build_update(case, device, forward, optimizer, LABEL_SMOOTHING)
    forget_peak(device)
    ends: list[float] = []
    num_updates = 0
    for _ in range(asked.epochs):
        for images, labels in loader:
            update(images, labels)
            num_updates += 1
            schedule.step_update(num_updates)
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    # Not the compiled network, which would be compiled again for it.
    correct, total = count_correct(network, build_loader(case, device, "val"), case, device)
    rate = (asked.epochs - 1) * len(loader) * case.batch / (ends[-1] - ends[0])
    return Trained(correct, total, num_updates * case.batch, rate, read_peak(device), notes)


def build_schedule(optimizer: torch.optim.Optimizer, in_epoch: int, asked: Training) -> Any:
    """timm's cosine, such that it gives what `optim/schedule.py` does: a warm-up before it, 0 at the last step."""
    return import_module("timm.scheduler").CosineLRScheduler(
        optimizer,
        t_initial=max(1, (asked.epochs - 1) * in_epoch - 1),
        warmup_t=in_epoch,
        warmup_lr_init=asked.warmup_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def load_fitting(network: nn.Module, weights: str) -> list[str]:
    """Fill the network with what fits by name and shape, and say how much did not."""
    found, own = read_weights(Path(weights)), network.state_dict()
    fitting = {name: values for name, values in found.items() if name in own and own[name].shape == values.shape}
    if not fitting:
        raise LockstepError(f"{weights} holds nothing that fits timm's network by name and shape; use its own weights.")
    network.load_state_dict(fitting, strict=False)
    left = len(found) - len(fitting)
    return [f"{weights}: timm's network takes {len(fitting)} of {len(found)} tensors; {left} left out."]


@torch.inference_mode()
def count_correct(network: nn.Module, loader: Any, case: Case, device: torch.device) -> tuple[int, int]:
    """Right answers and images of a whole split."""
    network.eval()
    correct = total = 0
    for images, labels in loader:
        with in_precision(case, device):
            logits = network(images.contiguous(memory_format=torch.channels_last))
        correct += int((logits.argmax(1) == labels).sum())
        total += len(labels)
    return correct, total


def main() -> None:
    """Train what the first argument says, and leave the result in the file that the second one names."""
    follow_launcher(environ)
    asked = json.loads(sys.argv[1])
    try:
        trained = train_with_timm(Training(**asked | {"case": Case(**asked["case"])}))
    except Exception as error:  # compilers, drivers and libraries raise nearly anything
        sys.exit(f"lockstep: {first_line(error)}")
    write_whole(Path(sys.argv[2]), json.dumps(asdict(trained)))


if __name__ == "__main__":
    main()
