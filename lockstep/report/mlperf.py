"""A run as MLPerf's log lines, as its compliance checker reads them (rules of training 3.1.0, benchmark resnet).

Written from the records when a run has ended: every line has the time at which its event happened. Who submits, on what
and in which division is asked from the environment (MLPERF_SUBMISSION_ORG and so on), and so is whether the caches were
cleared, which a run cannot know. What a run has not got is left out, also where the checker asks for it: the numbers of
a polynomial decay where the rate follows another one, and the benchmark's name where another network was trained.
Torch-free.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config import Duration
from lockstep.errors import LockstepError
from lockstep.events import EpochDone, Evaluated, Event, RunEnded, RunStarted, StepDone
from lockstep.files import write_whole
from lockstep.report.summary import split_parts

TARGET = 0.759  # top-1 of a ResNet-50 on ImageNet's thousand classes
CLASSES = 1000
SUBMISSION = {"org": "unknown", "division": "open", "status": "research", "platform": ""}
Kept = TypeVar("Kept", Evaluated, EpochDone)


def write_mlperf(file: Path, events: Sequence[Event]) -> int:
    """Write all lines of a run; returns how many. LockstepError where they cannot be written."""
    lines = build_lines(events, os.environ)
    try:
        write_whole(file, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise LockstepError(f"{file} cannot be written ({error.strerror}); choose another file.") from None
    return len(lines)


def build_lines(events: Sequence[Event], environment: Mapping[str, str]) -> list[str]:
    """All lines of a run in the order of their times; a run that was resumed is one run, its pauses included."""
    parts = split_parts(events)
    if not parts:
        raise LockstepError("The event log holds no run, so there are no lines for MLPerf.")
    start, last = parts[0][0], parts[-1][-1]
    assert isinstance(start, RunStarted)
    first_step = next((event for event in parts[0] if isinstance(event, StepDone)), None)
    # Before the first step no sample was read; MLPerf counts from there.
    begun_s = first_step.time_s - first_step.step_s if first_step else start.time_s
    evaluations = _keep(Evaluated, parts)
    written = _Lines()
    _say_opening(written, start, environment)
    written.say("INTERVAL_END", "init_stop", begun_s)
    written.say("INTERVAL_START", "run_start", begun_s)
    _say_epochs(written, _keep(EpochDone, parts), begun_s)
    _say_evaluations(written, evaluations, begun_s)
    has_reached = is_benchmark(start) and any(event.top1 >= TARGET for event in evaluations)
    end = next((event for event in reversed(events) if isinstance(event, RunEnded)), last)
    written.say("INTERVAL_END", "run_stop", end.time_s, about={"status": "success" if has_reached else "aborted"})
    return written.in_order()


def is_benchmark(start: RunStarted) -> bool:
    """Whether a run trains what MLPerf's benchmark does, as far as its records tell."""
    return bool(start.config["model"]["name"] == "resnet50" and start.num_classes == CLASSES)


