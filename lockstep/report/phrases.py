"""Records in words: the lines that the live and the plain display share, in ASCII so that any log can hold them."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.events import (
    AnchorTaken,
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    InputChosen,
    Notice,
    PlanChosen,
    RunEnded,
    RunPredicted,
    RunStarted,
    StartedUp,
    StepDone,
)
from lockstep.plan.choose import MARGIN
from lockstep.plan.hindsight import Hindsight
from lockstep.report.averages import see_average
from lockstep.report.useful_batch import UsefulBatch, describe_useful_batch

LONG_START_S = 5.0  # worth a line
NOTABLE_WAIT_S = 0.05  # worth a word
LEAST_IN_MILLIONS = 10_000  # parameters; fewer are counted one by one
SILENT_S = 60.0  # without a record, after which a run may be gone


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def clock(seconds: float) -> str:
    """A length of time as 0:07, 12:34 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def count(number: float) -> str:
    """A quantity to about three digits: 6.25, 62.5, 1,234."""
    decimals = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{decimals}f}"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def brief(number: float, digits: int = 4) -> str:
    """A number to so many digits, and every digit before the point: 0.25, 90.5, 12,345."""
    return f"{number:,.0f}" if number >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def count_parameters(number: int) -> str:
    """How large a network is: 25.6 M parameters, 0.177 M parameters, 258 parameters."""
    if number < LEAST_IN_MILLIONS:
        return plural(number, "parameter")
    return f"{count(number / 1e6) if number >= 1e6 else f'{number / 1e6:.3g}'} M parameters"


def size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"


def describe(event: Event) -> list[str]:
    """The lines an event is worth: a small table for a plan, one for most, none for some."""
    match event:
        case PlanChosen():
            return describe_plan(event)
        case InputChosen():
            return [event.text]
    line = _describe_line(event)
    return [line] if line else []


def _describe_line(event: Event) -> str:
    match event:
        case RunStarted():
            resumed = f", from step {event.start_step:,}" if event.start_step else ""
            return (
                f"{event.recipe}: {count_parameters(event.num_parameters)}, {event.num_train:,} samples, "
                f"{event.num_classes:,} classes, {plural(event.world_size, 'rank')} ({event.device}){resumed}"
            )
        case RunPredicted():
            return (
                f"Predicted: {brief(event.step_s * 1e3)} ms a step, {count(event.images_per_second)} images/s, "
                f"{clock(event.train_s)} for {plural(event.steps, 'step')}"
            )
        case Evaluated():
            return (
                f"validation at epoch {brief(event.epoch)}: top-1 {percent(event.top1)}"
                f"{'' if event.top5 is None else f', top-5 {percent(event.top5)}'}"
                f"{'' if event.average_top1 is None else f', averaged weights {percent(event.average_top1)}'}  "
                f"({event.total:,} in {event.seconds:.1f} s)"
            )
        case AnchorTaken():
            scale = "" if event.scale is None else f", scale {event.scale:.3g}"
            led = ""
            if event.share_at_end is not None and event.share_at_zero is not None:
                led = f"; offsets {percent(event.share_at_end)} at an end, {percent(event.share_at_zero)} at zero"
            return (
                f"anchor at step {event.step:,}: loss {event.loss:.4g}, full gradient {event.gradient_norm:.4g}"
                f"{scale}{led}  ({event.samples:,} samples in {event.seconds:.1f} s)"
            )
        case StartedUp():
            return describe_startup(event)
        case CheckpointSaved():
            return f"checkpoint at step {event.step:,}  ({size(event.bytes)} {describe_writing(event)})"
        case Notice():
            who = f"rank {event.rank}: " if event.rank else ""
            return f"{'warning: ' if event.level == 'warning' else ''}{who}{event.text}"
        case EpochDone() if not event.ledger_ok:
            return f"warning: epoch {event.epoch + 1} did not see every sample exactly once"
    return ""


