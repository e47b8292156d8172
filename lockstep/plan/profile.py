"""What was measured before step 0, on these ranks for this model: the facts a plan is chosen by. Torch-free.

`engine/measure.py` fills a profile, `choose.py` picks from it, the run keeps it as `profile.json`, and whoever wants to
know how the same step would fare elsewhere reads it.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.comm.cost import Choice, Fit, Timing, fit_cost
from lockstep.errors import LockstepError
from lockstep.layout import Layout
from lockstep.plan.checked import MOST, check_types, read_execution, read_time
from lockstep.plan.plan import Execution

FORMAT = 1
SHORTEST_S, LONGEST_S = 1e-9, 1e6  # of a message that was measured
LONGEST_NAME = 64  # of an all-reduce


@dataclass(frozen=True)
class Setup:
    """What a profile is true of; a profile of another setup is none of ours."""

    device: str  # the GPU's or the processor's name
    topology: str
    links: str  # as a cluster file gives them; empty: not given
    backend: str  # with its version; empty in a world of one
    precision: str
    batch: int  # samples of a rank's largest share
    max_batch: int  # samples of one pass at most
    image_size: int
    model: str  # slots and elements
    pins: str  # what the recipe leaves no choice in
    versions: str

    @property
    def name(self) -> str:
        """A name for files: readable, and another for every setup."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        device = "".join(letter if letter.isalnum() else "-" for letter in self.device)[:24].strip("-")
        return f"{self.topology}-{device}-{self.precision}-{self.batch}x{self.image_size}px-{digest}"


@dataclass(frozen=True)
class SlotTime:
    """One gradient: its bytes, when it is ready after the backward pass began, and how long after the one before it."""

    name: str
    num_bytes: int
    ready_s: float
    backward_s: float


@dataclass(frozen=True)
class StepTime:
    """The step in one way to execute it, alone: nothing sent. The update is part of `step_s`.

    A profile of an earlier version does not tell the last four, which are 0 then.
    """

    execution: Execution
    step_s: float  # of rank 0, as all but the last two
    backward_s: float  # of the last pass, until its last gradient is ready
    slots: tuple[SlotTime, ...]
    forward_s: float = 0.0  # of all passes together
    update_s: float = 0.0
    mean_s: float = 0.0  # of the step, over all ranks
    slowest_s: float = 0.0


@dataclass(frozen=True)
class Trial:
    """Whole steps of one candidate on all ranks: the slowest rank's seconds a step, or why it failed."""

    execution: Execution
    rule: str  # that cut the buffers
    reduction: str  # in words
    seconds: float
    failure: str = ""


@dataclass(frozen=True)
class InputRate:
    """What the input can do: images a second if its threads never had to wait for the step."""

    images_per_second: float
    decoder: str
    threads: int


@dataclass(frozen=True)
class Profile:
    """All of it."""

    setup: Setup
    seconds: float  # that measuring took
    steps: tuple[StepTime, ...] = ()
    messages: tuple[Timing, ...] = ()  # the medians
    trials: tuple[Trial, ...] = ()
    input: InputRate | None = None

    @property
    def fits(self) -> dict[Choice, Fit]:
        """The cost of every all-reduce that was measured at two sizes or more."""
        sizes: dict[Choice, set[int]] = {}
        for timing in self.messages:
            sizes.setdefault(timing.choice, set()).add(timing.num_bytes)
        return fit_cost([timing for timing in self.messages if len(sizes[timing.choice]) > 1])


def time_slots(layout: Layout, ready_s: Sequence[float]) -> tuple[SlotTime, ...]:
    """The slots of a layout with the times at which their gradients are ready, whichever format they have."""
    before = {}
    last = 0.0
    for index in sorted(range(len(ready_s)), key=ready_s.__getitem__):
        before[index], last = last, ready_s[index]
    return tuple(
        SlotTime(slot.name, slot.numel * (2 if slot.half else 4), ready_s[index], ready_s[index] - before[index])
        for index, slot in enumerate(layout.slots)
    )


def to_json(profile: Profile) -> str:
    """For the run's folder and the user's cache; `from_json` reads it back."""
    table = asdict(profile) | {"format": FORMAT}
    table["messages"] = [
        {"all_reduce": str(timing.choice), "bytes": timing.num_bytes, "seconds": timing.seconds}
        for timing in profile.messages
    ]
    for trial in table["trials"]:
        trial["seconds"] = _finite(trial["seconds"])
    return json.dumps(table, indent=1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def from_json(text: str) -> Profile:
    """Read back what `to_json` wrote; what is no profile is a sentence."""
    try:
        table = json.loads(text)
        if table["format"] != FORMAT:
            raise LockstepError(f"The profile has format {table['format']!r}, not {FORMAT}.")
        return Profile(
            setup=read_setup(table["setup"]),
            seconds=read_time(table["seconds"]),
            steps=tuple(_read_step(step) for step in table["steps"]),
            messages=tuple(_read_timing(row) for row in table["messages"]),
            trials=tuple(_read_trial(row) for row in table["trials"]),
            input=InputRate(**check_types(InputRate, table["input"])) if table["input"] else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LockstepError(f"The profile is damaged ({type(error).__name__}: {str(error)[:80]}).") from None


def read_setup(table: dict[str, Any]) -> Setup:
    """A setup from plain values; ValueError or KeyError for what is none."""
    return Setup(**check_types(Setup, table))


def _read_step(table: dict[str, Any]) -> StepTime:
    slots = tuple(SlotTime(**check_types(SlotTime, slot)) for slot in table["slots"])
    for slot in slots:
        read_time(slot.ready_s)
        read_time(slot.backward_s)
    execution = read_execution(table["execution"])
    later = {name: read_time(table.get(name, 0.0)) for name in ("forward_s", "update_s", "mean_s", "slowest_s")}
    return StepTime(execution, read_time(table["step_s"]), read_time(table["backward_s"]), slots, **later)


def _read_timing(table: dict[str, Any]) -> Timing:
    num_bytes = table["bytes"]
    if type(num_bytes) is not int or not 0 < num_bytes <= MOST:
        raise ValueError(f"{num_bytes!r} bytes")
    seconds = read_time(table["seconds"])
    if not SHORTEST_S <= seconds <= LONGEST_S:  # no clock tells less, and costs are fitted to its inverse
        raise ValueError(f"a message that took {seconds} s")
    return Timing(Choice.parse(str(table["all_reduce"])[:LONGEST_NAME]), num_bytes, seconds)


def _read_trial(table: dict[str, Any]) -> Trial:
    seconds = math.inf if table["seconds"] is None else read_time(table["seconds"])
    execution = read_execution(table["execution"])
    texts = {name: table[name] for name in ("rule", "reduction", "failure")}
    if any(not isinstance(text, str) or "[/" in text for text in texts.values()):
        raise ValueError("a trial is not told in plain text")
    return Trial(execution, seconds=seconds, **texts)
