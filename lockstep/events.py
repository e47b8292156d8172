"""What a run says it did: typed records, one JSON line each in the run's `events.jsonl`. Torch-free.

The last stop of the walk: `engine/trainer.py` emits records to sinks, and `report/` reads them back. Shares and
accuracies are in [0, 1], times in seconds, `time_s` in seconds since 1970.

A log of 64 MiB is renamed to `events-0001.jsonl` and so on, and a new one begun. Of the step records in such a full
part one in twenty stays, the last among them; all other records stay. A run of weeks leaves megabytes.
"""

import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, get_args, get_origin

from lockstep.errors import LockstepError
from lockstep.files import read_small, write_whole

LOG_NAME = "events.jsonl"
PART_BYTES = 64 << 20
MAX_LOG_BYTES = 8 * PART_BYTES  # of one that could not be put away three times; nobody's memory shall pay for more
STEP_OPENING = b'{"kind":"StepDone"'
STEPS_FOR_ONE = 20  # step records of which a full part keeps one
LARGEST = 2**63  # beyond any number of a run
# Shares of an anchor's offsets from which on optim.mu is far off: at an end of their grid, or at zero.
MOST_AT_END, MOST_AT_ZERO = 0.1, 0.99


@dataclass(frozen=True, kw_only=True)
class Event:
    """One record; its kind is the name of its class."""

    time_s: float = field(default_factory=time.time)

    @property
    def kind(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run began, or went on from `start_step`: one part of the file."""

    run: str  # the name of the run's folder
    recipe: str
    config: dict[str, Any]
    world_size: int
    device: str
    num_train: int
    num_val: int
    num_classes: int
    num_parameters: int
    steps_total: int
    steps_per_epoch: int
    start_step: int
    versions: dict[str, str]
    layers: list[str] = field(default_factory=list)  # by their slots' names, in the layout's order
    class_names: list[str] = field(default_factory=list)  # empty where there are none to show
    machine: dict[str, str] = field(default_factory=dict)  # of rank 0: processor, cores and so on, where it tells


@dataclass(frozen=True, kw_only=True)
class PlanChosen(Event):
    """How steps will be taken, and what the alternatives cost."""

    source: Literal["measured", "remembered", "default", "predicted"]
    seconds: float  # that measuring took, then or now
    topology: str
    backend: str  # empty in a world of one, as is `reduction`
    batch: int  # samples of one rank
    execution: str  # in words, here and below
    reduction: str
    plan: dict[str, Any]  # as `plan.toml` has it
    trials: list[dict[str, Any]]  # execution, rule, reduction, seconds, failure, chosen


@dataclass(frozen=True, kw_only=True)
class RunPredicted(Event):
    """What is expected of the steps to come, part by part, before the first of them; None is what nobody can tell.

    The seconds are those of one step: its parts, `compute_s` in place of its three, add up to `step_s`.
    """

    steps: int  # still to take
    images: float  # of a step, on average
    world_size: int
    input_s: float  # waiting for a batch
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    compute_s: float  # the three together
    slowest_s: float  # waiting for the slowest rank
    communicate_s: float  # messages that nothing hides
    step_s: float
    messages_s: float  # of all messages, hidden or not
    images_per_second: float  # T
    speed_one_rank: float  # S
    efficiency: float  # e
    train_s: float  # of all the steps
    trial_s: float | None = None  # of a whole step as it was tried before the first
    input_rate: float | None = None  # images a second that one rank's input makes; None: taken as never waited for
    memory_bytes: int | None = None  # of a device
    sources: dict[str, Any] = field(default_factory=dict)  # part -> where its number comes from, in words
    assumptions: list[str] = field(default_factory=list)  # what else the numbers rest on


@dataclass(frozen=True, kw_only=True)
class InputChosen(Event):
    """How rank 0's batches are made, when that is known and whenever it has changed."""

    decoder: Literal["cpu", "nvjpeg", "both"]
    threads: int
    read_processes: int
    prefetch_batches: int
    threads_help: bool  # nvJPEG with what it could do itself
    is_resident: bool  # whether decoded images stay on the device
    images_per_second: float | None  # that its threads could make if they never had to wait; None: not known yet
    text: str  # all of it in words


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """The steps since the last such record: their averages, and where training stands."""

    step: int
    epoch: float
    loss: float
    top1: float
    lr: float
    images_per_second: float
    input_s: float
    compute_s: float
    comm_s: float
    step_s: float
    loss_scale: float | None = None  # None where there is none
    skipped: int = 0  # steps of these that the loss scale dropped
    noise_scale: float | None = None  # samples beyond which a larger batch no longer pays; None: not known


@dataclass(frozen=True, kw_only=True)
class LayersMeasured(Event):
    """Norms layer by layer at one step, in the order of `RunStarted.layers`; now and then, not every step."""

    step: int
    weight_norms: list[float]
    gradient_norms: list[float]
    trust_ratios: list[float]  # empty under a rule that has none


@dataclass(frozen=True, kw_only=True)
class TimelineTaken(Event):
    """What one rank did in a few steps, as spans.

    A span is `{"lane", "name", "step", "start_s", "end_s"}`, in seconds from the beginning of `first_step`. The lane
    "step" holds what a step is made of, without gaps or overlaps: input, forward, backward, communicate (exposed),
    update, other. Lanes "input", "all-reduce" and so on hold what went on beside it.
    """

    rank: int
    first_step: int
    num_steps: int
    seconds: float  # from the beginning of the first of these steps to the end of the last
    spans: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StartedUp(Event):
    """Rank 0 has taken its first step; what came before it, and that step itself, in the order of `seconds`."""

    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class AnchorTaken(Event):
    """A pass over the whole epoch for the full gradient, before the step after `step` (svrg, halp); no part of the
    epoch's own ledger."""

    step: int
    samples: int  # each exactly once, as the ledger has them
    seconds: float
    loss: float  # the mean over them at the anchor, without weight decay
    gradient_norm: float  # of the full gradient, with it
    scale: float | None  # of the offsets; None where they are not rounded
    ledger: str
    # Of the rounded offsets that the steps before it led to; None where there were none.
    share_at_end: float | None = None  # at an end of their grid
    share_at_zero: float | None = None  # where they began


@dataclass(frozen=True, kw_only=True)
class EpochDone(Event):
    """An epoch ended; the ledger tells whether every sample was seen exactly once in it."""

    epoch: int
    ledger: str
    ledger_ok: bool
    bad_samples: int  # unreadable ones met since the run began or resumed


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The whole validation set was classified."""

    step: int
    epoch: float
    top1: float
    top5: float | None  # None where there are no more than five classes: it would be 1 whatever the network does
    correct1: int
    correct5: int
    total: int
    loss: float
    seconds: float
    bad_samples: int = 0  # unreadable ones, which were left out
    # The same of the averaged weights; None where there are none.
    average_top1: float | None = None
    average_top5: float | None = None
    average_correct1: int | None = None
    average_correct5: int | None = None
    average_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class MistakesFound(Event):
    """What the last evaluation got wrong, by the averaged weights where there are some."""

    step: int
    confusion: list[list[int]]  # [class, taken for, how often], those that happened, the most frequent first
    worst: list[dict[str, Any]]  # most confident first: {"name", "label", "predicted", "confidence", "jpeg"} (base64)


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk, since `time_s`; it may be told some steps later."""

    step: int
    path: str
    bytes: int
    seconds: float  # that steps waited for it
    write_s: float | None = None  # that it took to write, while steps went on; None where they all waited

    @property
    def took_s(self) -> float:
        return self.seconds if self.write_s is None else self.write_s


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """A sentence for people."""

    level: Literal["info", "warning"]
    text: str
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """How a part of the run ended, and where its training time went; T = S · N · e."""

    status: Literal["finished", "interrupted", "failed"]
    step: int
    epoch: float
    wall_s: float
    train_s: float
    images: int
    images_per_second: float  # T
    speed_one_rank: float | None  # S: images per second of one rank that waits for nobody
    world_size: int  # N
    efficiency: float | None  # e
    share_compute: float
    share_comm: float
    share_input: float
    reason: str = ""
    diverged: bool = False  # whether it failed because training itself went wrong, and would again
    straggler: str = ""  # the sentence that names who held the others up, if anyone did
    # By rank, what a step cost it before it waited for others: seconds of input and of computing, medians over the run.
    rank_times: list[list[float]] = field(default_factory=list)  # empty where a rank was alone, or the others are gone
    startup_s: float = 0.0  # of `wall_s`: from the start to the first step
    evaluate_s: float = 0.0
    checkpoint_s: float = 0.0
    anchor_s: float = 0.0  # passes for full gradients
    energy_j: float | None = None  # of all devices, where they tell
    memory_bytes: int | None = None  # that rank 0's device held at most, where it tells


KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        PlanChosen,
        RunPredicted,
        InputChosen,
        StepDone,
        LayersMeasured,
        TimelineTaken,
        StartedUp,
        AnchorTaken,
        EpochDone,
        Evaluated,
        MistakesFound,
        CheckpointSaved,
        Notice,
        RunEnded,
    )
}