def describe_writing(event: CheckpointSaved) -> str:
    """How long a checkpoint took, and whether steps went on meanwhile."""
    took = f"in {event.took_s:.1f} s"
    if event.write_s is None:
        return took
    return (
        f"{took}, steps waited {event.seconds:.1f} s" if event.seconds >= NOTABLE_WAIT_S else f"{took} beside the steps"
    )


def describe_startup(event: StartedUp) -> str:
    """What took long before the first step was done; nothing where nothing did."""
    known = {what: seconds for what, seconds in event.seconds.items() if type(seconds) in (int, float)}  # not forged
    total = sum(known.values())
    if not LONG_START_S <= total < math.inf:
        return ""
    parts = [f"{what} {seconds:.1f} s" for what, seconds in known.items() if seconds >= total / 50]
    return f"Started up in {total:.1f} s: {', '.join(parts)}."


def describe_silence(last_s: float) -> str:
    """What to say of a run whose newest record is of that time; nothing while it is young."""
    silent_s = time.time() - last_s
    if not SILENT_S <= silent_s < math.inf:
        return ""
    return f"Nothing heard for {clock(silent_s)}: the run was killed, or a step takes that long."


def describe_plan(event: PlanChosen) -> list[str]:
    """What was chosen, and one line for each alternative with what it cost; nothing where there was no choice."""
    if event.source == "default":
        return []
    how = f"{event.execution}; gradients in {event.reduction}" if event.reduction else event.execution
    where = describe_ranks(event.topology, event.backend)
    lines = [f"The step: {how} ({describe_measuring(event.source, event.seconds)} {where})."]
    return lines + describe_trials(event.trials, event.batch)


def describe_ranks(topology: str, backend: str) -> str:
    """Where steps are taken, from a topology's name such as 4x8: on 32 ranks, 8 a node, over nccl."""
    over = f" over {backend}" if backend else ""
    found = re.fullmatch(r"(\d{1,9})x(\d{1,9})", topology)
    if not found:
        return f"on ranks {topology}{over}"
    nodes, a_node = map(int, found.groups())
    a_node_each = f", {a_node:,} a node" + "," * bool(over) if nodes > 1 else ""
    return f"on {plural(nodes * a_node, 'rank')}{a_node_each}{over}"


def describe_measuring(source: str, seconds: float) -> str:
    """Where a plan comes from; nothing was measured now for one that is remembered."""
    took = f"{seconds:.1f} s"
    return f"measured in {took}" if source == "measured" else f"remembered; measuring it once took {took}"


def describe_trials(trials: Sequence[Mapping[str, Any]], batch: int) -> list[str]:
    """A line for each candidate, the chosen one marked: what a step took with it, or why it was left out."""
    differ = len({trial["execution"] for trial in trials}) > 1  # or there is no need to say it in every line
    lines = []
    for trial in trials:
        name = _name_trial(trial, differ)
        if trial["failure"]:
            lines.append(f"    left out     {name or trial['execution']}: {trial['failure']}")
        else:
            ms, rate = trial["seconds"] * 1e3, batch / trial["seconds"]
            lines.append(f"  {'*' if trial['chosen'] else ' '} {ms:8.2f} ms  {name} ({rate:,.0f} images/s a rank)")
    return lines + ([explained] if (explained := explain_slower(trials)) else [])


def explain_slower(trials: Sequence[Mapping[str, Any]], mark: str = " (*)") -> str:
    """Why the quickest was not taken; empty where it was. `mark` is how the chosen one is known among the others."""
    working = sorted((trial for trial in trials if not trial["failure"]), key=lambda trial: trial["seconds"])
    chosen = next((trial for trial in working if trial["chosen"]), None)
    if chosen is None or chosen is working[0]:
        return ""
    ahead = percent(1 - working[0]["seconds"] / chosen["seconds"])
    return (
        f"The quickest is ahead of the chosen one{mark} by {ahead}; {chosen['rule']} stays unless it is slower by more "
        f"than {100 * MARGIN:.0f} %, because less may be noise."
    )


def _name_trial(trial: Mapping[str, Any], with_execution: bool) -> str:
    travel = f"{trial['rule']}: {trial['reduction']}" if trial["reduction"] else ""
    shows_execution = with_execution or not travel
    return "; ".join(filter(None, (trial["execution"] if shows_execution else "", travel)))


