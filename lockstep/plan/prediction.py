"""What a plan says of so many devices: plain numbers and sentences, JSON both ways. Torch-free.

`search.py` makes predictions; the terminal, the page and whoever compares a run with its prediction read them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from lockstep.errors import LockstepError
from lockstep.plan.checked import MOST, check_types
from lockstep.plan.simulate import StepParts

FORMAT = 1
Scaling = Literal["strong", "weak"]
# What may hold a step up.
Binding = Literal[
    "arithmetic", "small batches", "communication", "input", "the slowest rank", "launching", "the update"
]


@dataclass(frozen=True)
class Reduction:
    """How gradients would best travel."""

    rule: str  # that cut the buffers
    buffers: tuple[int, ...]  # bytes of each
    all_reduces: tuple[str, ...]  # of each, in words
    overlap: bool
    text: str  # all of it in words

    @property
    def num_buffers(self) -> int:
        return len(self.buffers)


@dataclass(frozen=True)
class InputNeed:
    """What a node must deliver to its devices, and what it has."""

    images_per_second: float  # of the node
    decode_cores: float
    storage_bytes_per_s: float
    cores: int | None
    storage_limit_bytes_per_s: float | None


@dataclass(frozen=True)
class Prediction:
    """One recipe on so many devices of one cluster."""

    recipe: str
    model: str
    cluster: str
    device: str
    profile: str  # measured or derived, and from what
    scaling: Scaling
    devices: int
    nodes: int
    global_batch: int
    batch_per_device: int
    passes: int
    execution: str
    step_s: float
    parts: StepParts
    comm_s: float  # of all messages, hidden or not
    images_per_second: float  # T
    speed_one_rank: float  # S: of one device that waits for nobody, at this batch
    efficiency: float  # e = T / (S · N)
    efficiency_whole: float  # T / N over the rate of one device at its best batch: what small batches cost is in it
    epochs: float
    steps: int
    train_s: float
    dollars: float | None
    energy_j: float | None
    memory_bytes: int
    memory_limit_bytes: int
    input: InputNeed | None
    reduction: Reduction
    binds: Binding
    advice: str  # what binds and what to change, in a sentence
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Impossible:
    """A size at which the recipe cannot run, and why."""

    scaling: Scaling
    devices: int
    reason: str


def to_json(predictions: Sequence[Prediction | Impossible]) -> str:
    """All sizes of a plan."""
    rows = [asdict(row) for row in predictions if isinstance(row, Prediction)]
    rest = [asdict(row) for row in predictions if isinstance(row, Impossible)]
    return json.dumps({"format": FORMAT, "predictions": rows, "impossible": rest}, indent=1) + "\n"


def from_json(text: str) -> list[Prediction | Impossible]:
    """Read back what `to_json` wrote; what is no plan is a sentence."""
    try:
        table = json.loads(text)
        if table["format"] != FORMAT:
            raise LockstepError(f"The plan has format {table['format']!r:.40}, not {FORMAT}.")
        possible = [_read_prediction(row) for row in table["predictions"]]
        return [*possible, *(_read_impossible(row) for row in table["impossible"])]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise LockstepError(f"The plan is damaged ({type(error).__name__}: {str(error)[:80]}).") from None


def _read_prediction(row: Mapping[str, Any]) -> Prediction:
    values: dict[str, Any] = {}
    for field in fields(Prediction):
        value = row[field.name]
        if field.type is float:
            value = _read_number(value, field.name)
        elif field.type is int and (type(value) is not int or not 0 <= value <= MOST):
            raise ValueError(f"{field.name} is {value!r:.40}")
        elif field.type is str:
            value = _read_text(value, field.name)
        values[field.name] = value
    for name in ("dollars", "energy_j"):
        values[name] = None if values[name] is None else _read_number(values[name], name)
    if values["scaling"] not in get_args(Scaling) or values["binds"] not in get_args(Binding):
        raise ValueError("a word that no plan has")
    need = values["input"]
    values["parts"] = StepParts(**{f.name: _read_number(row["parts"][f.name], f.name) for f in fields(StepParts)})
    values["input"] = None if need is None else _read_need(need)
    values["reduction"] = _read_reduction(row["reduction"])
    values["notes"] = tuple(_read_text(note, "a note") for note in row["notes"])
    return Prediction(**values)


def _read_need(table: Mapping[str, Any]) -> InputNeed:
    limit, cores = table["storage_limit_bytes_per_s"], table["cores"]
    if cores is not None and (type(cores) is not int or not 0 < cores <= MOST):
        raise ValueError(f"cores is {cores!r:.40}")
    rates = {n: _read_number(table[n], n) for n in ("images_per_second", "decode_cores", "storage_bytes_per_s")}
    return InputNeed(
        **rates, cores=cores, storage_limit_bytes_per_s=None if limit is None else _read_number(limit, "storage")
    )


def _read_reduction(table: Mapping[str, Any]) -> Reduction:
    buffers = tuple(table["buffers"])
    if not all(type(size) is int and 0 <= size <= MOST for size in buffers) or type(table["overlap"]) is not bool:
        raise ValueError("a reduction that is none")
    words = tuple(_read_text(word, "an all-reduce") for word in table["all_reduces"])
    rule, text = (_read_text(table[name], name) for name in ("rule", "text"))
    return Reduction(rule, buffers, words, table["overlap"], text)


def _read_impossible(row: Mapping[str, Any]) -> Impossible:
    found = Impossible(**check_types(Impossible, dict(row)))
    if found.scaling not in get_args(Scaling):
        raise ValueError("a word that no plan has")
    return found


def _read_number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ValueError(f"{name} is {value!r:.40}")
    return float(value) if math.isfinite(value) else math.nan


def _read_text(value: object, name: str) -> str:
    if not isinstance(value, str) or "[/" in value or len(value) > 4000:
        raise ValueError(f"{name} is no plain text")
    return value
