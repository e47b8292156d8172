"""A run as MLPerf's log lines, as its compliance checker reads them (training 3.1.0 and 4.0.0, benchmark resnet).

Written from the records when a run has ended: every line has the time at which its event happened. Who submits, on what
and in which division is asked from the environment (MLPERF_SUBMISSION_ORG and so on), and so is whether the caches were
cleared, which a run cannot know. What a run has not got is left out, also where the checker asks for it: the numbers of
a polynomial decay where the rate follows another one, and the benchmark's name where something else was trained. The
open division leaves the network free, the closed one does not. Torch-free.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config import USUAL_PASS
from lockstep.errors import LockstepError
from lockstep.events import EpochDone, Evaluated, Event, RunEnded, RunStarted, StepDone
from lockstep.files import write_whole
from lockstep.recipe_values import LONGEST_SHOWN, Duration
from lockstep.report.summary import split_parts

TARGET = 0.759  # top-1 of a ResNet-50 on ImageNet's thousand classes
CLASSES = 1000
BENCHMARK, NETWORK = "resnet", "resnet50"
SUBMISSION = {"org": "unknown", "division": "open", "status": "research", "platform": ""}
# Another division does not make the checker refuse a log: the checker itself ends with a traceback.
CHOICES = {"division": ("open", "closed"), "status": ("cloud", "onprem", "preview", "research")}
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
    check_submission(environment)
    parts = split_parts(events)
    if not parts:
        raise LockstepError("The event log holds no run, so there are no lines for MLPerf; name a run's folder.")
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
    _say_training(written, _keep(EpochDone, parts), evaluations, begun_s)
    is_asked_for = is_benchmark(start, read_submission(environment, "division"))
    has_reached = is_asked_for and any(event.top1 >= TARGET for event in evaluations)
    end = next((event for event in reversed(events) if isinstance(event, RunEnded)), last)
    written.say("INTERVAL_END", "run_stop", end.time_s, about={"status": "success" if has_reached else "aborted"})
    return written.in_order()


def check_submission(environment: Mapping[str, str]) -> None:
    """A sentence where a variable says what the checker cannot take."""
    for name, choices in CHOICES.items():
        if (value := read_submission(environment, name)) not in choices:
            raise LockstepError(
                f"MLPERF_SUBMISSION_{name.upper()} = {value[:LONGEST_SHOWN]!r} must be one of {', '.join(choices)}."
            )


def read_submission(environment: Mapping[str, str], name: str) -> str:
    """What the submitter says, or what is said without one."""
    return environment.get(f"MLPERF_SUBMISSION_{name.upper()}") or SUBMISSION.get(name, "")


def is_benchmark(start: RunStarted, division: str) -> bool:
    """Whether a run trains what MLPerf's benchmark does, as far as its records tell."""
    return start.num_classes == CLASSES and (division == "open" or start.config["model"]["name"] == NETWORK)


def name_benchmark(start: RunStarted, environment: Mapping[str, str]) -> str:
    """The benchmark's name; in the open division the submitter may say that a run is one of its kind."""
    division = read_submission(environment, "division")
    if is_benchmark(start, division):
        return BENCHMARK
    said = read_submission(environment, "benchmark") if division == "open" else ""
    return said or str(start.config["model"]["name"])


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
    facts: dict[str, Any] = {f"submission_{name}": read_submission(environment, name) for name in SUBMISSION}
    facts["submission_platform"] = facts["submission_platform"] or f"{start.world_size} x {start.device}"
    facts["submission_benchmark"] = name_benchmark(start, environment)
    facts |= {"train_samples": start.num_train, "eval_samples": start.num_val, **describe_settings(start)}
    for key, value in facts.items():
        written.say("POINT_IN_TIME", key, now, value)


def describe_settings(start: RunStarted) -> dict[str, Any]:
    """Seed, batch and the update rule's numbers, by MLPerf's names."""
    train, optim = start.config["train"], start.config["optim"]
    batch, name = int(train["global_batch"]), str(optim["name"])
    share = -(-batch // start.world_size)
    # A run of an older version had no name for its passes, nor for what batch norm sees.
    most = int(train["max_batch_per_rank"]) or USUAL_PASS
    passes = train.get("accumulate") or -(-share // min(most, train.get("norm_batch") or most))
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


def _say_training(
    written: _Lines, epochs: Sequence[EpochDone], evaluations: Sequence[Evaluated], begun_s: float
) -> None:
    """Every evaluation, before it the block of epochs that it judges, and in the block every whole epoch."""
    epoch_s, judged, told = begun_s, 0.0, 0
    for event in evaluations:
        block = {"first_epoch_num": int(judged) + 1, "epoch_count": _shorten(event.epoch - judged)}
        place = {"epoch_num": _shorten(event.epoch)}
        has_trained = event.epoch > judged  # the checker takes no block without epochs
        if has_trained:
            written.say("INTERVAL_START", "block_start", begun_s, about=block)
        own = [epoch for epoch in epochs[told:] if epoch.epoch + 1 <= event.epoch]
        epoch_s = _say_epochs(written, own, epoch_s)
        told += len(own)
        evaluated_s = max(begun_s, epoch_s, event.time_s - event.seconds)
        if has_trained:
            written.say("INTERVAL_END", "block_stop", evaluated_s, about=block)
        written.say("INTERVAL_START", "eval_start", evaluated_s, about=place)
        written.say("POINT_IN_TIME", "eval_accuracy", event.time_s, event.top1, place)
        written.say("INTERVAL_END", "eval_stop", event.time_s, about=place)
        begun_s, judged = event.time_s, event.epoch
        if event.epoch.is_integer():  # the next epoch begins behind it; in mid-epoch it is a part of that epoch
            epoch_s = event.time_s
    _say_epochs(written, epochs[told:], epoch_s)


def _say_epochs(written: _Lines, epochs: Sequence[EpochDone], begun_s: float) -> float:
    """Every whole epoch, counted from one; returns when the last one ended."""
    for event in epochs:
        place = {"epoch_num": event.epoch + 1}
        written.say("INTERVAL_START", "epoch_start", begun_s, about=place)
        written.say("INTERVAL_END", "epoch_stop", event.time_s, about=place)
        begun_s = event.time_s
    return begun_s


def _shorten(epochs: float) -> float:
    """A whole number as one, as MLPerf's own logs have it."""
    return int(epochs) if epochs.is_integer() else epochs