FIELDS: dict[type[Event], dict[str, Any]] = {
    kind: {item.name: item.type for item in fields(kind)} for kind in KINDS.values()
}


class Sink(Protocol):
    """Whatever listens to a run."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Appends records to a file, each whole on disk before `emit` returns; a full disk never stops the run."""

    def __init__(self, path: Path, warn: Callable[[Notice], None], part_bytes: int = PART_BYTES) -> None:
        self.path = path
        self._warn = warn
        self._warned = False
        self._part_bytes = part_bytes
        try:
            self._file = _open_log(path)
        except OSError as error:
            raise LockstepError(f"Cannot write the event log {path}: {error.strerror}.") from None
        self._size = os.fstat(self._file).st_size
        # A killed run may have left half a record, which must not swallow the first one of this part.
        self._is_torn = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"

    def emit(self, event: Event) -> None:
        line = (b"\n" if self._is_torn else b"") + encode(event).encode(errors="backslashreplace") + b"\n"
        try:
            # One unbuffered write: a record is on disk or torn, never late.
            written = os.write(self._file, line)
            self._is_torn = written < len(line)
            self._size += written
            problem = "No space left on device" if self._is_torn else ""
            if self._size >= self._part_bytes and not self._is_torn:
                self._begin_part()
        except OSError as error:
            problem = error.strerror or str(error)
        if problem and not self._warned:
            self._warned = True
            text = f"Cannot write to {self.path}: {problem}; training goes on, and some of its records are lost."
            self._warn(Notice(level="warning", text=text))

    def close(self) -> None:
        os.close(self._file)

    def _begin_part(self) -> None:
        """Put the full file away and go on in a new one; on failure in the old one, until it is twice as large."""
        self._part_bytes *= 2
        number = max(map(_read_number, list_full_parts(self.path)), default=0) + 1
        part = self.path.with_name(f"{self.path.stem}-{number:04d}{self.path.suffix}")
        os.rename(self.path, part)
        try:
            file = _open_log(self.path)
        except OSError:
            os.rename(part, self.path)
            raise
        os.close(self._file)
        self._file, self._size, self._part_bytes = file, 0, self._part_bytes // 2
        thin_part(part)


