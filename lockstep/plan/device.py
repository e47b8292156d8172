"""One step on one device at many batches: what a planner knows of hardware. Torch-free.

`lockstep profile` measures a profile (`engine/profiling.py`), `shipped.py` finds those that come with the package,
`derive.py` makes one for a device that nobody here has, and whoever asks how a step would fare elsewhere reads it.
A run's own profile, of its ranks and its messages, is `profile.py`.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from lockstep.errors import LockstepError
from lockstep.plan.checked import check_types, read_count, read_execution, read_time
from lockstep.plan.plan import Execution

FORMAT = 1
DIGITS = 4  # of a time in a file: a clock tells no more, and files stay small
MAX_BATCH = 1 << 20
MAX_ROWS = 1 << 12  # batches, layers and slots, each: more than any network here has
LONGEST_TEXT = 2000  # of a note
LONGEST_STEP_S = 1e5
Source = Literal["measured", "derived"]


@dataclass(frozen=True)
class LayerTime:
    """One layer, in forward order: a convolution or a linear layer, and what follows it until the next."""

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int  # kept for the backward pass
    slots: tuple[str, ...]


@dataclass(frozen=True)
class SlotReady:
    """One gradient: its size, and when it is ready, in seconds after the backward pass began."""

    name: str
    elements: int
    num_bytes: int
    ready_s: float


@dataclass(frozen=True)
class BatchTime:
    """The step at one per-device batch in one way to execute it, alone: nothing sent, nothing waited for."""

    batch: int
    execution: Execution
    step_s: float
    forward_s: float
    backward_s: float
    update_s: float
    launch_s: float  # of the host, to launch the step
    memory_bytes: int  # at the peak
    layers: tuple[LayerTime, ...]  # in forward order
    slots: tuple[SlotReady, ...]  # in the layout's order
    extrapolated: bool = False  # outside the batches that were measured


@dataclass(frozen=True)
class DeviceInput:
    """What making batches takes of one device's host."""

    decoder: str
    images_per_core_s: float
    image_bytes: float  # of an encoded image, on average
    copy_bytes_s: float  # from the host to the device; 0: nothing is copied
    device_images_s: float = 0.0  # that the device decodes by itself, beside its host's cores


@dataclass(frozen=True)
class DeviceProfile:
    """One model on one device, over a range of batches."""

    device: str
    model: str
    image_size: int
    precision: str
    rule: str  # that updated the weights
    source: Source
    note: str  # hardware, versions and commit, or what it was derived from
    memory_bytes: int  # of the device
    batches: tuple[BatchTime, ...]
    input: DeviceInput | None = None

    @property
    def executions(self) -> tuple[Execution, ...]:
        """The ways to execute the step that were measured."""
        return tuple(dict.fromkeys(row.execution for row in self.batches))

    def at(self, batch: int, execution: Execution | None = None) -> BatchTime:
        """The step at any batch: a straight line between the measured ones, and on beyond them; None: the quickest."""
        key = batch, execution
        if key not in self._known:  # a plan asks for the same batch a dozen times
            self._known[key] = self._mix_at(batch, execution)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, Execution | None], BatchTime]:
        return {}

    def _mix_at(self, batch: int, execution: Execution | None) -> BatchTime:
        if not 0 < batch <= MAX_BATCH:
            raise LockstepError(f"A batch of {batch} is none; ask for 1 to {MAX_BATCH:,} images.")
        if execution is None:
            ways = [self.at(batch, way) for way in self.executions]
            inside = [row for row in ways if not row.extrapolated]
            return min(inside or ways, key=lambda row: row.step_s)
        rows = sorted((row for row in self.batches if row.execution == execution), key=lambda row: row.batch)
        if not rows:
            raise LockstepError(f"The profile of {self.device} has no step with {execution}.")
        index = bisect_left([row.batch for row in rows], batch)
        if index < len(rows) and rows[index].batch == batch:
            return rows[index]
        beyond = index in (0, len(rows))
        if len(rows) == 1:
            none = _mix(rows[0], rows[0], 0, lambda low, high: 0.0)
            low, high = none, rows[0]  # all that one batch tells is a rate
        else:
            index = min(max(index, 1), len(rows) - 1)
            low, high = rows[index - 1], rows[index]
        share = (batch - low.batch) / (high.batch - low.batch)
        mixed = _mix(low, high, batch, lambda a, b: max(0.0, a + (b - a) * share))
        return replace(mixed, extrapolated=beyond)


def _mix(low: BatchTime, high: BatchTime, batch: int, mix: Callable[[float, float], float]) -> BatchTime:
    """Every number of two rows mixed; sizes of gradients are the same in both."""
    return BatchTime(
        batch=batch,
        execution=high.execution,
        step_s=mix(low.step_s, high.step_s),
        forward_s=mix(low.forward_s, high.forward_s),
        backward_s=mix(low.backward_s, high.backward_s),
        update_s=mix(low.update_s, high.update_s),
        launch_s=mix(low.launch_s, high.launch_s),
        memory_bytes=round(mix(low.memory_bytes, high.memory_bytes)),
        layers=tuple(
            LayerTime(
                b.name,
                mix(a.forward_s, b.forward_s),
                mix(a.backward_s, b.backward_s),
                round(mix(a.activation_bytes, b.activation_bytes)),
                b.slots,
            )
            for a, b in zip(low.layers, high.layers, strict=True)
        ),
        slots=tuple(replace(b, ready_s=mix(a.ready_s, b.ready_s)) for a, b in zip(low.slots, high.slots, strict=True)),
    )


