"""What a plan says of so many devices: plain numbers and sentences, as JSON too. Torch-free.

`search.py` makes predictions; the terminal, the page and whoever compares a run with its prediction read them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

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