def _open_log(path: Path) -> int:
    """A log to read and append to; OSError for what is no plain file."""
    # Not blocking: a pipe without a reader takes a few records and then holds up training.
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is not a plain file", str(path))


def thin_part(path: Path) -> None:
    """Of the step records in a full part, leave one in twenty and the last."""
    lines = path.read_bytes().splitlines(keepends=True)
    steps = [number for number, line in enumerate(lines) if line.startswith(STEP_OPENING)]
    dropped = set(steps[:-1]) - set(steps[::STEPS_FOR_ONE])
    write_whole(path, b"".join(line for number, line in enumerate(lines) if number not in dropped))


def list_full_parts(path: Path) -> list[Path]:
    """The full parts of a log, in their order."""
    parts = path.parent.glob(f"{path.stem}-*{path.suffix}")
    return sorted((part for part in parts if _read_number(part)), key=_read_number)


def _read_number(part: Path) -> int:
    """The number of a full part; 0 for another file."""
    text = part.stem.rpartition("-")[2]
    return int(text) if text.isascii() and text.isdecimal() and 4 <= len(text) <= 9 else 0


def encode(event: Event) -> str:
    """A record as one line of JSON, which has no NaN: a number that is not finite becomes null."""
    values = {item.name: getattr(event, item.name) for item in fields(event)}
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps({"kind": event.kind, **finite}, separators=(",", ":"), ensure_ascii=False)


def decode(line: str) -> Event | None:
    """The record of a line; None for a torn line or a kind this version does not know."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    name = values.pop("kind", None) if isinstance(values, dict) else None
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    known = FIELDS[kind]
    return kind(**{name: _read_value(name, value, known[name]) for name, value in values.items() if name in known})


def _read_value(name: str, value: Any, wanted: Any) -> Any:
    """A field's value; TypeError for one that no version wrote there."""
    if wanted is float and value is None:
        return math.nan
    if not _fits(value, wanted):
        raise TypeError(f"a record's {name} is no {getattr(wanted, '__name__', wanted)}")
    return value


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value is of an annotation's kind; a word unknown to this version is still a word."""
    if isinstance(wanted, UnionType):
        return any(_fits(value, choice) for choice in get_args(wanted))
    if wanted is NoneType:
        return value is None
    if wanted is int:
        return type(value) is int and abs(value) < LARGEST
    if wanted is float:
        # A loss may become any number before a run ends; an integer of 5,000 digits is no float's.
        return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < LARGEST)
    origin = get_origin(wanted)
    return isinstance(value, str if origin is Literal else origin or wanted)


def read_events(path: Path) -> list[Event]:
    """All records of a run, from its folder or its log, full parts first; a record torn by a kill is left out."""
    path = path / LOG_NAME if path.is_dir() else path
    parts = [*list_full_parts(path), path]
    if len(parts) > 1 and not path.exists():  # killed between two parts
        parts.pop()
    return [event for part in parts for event in read_part(part)]


def read_part(path: Path) -> list[Event]:
    """The records of one file of a log."""
    try:
        text = read_small(path, MAX_LOG_BYTES).decode(errors="replace")
    except OSError as error:
        raise LockstepError(
            f"Cannot read the event log {path}: {error.strerror}; give a run's folder that can be read."
        ) from None
    try:
        return [event for line in text.split("\n") if (event := decode(line)) is not None]
    except TypeError as error:
        raise LockstepError(f"{path} was not written by this version of Lockstep: {error}.") from None
