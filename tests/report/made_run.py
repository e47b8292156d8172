"""A whole run made by rule: ResNet-50's layers, two ranks, every kind of record. It was never trained."""

import base64
import io
import math
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from lockstep.events import (
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    InputChosen,
    LayersMeasured,
    MistakesFound,
    Notice,
    PlanChosen,
    RunEnded,
    RunPredicted,
    RunStarted,
    StepDone,
    TimelineTaken,
    encode,
)

NAMES = ["tench", "springer", "cassette player", "chain saw", "church", "French horn", "garbage truck", "gas pump"]
NAMES += ["golf ball", "parachute"]
BATCH = 1024
STEP_S = 0.11


def list_layers() -> list[str]:
    """ResNet-50's parameters in backward order."""
    layers = ["conv1.weight", "bn1.weight", "bn1.bias"]
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        for block in range(blocks):
            for place in (1, 2, 3):
                start = f"layer{stage}.{block}"
                layers += [f"{start}.conv{place}.weight", f"{start}.bn{place}.weight", f"{start}.bn{place}.bias"]
    return [*layers, "fc.weight", "fc.bias"][::-1]


def make_run(
    *,
    steps: int = 1200,
    per_epoch: int = 100,
    log_every: int = 5,
    first: int = 0,
    run: str = "resnet50-20261116",
    names: list[str] | None = None,
    begun_s: float = 1.79e9,
    world_size: int = 2,
    ends: bool = True,
    **changes: Any,
) -> list[Event]:
    """The records of one part; `first` is the step it resumes from."""
    rule, layers, classes = random.Random(first + 1), list_layers(), names if names is not None else NAMES
    now = begun_s
    start = RunStarted(
        time_s=now,
        **{
            "run": run,
            "recipe": "resnet50-8k",
            "config": _make_config(),
            "world_size": world_size,
            "device": "NVIDIA H200",
            "num_train": per_epoch * BATCH,
            "num_val": 5000,
            "num_classes": len(classes),
            "num_parameters": 25_557_032,
            "steps_total": steps,
            "steps_per_epoch": per_epoch,
            "start_step": first,
            "versions": {"lockstep": "0.1.0", "torch": "2.11.0", "python": "3.12.3", "cuda": "13.0"},
            "layers": layers,
            "class_names": classes,
            "machine": {
                "processor": "Intel(R) Xeon(R) Platinum 8568Y+",
                "cores": "96",
                "operating system": "Linux 6.8",
            },
            **changes,
        },
    )
    predicted = _make_prediction(now + 9.1, world_size, steps - first)
    events: list[Event] = [start, _make_plan(now + 9), predicted, _make_input(now + 9.5)]
    now += 12.0
    counts: dict[str, float] = {"evaluate": 0.0, "checkpoint": 0.0}
    for step in range(first + log_every, steps + 1, log_every):
        now += log_every * STEP_S
        events.append(_make_step(step, steps, per_epoch, log_every, now, rule))
        if step % (max(log_every, steps // 60)) == 0:
            events.append(_make_layers(step, steps, len(layers), now, rule))
        if step == first + log_every * 4:
            events += [_make_timeline(rank, step, now) for rank in range(world_size)]
        if step % per_epoch == 0:
            events.append(
                EpochDone(time_s=now, epoch=step // per_epoch - 1, ledger=f"{step:016x}", ledger_ok=True, bad_samples=0)
            )
            now += 1.4
            counts["evaluate"] += 1.4
            events.append(_make_evaluated(step, steps, per_epoch, now))
        if step % (4 * per_epoch) == 0:
            now += 0.7
            counts["checkpoint"] += 0.7
            events.append(
                CheckpointSaved(time_s=now, step=step, path=f"checkpoints/step-{step}", bytes=204_800_000, seconds=0.7)
            )
    events.append(make_mistakes(steps, now, len(classes)))
    events.append(
        Notice(time_s=now, level="warning", text="n01440764_10026.JPEG is truncated and is left out.", rank=1)
    )
    if ends:
        train_s = (steps - first) * STEP_S
        events.append(
            RunEnded(
                time_s=now,
                status="finished",
                step=steps,
                epoch=steps / per_epoch,
                wall_s=now - begun_s,
                train_s=train_s,
                images=(steps - first) * BATCH,
                images_per_second=BATCH / STEP_S,
                speed_one_rank=BATCH / STEP_S / 2 / 0.885,
                world_size=world_size,
                efficiency=0.885,
                share_compute=0.885,
                share_comm=0.07,
                share_input=0.045,
                straggler="Rank 1 held the others up for 4 % of the time: its input.",
                rank_times=[[0.004 * (rank == 1), 0.0974] for rank in range(world_size)],
                startup_s=12.0,
                evaluate_s=counts["evaluate"],
                checkpoint_s=counts["checkpoint"],
                energy_j=1.24e6,
                memory_bytes=45_100_000_000,
            )
        )
    return events


def write_run(folder: Path, events: list[Event], tail: str = "") -> Path:
    """The records as a run's folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{encode(event)}\n" for event in events)
    (folder / "events.jsonl").write_text(text + tail, encoding="utf-8")
    return folder


def _make_config() -> dict[str, Any]:
    return {
        "model": {"name": "resnet50", "width": 64},
        "data": {"source": "folder", "path": "/data/imagenette224", "image_size": 224},
        "optim": {
            "name": "lars",
            "lr": 4.0,
            "momentum": 0.9,
            "weight_decay": 5e-5,
            "schedule": "poly",
            "warmup": "1ep",
        },
        "precision": {"compute": "fp16", "loss_scale": "dynamic"},
        "train": {"global_batch": BATCH, "duration": "12ep", "eval_every": "1ep", "checkpoint_every": "4ep", "seed": 0},
    }


def _make_plan(time_s: float) -> PlanChosen:
    trials = []
    for execution, base in (
        ("own kernels, recorded as a CUDA graph", 0.098),
        ("PyTorch's kernels, launched one by one", 0.142),
    ):
        for place, rule in enumerate(("merged", "two segments", "threshold", "PyTorch's own")):
            trials.append(
                {
                    "execution": execution,
                    "rule": rule,
                    "reduction": f"{4 - place} buffers under the backward pass (by {'torus' if place < 2 else 'flat'})",
                    "seconds": base + 0.004 * place,
                    "failure": "",
                    "chosen": base < 0.1 and not place,
                }
            )
    failed = {"rule": "", "reduction": "", "seconds": None, "chosen": False}
    trials.append({"execution": "compiled whole", "failure": "it took longer than it may", **failed})
    return PlanChosen(
        time_s=time_s,
        source="measured",
        seconds=8.2,
        topology="1x2",
        backend="nccl",
        batch=BATCH // 2,
        execution="own kernels, recorded as a CUDA graph",
        reduction="4 buffers under the backward pass (by torus)",
        plan={},
        trials=trials,
    )


def _make_prediction(time_s: float, world_size: int, steps: int) -> RunPredicted:
    measured = dict.fromkeys(("computing", "messages", "slowest"), "measured before step 0")
    return RunPredicted(
        time_s=time_s,
        steps=steps,
        images=BATCH,
        world_size=world_size,
        input_s=0.0,
        forward_s=0.028,
        backward_s=0.056,
        update_s=0.0014,
        compute_s=0.0854,
        slowest_s=0.001,
        communicate_s=0.0018,
        step_s=0.0882,
        messages_s=0.041,
        images_per_second=BATCH / 0.0882,
        speed_one_rank=BATCH / 2 / 0.0854,
        efficiency=0.0854 / 0.0882,
        train_s=steps * 0.0882,
        trial_s=0.089,
        memory_bytes=42_000_000_000,
        sources={**measured, "input": "a guess", "memory": "a shipped profile"},
        assumptions=["batches are there before a step asks for them"],
    )


def _make_input(time_s: float) -> InputChosen:
    return InputChosen(
        time_s=time_s,
        decoder="both",
        threads=8,
        read_processes=2,
        prefetch_batches=3,
        threads_help=True,
        is_resident=False,
        images_per_second=11_200.0,
        text="Input: nvJPEG and 8 decode threads, 2 processes that read, 3 batches ahead.",
    )


def _make_step(step: int, steps: int, per_epoch: int, every: int, time_s: float, rule: random.Random) -> StepDone:
    done = step / steps
    warm = min(1.0, step / per_epoch)
    slow = 1 + abs(rule.gauss(0, 0.03)) + (0.5 if rule.random() < 0.01 else 0)
    return StepDone(
        time_s=time_s,
        step=step,
        epoch=step / per_epoch,
        loss=0.35 + 1.95 * math.exp(-4 * done) + rule.gauss(0, 0.03),
        top1=min(1.0, max(0.0, 0.97 - 0.87 * math.exp(-4.5 * done) + rule.gauss(0, 0.012))),
        lr=4.0 * warm * (1 - done) ** 2,
        images_per_second=BATCH / (STEP_S * slow),
        input_s=0.005,
        compute_s=0.097,
        comm_s=0.008 * slow,
        step_s=STEP_S * slow,
        loss_scale=2.0 ** (12 + 4 * (step * 7 // steps % 2) + step * 3 // steps),
        skipped=1 if step % (per_epoch * 3) == every * 2 else 0,
        noise_scale=200 * math.exp(4 * done) * math.exp(rule.gauss(0, 0.2)),
    )


def _make_layers(step: int, steps: int, count: int, time_s: float, rule: random.Random) -> LayersMeasured:
    done = step / steps
    gradients = [
        10 ** (-2.2 + 1.4 * math.sin(place / 9) - done + rule.gauss(0, 0.08) - (0.8 if place % 3 else 0))
        for place in range(count)
    ]
    weights = [10 ** (0.6 + 0.5 * math.cos(place / 20) + 0.2 * done) for place in range(count)]
    ratios = [0.001 * weight / gradient for weight, gradient in zip(weights, gradients, strict=True)]
    return LayersMeasured(time_s=time_s, step=step, weight_norms=weights, gradient_norms=gradients, trust_ratios=ratios)


def _make_timeline(rank: int, step: int, time_s: float) -> TimelineTaken:
    """Three steps whose pieces leave no gap, with what went on beside them."""
    spans: list[dict[str, Any]] = []
    now = 0.0
    for number in range(step, step + 3):
        for name, seconds in (
            ("input", 0.002 + 0.004 * rank),
            ("forward", 0.031),
            ("backward", 0.062),
            ("communicate", 0.0075 - 0.004 * rank),
            ("update", 0.0015),
            ("other", 0.001),
        ):
            spans.append({"lane": "step", "name": name, "step": number, "start_s": now, "end_s": now + seconds})
            if name == "backward":
                for buffer in range(4):
                    begun = now + 0.012 + 0.0145 * buffer
                    spans.append(
                        {"lane": "all-reduce", "name": f"buffer {buffer}", "step": number}
                        | {"start_s": begun, "end_s": begun + 0.011 + 0.001 * buffer}
                    )
            if name == "forward":
                spans.append({"lane": "input", "name": "decode", "step": number, "start_s": now, "end_s": now + 0.074})
            now += seconds
    return TimelineTaken(time_s=time_s, rank=rank, first_step=step, num_steps=3, seconds=now, spans=spans)


def _make_evaluated(step: int, steps: int, per_epoch: int, time_s: float) -> Evaluated:
    top1 = 0.941 - 0.80 * math.exp(-4.2 * step / steps)
    return Evaluated(
        time_s=time_s,
        step=step,
        epoch=step / per_epoch,
        top1=round(5000 * top1) / 5000,
        top5=min(1.0, 0.55 + 0.5 * top1),
        correct1=round(5000 * top1),
        correct5=round(5000 * min(1.0, 0.55 + 0.5 * top1)),
        total=5000,
        loss=0.42 + 1.9 * math.exp(-3.6 * step / steps),
        seconds=1.4,
    )


def make_mistakes(step: int, time_s: float, num_classes: int) -> MistakesFound:
    rule = random.Random(7)
    pairs = {(rule.randrange(num_classes), rule.randrange(num_classes)) for _ in range(3 * num_classes)}
    confusion = [[true, taken, 1 + int(30 * rule.random() ** 3)] for true, taken in sorted(pairs) if true != taken]
    confusion.sort(key=lambda entry: -entry[2])
    worst = [
        {
            "name": f"val/{place % num_classes}/ILSVRC2012_val_{place:08}.JPEG",
            "label": place % num_classes,
            "predicted": (place + 1 + place // 3) % num_classes,
            "confidence": 0.999 - 0.011 * place,
            "jpeg": _draw_jpeg(place),
        }
        for place in range(16)
    ]
    return MistakesFound(time_s=time_s, step=step, confusion=confusion, worst=worst)


def _draw_jpeg(place: int) -> str:
    image = Image.new("RGB", (96, 96), (40 + 11 * place, 90 + 5 * place, 200 - 9 * place))
    draw = ImageDraw.Draw(image)
    draw.ellipse((12 + place, 20, 70, 80 - place), fill=(230, 200 - 8 * place, 60 + 9 * place))
    draw.polygon([(10, 90), (48, 30 + 2 * place), (88, 90)], fill=(60, 120 + 6 * place, 90))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return base64.b64encode(file.getvalue()).decode()