def to_json(profile: DeviceProfile) -> str:
    """Compact, times to four digits: names stand once, and each batch has rows of numbers."""
    first = profile.batches[0]
    facts = {name: getattr(profile, name) for name in _FACTS}
    table = {
        "format": FORMAT,
        **facts,
        "input": None if profile.input is None else {k: _round(v) for k, v in vars(profile.input).items()},
        "layers": [[layer.name, *layer.slots] for layer in first.layers],
        "slots": [[slot.name, slot.elements, slot.num_bytes] for slot in first.slots],
        "batches": [_to_row(row) for row in profile.batches],
    }
    return json.dumps(table, separators=(",", ":")).replace('},{"batch"', '},\n{"batch"') + "\n"


def _to_row(row: BatchTime) -> dict[str, Any]:
    return {
        "batch": row.batch,
        "execution": vars(row.execution),
        **{name: _round(getattr(row, name)) for name in _TIMES},
        "memory_bytes": row.memory_bytes,
        "layers": [[_round(each.forward_s), _round(each.backward_s), each.activation_bytes] for each in row.layers],
        "ready_s": [_round(slot.ready_s) for slot in row.slots],
    }


def _round(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def from_json(text: str) -> DeviceProfile:
    """Read back what `to_json` wrote; what is no profile of a device is a sentence."""
    try:
        table = json.loads(text)
        if table["format"] != FORMAT:
            raise LockstepError(f"The device profile has format {table['format']!r:.40}, not {FORMAT}.")
        facts = _read_facts(table)
        layers = [_read_names(names) for names in _read_list(table["layers"])]
        slots = [_read_slot(row) for row in _read_list(table["slots"])]
        known = {slot.name for slot in slots}
        if len(known) != len(slots) or sorted(name for names in layers for name in names[1:]) != sorted(known):
            raise ValueError("the layers do not hold each slot once")
        rows = tuple(_read_row(row, layers, slots) for row in _read_list(table["batches"]))
        if len({(row.batch, row.execution) for row in rows}) != len(rows):
            raise ValueError("a batch stands there twice")
        read = table["input"]
        return DeviceProfile(**facts, batches=rows, input=None if read is None else _read_input(read))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise LockstepError(f"The device profile is damaged ({type(error).__name__}: {str(error)[:80]}).") from None


_FACTS = ("device", "model", "image_size", "precision", "rule", "source", "note", "memory_bytes")
_TIMES = ("step_s", "forward_s", "backward_s", "update_s", "launch_s")


def _read_facts(table: dict[str, Any]) -> dict[str, Any]:
    facts = {name: table[name] for name in _FACTS}
    for name in ("image_size", "memory_bytes"):
        read_count(facts.pop(name), least=1)
    if facts["source"] not in get_args(Source):
        raise ValueError(f"source is {facts['source']!r}")
    for name, text in facts.items():
        _read_text(text, name)
    return facts | {name: table[name] for name in ("image_size", "memory_bytes")}


def _read_text(text: object, what: str) -> str:
    if not isinstance(text, str) or "[/" in text or len(text) > LONGEST_TEXT:
        raise ValueError(f"{what} is no plain text")
    return text


def _read_list(rows: object) -> list[Any]:
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_ROWS:
        raise ValueError(f"a list has not 1 to {MAX_ROWS} entries")
    return rows


def _read_names(names: object) -> list[str]:
    return [_read_text(name, "a layer's name") for name in _read_list(names)]


def _read_slot(row: Sequence[Any]) -> SlotReady:
    name, elements, num_bytes = row
    return SlotReady(_read_text(name, "a slot's name"), read_count(elements, 1), read_count(num_bytes, 1), 0.0)


def _read_row(table: dict[str, Any], layers: Sequence[Sequence[str]], slots: Sequence[SlotReady]) -> BatchTime:
    batch = read_count(table["batch"], least=1)
    if batch > MAX_BATCH:
        raise ValueError(f"a batch of {batch}")
    times: dict[str, Any] = {name: _read_seconds(table[name]) for name in _TIMES}
    if not times["step_s"]:
        raise ValueError("a step that takes no time")
    triples = [(_read_seconds(row[0]), _read_seconds(row[1]), read_count(row[2])) for row in table["layers"]]
    ready_s = [_read_seconds(value) for value in table["ready_s"]]
    return BatchTime(
        batch=batch,
        execution=read_execution(table["execution"]),
        **times,
        memory_bytes=read_count(table["memory_bytes"]),
        layers=tuple(
            LayerTime(name, *triple, tuple(own)) for (name, *own), triple in zip(layers, triples, strict=True)
        ),
        slots=tuple(replace(slot, ready_s=ready) for slot, ready in zip(slots, ready_s, strict=True)),
    )


def _read_seconds(value: object) -> float:
    seconds = read_time(value)
    if seconds > LONGEST_STEP_S:
        raise ValueError(f"{seconds} s is no step")
    return seconds


def _read_input(table: dict[str, Any]) -> DeviceInput:
    found = DeviceInput(**check_types(DeviceInput, table))
    if not (read_time(found.images_per_core_s) and read_time(found.image_bytes)):
        raise ValueError("an input that makes no images")
    read_time(found.copy_bytes_s)
    read_time(found.device_images_s)
    return found
