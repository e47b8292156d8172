"""A small run, made by hand: 4 epochs of 10 steps, 0.5 s each, on 2 ranks."""

from typing import Any

from lockstep.events import (
    CheckpointSaved,
    EpochDone,
    Evaluated,
    RunEnded,
    RunPredicted,
    RunStarted,
    StepDone,
    TimelineTaken,
)


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


def predicted(**changes: Any) -> RunPredicted:
    """Half a second a step: 0.35 of computing, 0.05 for the slowest rank, 0.1 of messages that nothing hides."""
    values: dict[str, Any] = {
        "steps": 40,
        "images": 32.0,
        "world_size": 2,
        "input_s": 0.0,
        "forward_s": 0.1,
        "backward_s": 0.2,
        "update_s": 0.05,
        "compute_s": 0.35,
        "slowest_s": 0.05,
        "communicate_s": 0.1,
        "step_s": 0.5,
        "messages_s": 0.2,
        "images_per_second": 64.0,
        "speed_one_rank": 32 / 2 / 0.35,
        "efficiency": 0.7,
        "train_s": 20.0,
        "sources": {
            "computing": "measured before step 0",
            "input": "a guess",
            "messages": "measured before step 0",
            "slowest": "measured before step 0",
        },
        "assumptions": ["batches are there before a step asks for them"],
    }
    return RunPredicted(time_s=1000.5, **(values | changes))


def timeline(rank: int, passes: dict[str, float], sums: list[float], num_steps: int = 2) -> TimelineTaken:
    """Steps from step 13 on, each made of the same passes, with so many seconds of each message beside them."""
    spans: list[dict[str, Any]] = []
    now = 0.0
    for step in range(13, 13 + num_steps):
        for number, seconds in enumerate(sums, start=1):
            told = {"lane": "all-reduce", "name": f"buffer {number}", "step": step}
            spans.append({**told, "start_s": now, "end_s": now + seconds})
        for name, seconds in passes.items():
            spans.append({"lane": "step", "name": name, "step": step, "start_s": now, "end_s": now + seconds})
            now += seconds
    return TimelineTaken(time_s=1010.0, rank=rank, first_step=13, num_steps=num_steps, seconds=now, spans=spans)
