"""Records in words: the lines that the live and the plain display share, in ASCII so that any log can hold them."""

from pathlib import Path

from lockstep.events import CheckpointSaved, EpochDone, Evaluated, Event, Notice, RunEnded, RunStarted, StepDone
from lockstep.report.summary import spent_sentence


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


def size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"


def describe(event: Event) -> str:
    """The line an event is worth, or nothing."""
    match event:
        case RunStarted():
            resumed = f", from step {event.start_step:,}" if event.start_step else ""
            return (
                f"{event.recipe}: {count(event.num_parameters / 1e6)} M parameters, {event.num_train:,} samples, "
                f"{event.num_classes:,} classes, {plural(event.world_size, 'rank')} ({event.device}){resumed}"
            )
        case Evaluated():
            return (
                f"validation at epoch {event.epoch:.4g}: top-1 {percent(event.top1)}, top-5 {percent(event.top5)}  "
                f"({event.total:,} in {event.seconds:.1f} s)"
            )
        case CheckpointSaved():
            return f"checkpoint at step {event.step:,}  ({size(event.bytes)} in {event.seconds:.1f} s)"
        case Notice():
            who = f"rank {event.rank}: " if event.rank else ""
            return f"{'warning: ' if event.level == 'warning' else ''}{who}{event.text}"
        case EpochDone() if not event.ledger_ok:
            return f"warning: epoch {event.epoch + 1} did not see every sample exactly once"
    return ""


def describe_place(step: StepDone, start: RunStarted) -> list[str]:
    """How far training is."""
    epochs = start.steps_total / start.steps_per_epoch
    return [f"epoch {step.epoch:.1f}/{epochs:.4g}", f"step {step.step:,}/{start.steps_total:,}"]


def describe_state(step: StepDone, evaluated: Evaluated | None) -> list[str]:
    """How training does."""
    return [
        f"loss {step.loss:.3f}",
        f"train {percent(step.top1)}",
        *([f"val {percent(evaluated.top1)}"] if evaluated else []),
        f"lr {step.lr:.3g}",
        f"{count(step.images_per_second)} images/s",
    ]


def describe_result(ended: RunEnded, evaluated: Evaluated | None, folder: Path) -> list[tuple[str, str]]:
    """The closing table: label and value."""
    rows = [("status", f"{ended.status} after {clock(ended.wall_s)}, {plural(ended.step, 'step')}")]
    if ended.reason:
        rows.append(("reason", ended.reason))
    if evaluated:
        rows.append(("top-1", f"{percent(evaluated.top1)}  ({evaluated.correct1:,} of {evaluated.total:,})"))
        rows.append(("top-5", f"{percent(evaluated.top5)}  ({evaluated.correct5:,} of {evaluated.total:,})"))
    rows.append(("T  throughput", f"{count(ended.images_per_second)} images/s  (T = S x N x e)"))
    if ended.speed_one_rank is not None and ended.efficiency is not None:
        rows.append(("S  one rank alone", f"{count(ended.speed_one_rank)} images/s"))
        rows.append(("N  ranks", str(ended.world_size)))
        rows.append(("e  efficiency", percent(ended.efficiency)))
    rows.append(("run folder", str(folder)))
    if ended.status == "interrupted":
        rows.append(("go on with", f"lockstep train {folder} --resume"))
    return rows


def describe_spent(ended: RunEnded) -> list[str]:
    """Where the time went and who held the others up; nothing for a run that ended before it trained."""
    shares = ended.share_compute, ended.share_comm, ended.share_input
    if sum(shares) <= 0:
        return []
    return [spent_sentence(*shares), *([ended.straggler] if ended.straggler else [])]
