"""A checkpoint's counters: how a manifest has those of a step, and whether all of them can be true (step 10).

Each number is held against what it describes before anybody relies on one. A seal only tells that a manifest is as
somebody wrote it; it may have been written wrongly, or to do harm. What cannot be is damage, and the checkpoint is
passed over (`checkpoint.py`).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.order import Cursor, step_at
from lockstep.engine.checkpoint import Checkpoint, DamagedCheckpoint
from lockstep.errors import LockstepError

MAX_COUNT = 10**15  # of steps, samples, epochs: beyond any run, and exact in every format here
MAX_RANKS = 1 << 20
RULES = ("sgd", "lars", "lamb", "adamw", "muon", "svrg", "halp")
NUM_SCALE_NUMBERS = 4  # the state of a loss scale
CLASSES = "classes"  # the key of their names
MAX_NAMES_BYTES = 1 << 25  # of all of them, as JSON has them: far less than a manifest may have
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# Formats besides FP32, by file; statistics are those of all ranks.
ALLOWED = {
    "model": WHOLE,
    "average": WHOLE,
    "optimizer": (torch.int64, torch.int16, torch.int8),
    "statistics": (torch.int64,),
}
LEDGER_VALUE = re.compile(r"[0-9a-f]{16}")


def describe_counters(counters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arrays of a few numbers as a manifest has them, by name: a number, or a list of them."""
    return {name: array.flatten().tolist() if array.ndim else _read_number(array) for name, array in counters.items()}


def _read_number(array: Tensor) -> int | float:
    """A count may be held in a floating format, and is a whole number all the same."""
    number = array.item()
    return int(number) if float(number).is_integer() else number


def fill_counters(counters: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """The way back. What a manifest lacks stays as it starts: it is of another precision, or of an older version."""
    for name, array in counters.items():
        numbers = _list_numbers(state.get(name))
        if not numbers:
            continue
        if len(numbers) != array.numel():
            raise LockstepError(
                f"The checkpoint has {len(numbers)} numbers of {name} and this run {array.numel()}; resume with the "
                "settings that the run was started with."
            )
        # By way of floats, as whole numbers beyond 64 bits fit no other format.
        values = [float(number) for number in numbers] if array.is_floating_point() else numbers
        array.copy_(torch.tensor(values, dtype=array.dtype).view_as(array))


def check_counters(checkpoint: Checkpoint, counters: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that lacks something or says something impossible; `counters` are those it may fill."""
    state = checkpoint.state
    if not isinstance(state, dict):
        raise DamagedCheckpoint("its counters are no table")
    faults = {name: not _are_numbers(state.get(name), array.dtype) for name, array in counters.items()} | {
        "files": not {"model", "optimizer"} <= checkpoint.files.keys(),
        "step": not _is_count(state.get("step")) or checkpoint.path.name != f"step-{state['step']:08d}",
        "rule": state.get("rule") not in RULES,
        "rule_steps": not _is_count(state.get("rule_steps")),
        "world_size": not _is_count(state.get("world_size"), 1, MAX_RANKS),
        "loss_scale": not _is_scale(state.get("loss_scale")),
        "order": not _is_order(state.get("order")),
        "cursor": not _is_table(state.get("cursor"), {"epoch", "position"}),
        "ledger": not _is_ledger(state.get("ledger")),
        CLASSES: not are_names(state.get(CLASSES, [])),
    }
    for name, is_wrong in faults.items():
        if is_wrong:
            raise DamagedCheckpoint(f"its manifest says nothing possible of {name}")
    _check_formats(checkpoint.files)
    _check_place(state)
    _check_statistics(checkpoint.files.get("statistics", {}), state["world_size"])


def name_classes(classes: Sequence[str]) -> dict[str, Any]:
    """The names as counters have them; nothing where they are so many that nobody could read the manifest."""
    names = list(classes)
    return {CLASSES: names} if names and len(json.dumps(names)) <= MAX_NAMES_BYTES else {}


def are_names(value: Any) -> bool:
    """Whether these can be the names of classes, or none."""
    return (
        isinstance(value, list)
        and all(isinstance(name, str) and name for name in value)
        and len(set(value)) == len(value)
    )


def _check_place(state: Mapping[str, Any]) -> None:
    """Step, cursor and ledger tell the same story."""
    cursor, order, ledger = Cursor(**state["cursor"]), state["order"], state["ledger"]
    if cursor.position >= order["num_samples"]:
        raise DamagedCheckpoint("its cursor lies beyond the data")
    if ledger["count"] != cursor.position:
        raise DamagedCheckpoint("its ledger has not as many samples as its cursor")
    # Not more than steps: a run that went on with larger batches counts those anew, and what its rule counted stays.
    num_seen = cursor.epoch * order["num_samples"] + cursor.position
    if "global_batch" in order and state["rule_steps"] > num_seen:
        raise DamagedCheckpoint("its rule has taken more steps than there were samples")
    if "global_batch" in order and step_at(cursor, order["num_samples"], order["global_batch"]) != state["step"]:
        raise DamagedCheckpoint("its cursor is not that of its step")


def _check_formats(files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Masters, momentum and statistics are FP32 in every precision; batch norm counts in integers, the buffers of
    somebody's own network may be of any whole numbers, and so may the offsets of halp."""
    for file, arrays in files.items():
        for name, array in arrays.items():
            if array.dtype not in (torch.float32, *ALLOWED.get(file, ())):
                raise DamagedCheckpoint(f"{file}.safetensors has {name[:40]} in a format of another program")


def _check_statistics(statistics: Mapping[str, Tensor], world_size: int) -> None:
    for array in statistics.values():
        if array.ndim != 2 or len(array) != world_size:
            raise DamagedCheckpoint(f"its statistics are not those of {world_size} ranks")


def _is_count(value: Any, least: int = 0, most: int = MAX_COUNT) -> bool:
    return type(value) is int and least <= value <= most


def _list_numbers(value: Any) -> list[Any]:
    """One number, several or none, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _are_numbers(value: Any, dtype: torch.dtype) -> bool:
    """Whether all are numbers, each in the format's range."""
    numbers = _list_numbers(value)
    if dtype.is_floating_point:
        return all(type(number) in (int, float) and abs(number) <= torch.finfo(dtype).max for number in numbers)
    return all(_is_count(number, torch.iinfo(dtype).min, torch.iinfo(dtype).max) for number in numbers)


def _is_table(value: Any, names: set[str]) -> bool:
    """Whether it has exactly these names, each with a count."""
    return isinstance(value, dict) and value.keys() == names and all(map(_is_count, value.values()))


def _is_ledger(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"value", "count"}:
        return False
    return (
        isinstance(value["value"], str) and bool(LEDGER_VALUE.fullmatch(value["value"])) and _is_count(value["count"])
    )


def _is_scale(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != NUM_SCALE_NUMBERS:
        return False
    is_number = all(type(number) in (int, float) and abs(number) < 1e38 for number in value)
    return is_number and all(map(math.isfinite, value)) and value[0] > 0 and min(value) >= 0


def _is_order(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"seed", "num_samples", "global_batch", "data"}:
        return False
    data = value.get("data", {})
    is_data = isinstance(data, dict) and all(isinstance(text, str) for text in data.values())
    counts = _is_count(value.get("num_samples"), 1) and _is_count(value.get("global_batch", 1), 1)
    return is_data and counts and _is_count(value.get("seed"), 0, 2**64 - 1)