def describe_place(step: StepDone, start: RunStarted) -> list[str]:
    """How far training is."""
    epochs = brief(start.steps_total / start.steps_per_epoch, 3)
    decimals = max(1, len(epochs.partition(".")[2]))  # as many as the total has
    return [f"epoch {step.epoch:,.{decimals}f}/{epochs}", f"step {step.step:,}/{start.steps_total:,}"]


def describe_state(step: StepDone, evaluated: Evaluated | None, noise_scale: float | None = None) -> list[str]:
    """How training does; the noise scale is the last known one."""
    return [
        f"loss {step.loss:.3f}",
        f"train {percent(step.top1)}",
        *([f"val {percent(evaluated.top1)}"] if evaluated else []),
        *([f"averaged {percent(evaluated.average_top1)}"] if evaluated and evaluated.average_top1 is not None else []),
        f"lr {step.lr:.3g}",
        f"{count(step.images_per_second)} images/s",
        *([f"noise scale {count(noise_scale)}"] if noise_scale is not None else []),
    ]


def looks_twice(start: RunStarted | None) -> bool:
    """Whether an evaluation answered each image together with its mirror image."""
    data = start.config.get("data") if start else None
    return isinstance(data, dict) and data.get("eval_flip") is True


def describe_result(
    ended: RunEnded,
    start: RunStarted | None,
    evaluated: Evaluated | None,
    folder: Path,
    go_on: str,
    useful: UsefulBatch | None = None,
) -> list[tuple[str, str]]:
    """The closing table: label and value; of a run that was resumed, `start` is that of its last part."""
    before = start.start_step if start else 0
    place = f" (step {ended.step:,}, gone on from {before:,})" if before else ""
    rows = [("status", f"{ended.status} after {clock(ended.wall_s)}, {plural(ended.step - before, 'step')}{place}")]
    if ended.reason:
        rows.append(("reason", ended.reason))
    if evaluated:
        mirror = ", each with its mirror image" if looks_twice(start) else ""
        rows.append(("top-1", f"{percent(evaluated.top1)}  ({evaluated.correct1:,} of {evaluated.total:,}{mirror})"))
    if evaluated and evaluated.top5 is not None:
        rows.append(("top-5", f"{percent(evaluated.top5)}  ({evaluated.correct5:,} of {evaluated.total:,})"))
    if evaluated and (average := see_average(evaluated)):
        fifth = "" if average.top5 is None else f"; top-5 {percent(average.top5)}"
        counts = f"({average.correct1:,} of {average.total:,})"
        rows.append(("averaged weights", f"top-1 {percent(average.top1)}  {counts}{fifth}"))
    has_failed = ended.status == "failed"  # which is all that counts then
    if not has_failed:
        rows.append(("T  throughput", f"{count(ended.images_per_second)} images/s  (T = S x N x e)"))
    if ended.speed_one_rank is not None and ended.efficiency is not None and not has_failed:
        rows.append(("S  one rank alone", f"{count(ended.speed_one_rank)} images/s"))
        rows.append(("N  ranks", str(ended.world_size)))
        rows.append(("e  efficiency", percent(ended.efficiency)))
    if useful and not has_failed:
        rows.append(("useful batch", describe_useful_batch(useful)))
    rows.append(("run folder", str(folder)))
    if (folder / "report.html").is_file():
        rows.append(("report", str(folder / "report.html")))
    if ended.status == "interrupted":
        rows.append(("go on with", go_on))
    return rows


def describe_spent(ended: RunEnded, verdict: str, told: Hindsight | None = None) -> list[str]:
    """Where the time went, who held the others up, and which assumption was wrong, where anything was predicted.

    Nothing for a run that failed, or ended before it trained.
    """
    if ended.status == "failed" or ended.share_compute + ended.share_comm + ended.share_input <= 0:
        return []
    lines = [f"{verdict}.", ended.straggler, told.sentence if told and told.is_compared else ""]
    return [line for line in lines if line]
