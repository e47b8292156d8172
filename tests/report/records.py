"""A small run, made by hand: 4 epochs of 10 steps, 0.5 s each, on 2 ranks."""

from typing import Any

from lockstep.events import CheckpointSaved, EpochDone, Evaluated, RunEnded, RunStarted, StepDone


def started(time_s: float = 1000.0, **changes: Any) -> RunStarted:
    values: dict[str, Any] = {
        "run": "tiny-1",
        "recipe": "tiny",
        "config": {"train": {"eval_every": "1ep", "checkpoint_every": "0st"}},
        "world_size": 2,
        "device": "test CPU",
        "num_train": 320,
        "num_val": 100,
        "num_classes": 10,
        "num_parameters": 1_500_000,
        "steps_total": 40,
        "steps_per_epoch": 10,
        "start_step": 0,
        "versions": {"torch": "2"},
    }
    return RunStarted(time_s=time_s, **(values | changes))


def stepped(step: int, time_s: float, step_s: float = 0.5) -> StepDone:
    return StepDone(
        time_s=time_s,
        step=step,
        epoch=step / 10,
        loss=1.25,
        top1=0.5,
        lr=0.1,
        images_per_second=32 / step_s,
        input_s=0.0,
        compute_s=step_s,
        comm_s=0.0,
        step_s=step_s,
    )


def evaluated(step: int, time_s: float, top1: float, seconds: float = 2.0) -> Evaluated:
    return Evaluated(
        time_s=time_s,
        step=step,
        epoch=step / 10,
        top1=top1,
        top5=0.9,
        correct1=round(100 * top1),
        correct5=90,
        total=100,
        loss=1.0,
        seconds=seconds,
    )


def saved(step: int, time_s: float, seconds: float = 3.0) -> CheckpointSaved:
    return CheckpointSaved(time_s=time_s, step=step, path=f"step-{step}", bytes=6_100_000, seconds=seconds)


def epoch_done(epoch: int, time_s: float, ledger_ok: bool = True, bad_samples: int = 0) -> EpochDone:
    return EpochDone(time_s=time_s, epoch=epoch, ledger=f"{epoch:04x}", ledger_ok=ledger_ok, bad_samples=bad_samples)


def ended(step: int, time_s: float, wall_s: float, **changes: Any) -> RunEnded:
    values: dict[str, Any] = {
        "status": "finished",
        "epoch": step / 10,
        "train_s": 20.0,
        "images": 1280,
        "images_per_second": 64.0,
        "speed_one_rank": 40.0,
        "world_size": 2,
        "efficiency": 0.8,
        "share_compute": 0.8,
        "share_comm": 0.15,
        "share_input": 0.05,
    }
    return RunEnded(time_s=time_s, step=step, wall_s=wall_s, **(values | changes))