class _Lines:
    """Lines as `mlperf_logging` writes them."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, str]] = []

    def in_order(self) -> list[str]:
        """By their times, those of one moment in the order they were said."""
        return [line for _, line in sorted(self._lines, key=lambda pair: pair[0])]

    def say(
        self, kind: str, key: str, time_s: float, value: Any = None, about: Mapping[str, Any] | None = None
    ) -> None:
        record = {
            "namespace": "",
            "time_ms": int(1e3 * time_s),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "lockstep", "lineno": 0, **(about or {})},
        }
        self._lines.append((time_s, f":::MLLOG {json.dumps(record)}"))


def _say_opening(written: _Lines, start: RunStarted, environment: Mapping[str, str]) -> None:
    """Who, what, and with which numbers."""
    now = start.time_s
    written.say("POINT_IN_TIME", "cache_clear", now, environment.get("MLPERF_CACHE_CLEARED") == "1")
    written.say("INTERVAL_START", "init_start", now)
    usual = SUBMISSION | {"platform": f"{start.world_size} x {start.device}"}
    facts: dict[str, Any] = {
        f"submission_{name}": environment.get(f"MLPERF_SUBMISSION_{name.upper()}") or value
        for name, value in usual.items()
    }
    facts["submission_benchmark"] = "resnet" if is_benchmark(start) else start.config["model"]["name"]
    facts |= {"train_samples": start.num_train, "eval_samples": start.num_val, **describe_settings(start)}
    for key, value in facts.items():
        written.say("POINT_IN_TIME", key, now, value)


def describe_settings(start: RunStarted) -> dict[str, Any]:
    """Seed, batch and the update rule's numbers, by MLPerf's names."""
    train, optim = start.config["train"], start.config["optim"]
    batch, name = int(train["global_batch"]), str(optim["name"])
    share = -(-batch // start.world_size)
    # A run of an older version had no name for its passes.
    passes = train.get("accumulate") or -(-share // int(train["max_batch_per_rank"]))
    warmup = Duration.parse(optim["warmup"]).steps(start.steps_per_epoch)
    rates = {
        "base_learning_rate": optim["lr"],
        "learning_rate_warmup_epochs": warmup / start.steps_per_epoch,
        "weight_decay": optim["weight_decay"],
    }
    if name in ("sgd", "lars"):
        rates["momentum"] = optim["momentum"]
    if optim["schedule"] == "poly":
        rates["end_learning_rate"] = optim["end_lr"]
        rates["learning_rate_decay_poly_power"] = optim["power"]
        rates["learning_rate_decay_steps"] = start.steps_total - warmup
    facts: dict[str, Any] = {
        "seed": train["seed"],
        "global_batch_size": batch,
        "gradient_accumulation_steps": passes,
        "opt_name": name,
        **{f"{name}_opt_{key}": value for key, value in rates.items()},
    }
    if name == "lars":
        facts["lars_epsilon"] = optim["epsilon"]
    if name == "sgd":  # whose rules name some of it otherwise
        facts["opt_learning_rate_warmup_epochs"] = warmup / start.steps_per_epoch
        facts["model_bn_span"] = -(-share // passes)
        if optim["schedule"] == "step":
            steps = [Duration.parse(milestone).steps(start.steps_per_epoch) for milestone in optim["milestones"]]
            facts["opt_learning_rate_decay_boundary_epochs"] = [step / start.steps_per_epoch for step in steps]
    return facts


def _keep(kind: type[Kept], parts: Sequence[Sequence[Event]]) -> list[Kept]:
    """The records of all parts, less those of steps that were lost and done again."""
    kept: list[Kept] = []
    for part in parts:
        start = part[0]
        assert isinstance(start, RunStarted)
        done = start.start_step / max(1, start.steps_per_epoch)
        kept = [event for event in kept if (event.epoch if isinstance(event, Evaluated) else event.epoch + 1) <= done]
        kept += [event for event in part if isinstance(event, kind)]
    return kept


def _say_epochs(written: _Lines, epochs: Sequence[EpochDone], begun_s: float) -> None:
    """Every whole epoch; they count from one."""
    for event in epochs:
        place = {"epoch_num": event.epoch + 1}
        written.say("INTERVAL_START", "epoch_start", begun_s, about=place)
        written.say("INTERVAL_END", "epoch_stop", event.time_s, about=place)
        begun_s = event.time_s


def _say_evaluations(written: _Lines, evaluations: Sequence[Evaluated], begun_s: float) -> None:
    """Every evaluation, and before it the block of epochs that it judges."""
    before = 0.0
    for event in evaluations:
        block = {"first_epoch_num": int(before) + 1, "epoch_count": event.epoch - before}
        place = {"epoch_num": event.epoch}
        evaluated_s = max(begun_s, event.time_s - event.seconds)
        written.say("INTERVAL_START", "block_start", begun_s, about=block)
        written.say("INTERVAL_END", "block_stop", evaluated_s, about=block)
        written.say("INTERVAL_START", "eval_start", evaluated_s, about=place)
        written.say("POINT_IN_TIME", "eval_accuracy", event.time_s, event.top1, place)
        written.say("INTERVAL_END", "eval_stop", event.time_s, about=place)
        begun_s, before = event.time_s, event.epoch
