"""A run in a few numbers: what `summary.json` holds.

A run that was resumed has several parts in one file, each opened by a `RunStarted`. Accuracy, ledger and wall time are
those of all parts; speeds (T, S, N, e and the shares of time) are the last part's, which may have had other ranks, and
so is what was predicted and measured.
"""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.events import EpochDone, Evaluated, Event, Notice, RunEnded, RunStarted, StepDone
from lockstep.files import write_whole
from lockstep.plan.hindsight import look_back, to_table
from lockstep.report.averages import see_average
from lockstep.report.useful_batch import find_useful_batch


def summarize(events: Iterable[Event]) -> dict[str, Any]:
    """The summary of a run from its records, finished or not; what is not known is None."""
    parts = split_parts(events)
    if not parts:
        raise LockstepError("The event log holds no run, so there is nothing to summarize; name a run's folder.")
    last = parts[-1]
    start, ended = last[0], next((event for event in last if isinstance(event, RunEnded)), None)
    assert isinstance(start, RunStarted)
    step = max((event.step for event in last if isinstance(event, StepDone | RunEnded)), default=start.start_step)
    return {
        "run": start.run,
        "recipe": start.recipe,
        "status": ended.status if ended else "unfinished",
        **_accuracy(parts),
        **_speed(start.world_size, ended),
        "steps": step,
        "epochs": step / max(1, start.steps_per_epoch),
        "wall_s": sum(map(measure_wall_s, parts)),
        "startup_s": ended.startup_s if ended else None,
        "train_s": ended.train_s if ended else None,
        "anchor_s": ended.anchor_s if ended else None,
        "memory_bytes": ended.memory_bytes if ended else None,
        "resumed": len(parts) - 1,
        **_samples(parts),
        "noise_scale": scale._asdict() if (scale := find_useful_batch(chain(*parts))) else None,
        "prediction": to_table(told) if (told := look_back(last)) else None,
        "num_parameters": start.num_parameters,
        "num_train": start.num_train,
        "device": start.device,
        "versions": start.versions,
    }


def split_parts(events: Iterable[Event]) -> list[list[Event]]:
    """The records of each start of the run; each part begins with its `RunStarted`."""
    parts: list[list[Event]] = []
    for event in events:
        if isinstance(event, RunStarted):
            parts.append([])
        if parts:
            parts[-1].append(event)
    return parts


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write the summary whole or not at all."""
    try:
        write_whole(path, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise LockstepError(f"Cannot write the summary {path}: {error.strerror}.") from None


def measure_wall_s(part: list[Event]) -> float:
    """How long a part lasted; a killed one until the last record of its work."""
    ended = (event.wall_s for event in part if isinstance(event, RunEnded))
    # A resume may give notice before its `RunStarted`: that is not time this part was running.
    last_s = max(event.time_s for event in part if not isinstance(event, Notice))
    return next(ended, last_s - part[0].time_s)


def _accuracy(parts: list[list[Event]]) -> dict[str, Any]:
    """The last and the best evaluation, and when each came, in seconds of running since the very first start."""
    reached: list[tuple[Evaluated, float]] = []
    before_s = 0.0
    for part in parts:
        start = part[0]
        assert isinstance(start, RunStarted)
        # What came after the checkpoint this part resumed from was lost and done again.
        # By epochs: a part with another global batch numbers its steps anew.
        epoch = start.start_step / max(1, start.steps_per_epoch)
        reached = [(event, wall_s) for event, wall_s in reached if event.epoch <= epoch]
        reached += [(event, before_s + event.time_s - start.time_s) for event in part if isinstance(event, Evaluated)]
        before_s += measure_wall_s(part)
    points = [{"step": event.step, "top1": event.top1, "wall_s": wall_s} for event, wall_s in reached]
    final = reached[-1][0] if reached else None
    return {
        "top1": final.top1 if final else None,
        "top5": final.top5 if final else None,
        "best": max(points, key=lambda point: point["top1"], default=None),  # the earliest of equals
        "time_to_accuracy": points,
        **_average_accuracy(reached),
    }


def _average_accuracy(reached: list[tuple[Evaluated, float]]) -> dict[str, Any]:
    """The same of the averaged weights; nothing for a run without them."""
    seen = [(average, wall_s) for event, wall_s in reached if (average := see_average(event))]
    if not seen:
        return {}
    points = [{"step": event.step, "top1": event.top1, "wall_s": wall_s} for event, wall_s in seen]
    final = see_average(reached[-1][0])
    return {
        "average_top1": final.top1 if final else None,
        "average_top5": final.top5 if final else None,
        "average_best": max(points, key=lambda point: point["top1"]),
        "average_time_to_accuracy": points,
    }


def _speed(world_size: int, ended: RunEnded | None) -> dict[str, Any]:
    """T = S · N · e, and the shares of the training time."""
    return {
        "world_size": world_size,
        "images_per_second": ended.images_per_second if ended else None,
        "T": ended.images_per_second if ended else None,
        "S": ended.speed_one_rank if ended else None,
        "N": world_size,
        "e": ended.efficiency if ended else None,
        "share_compute": ended.share_compute if ended else None,
        "share_comm": ended.share_comm if ended else None,
        "share_input": ended.share_input if ended else None,
    }


def _samples(parts: list[list[Event]]) -> dict[str, Any]:
    """Whether every sample was seen exactly once an epoch, as the ledger certifies, and how many were unreadable.

    Those of training were replaced by their neighbours, those of validation were left out.
    """
    epochs = {event.epoch: event for part in parts for event in part if isinstance(event, EpochDone)}
    replaced = max((event.bad_samples for event in epochs.values()), default=0)
    left_out = max((event.bad_samples for part in parts for event in part if isinstance(event, Evaluated)), default=0)
    return {
        "ledger": epochs[max(epochs)].ledger if epochs else None,
        "ledger_ok": all(event.ledger_ok for event in epochs.values()) if epochs else None,
        "bad_samples": replaced + left_out,
        "bad_validation_samples": left_out,
    }
