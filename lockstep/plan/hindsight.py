"""What was predicted for a run beside what it measured, row by row, and which assumption was wrong. Torch-free.

`foresight.py` made the prediction before the first step. It is compared by whoever writes the run's summary, its page
or its last lines, from the records of one part of the run (`measured_steps.py`, `assumptions.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.events import Event, InputChosen, RunPredicted
from lockstep.plan.assumptions import name_assumption, name_source, tell_trial
from lockstep.plan.measured_steps import LONGEST, PASSES, Measured, find_last, finite, is_time, measure_steps

MOST_TEXTS, LONGEST_TEXT = 20, 400

Unit = Literal["s", "images/s", "share", "bytes"]


@dataclass(frozen=True)
class Row:
    """One quantity; `measured` is None where the run cannot tell."""

    name: str
    unit: Unit
    predicted: float
    measured: float | None
    source: str  # of the prediction

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        if self.measured is None or self.predicted <= 0:
            return None
        ratio = self.measured / self.predicted
        return ratio if math.isfinite(ratio) else None


@dataclass(frozen=True)
class Hindsight:
    """All rows, what was most wrong, and whether anything could be compared."""

    rows: tuple[Row, ...]
    sentence: str
    beside: str  # what whole steps had taken before the first, where they were tried
    assumptions: tuple[str, ...]
    is_compared: bool


def look_back(part: Sequence[Event]) -> Hindsight | None:
    """The prediction of one part of a run beside what the part measured; None where nothing was predicted."""
    predicted = find_last(part, RunPredicted)
    if predicted is None or not _is_sound(predicted):
        return None
    measured = measure_steps(part, predicted)
    if isinstance(measured, str):
        rows = _list_rows(predicted, None)
        return Hindsight(rows, measured, "", _read_texts(predicted.assumptions), is_compared=False)
    rows = _list_rows(predicted, measured)
    sentence = name_assumption(predicted, measured, find_last(part, InputChosen))
    beside = tell_trial(predicted, measured)
    return Hindsight(rows, sentence, beside, _read_texts(predicted.assumptions), is_compared=True)


def to_table(hindsight: Hindsight) -> dict[str, Any]:
    """As plain values, for the summary."""
    return {
        "compared": hindsight.is_compared,
        "sentence": hindsight.sentence,
        "beside": hindsight.beside,
        "assumptions": list(hindsight.assumptions),
        "rows": [
            {
                "what": row.name,
                "unit": row.unit,
                "predicted": row.predicted,
                "measured": row.measured,
                "ratio": row.ratio,
                "source": row.source,
            }
            for row in hindsight.rows
        ],
    }


def _is_sound(predicted: RunPredicted) -> bool:
    """Whether the seconds are ones; a record that came from anywhere may say anything."""
    values = (
        *(predicted.input_s, predicted.slowest_s, predicted.communicate_s, predicted.messages_s),
        *(value for name in PASSES if (value := getattr(predicted, f"{name}_s")) is not None),
        *(predicted.images_per_second, predicted.speed_one_rank, predicted.efficiency, predicted.train_s),
    )
    divisors = predicted.step_s, predicted.compute_s, predicted.images
    return all(map(is_time, divisors)) and all(0 <= value < LONGEST for value in values)


def _read_texts(texts: Sequence[object]) -> tuple[str, ...]:
    return tuple(text[:LONGEST_TEXT] for text in texts[:MOST_TEXTS] if isinstance(text, str))


def _list_rows(predicted: RunPredicted, measured: Measured | None) -> tuple[Row, ...]:
    """The parts of a step, the step, and what follows from it; what the run cannot tell is None."""
    found = _list_measured(measured) if measured else {}
    rows: list[Row] = []

    def add(name: str, unit: Unit, value: float | None, source: str = "") -> None:
        if value is not None:
            rows.append(Row(name, unit, float(value), found.get(name), name_source(predicted, source)))

    add("waiting for input", "s", predicted.input_s, "input")
    for name in PASSES:
        add(name, "s", getattr(predicted, f"{name}_s"), "computing")
    add("computing, together", "s", predicted.compute_s, "computing")
    if predicted.world_size > 1 and measured and measured.slowest_s is None:
        add("waiting for others and for messages", "s", predicted.slowest_s + predicted.communicate_s, "messages")
    elif predicted.world_size > 1:
        add("waiting for the slowest rank", "s", predicted.slowest_s, "slowest")
        add("exposed communication", "s", predicted.communicate_s, "messages")
    add("a step", "s", predicted.step_s)
    if predicted.world_size > 1:
        add("all messages, hidden or not", "s", predicted.messages_s, "messages")
    add("throughput T", "images/s", predicted.images_per_second)
    add("one rank alone S", "images/s", predicted.speed_one_rank)
    add("efficiency e", "share", predicted.efficiency)
    if measured is None or measured.ended.status == "finished":
        add("all steps but the first", "s", max(0, predicted.steps - 1) * predicted.step_s)
    add("memory of a device", "bytes", predicted.memory_bytes, "memory")
    return tuple(rows)


def _list_measured(measured: Measured) -> dict[str, float | None]:
    ended, slowest_s = measured.ended, measured.slowest_s
    return {
        "waiting for input": measured.input_s,
        **measured.passes,
        "computing, together": measured.compute_s,
        "waiting for others and for messages": measured.wait_s,
        "waiting for the slowest rank": slowest_s,
        "exposed communication": None if slowest_s is None else measured.wait_s - slowest_s,
        "a step": measured.step_s,
        "all messages, hidden or not": measured.messages_s,
        "throughput T": finite(ended.images_per_second),
        "one rank alone S": finite(ended.speed_one_rank),
        "efficiency e": finite(ended.efficiency),
        "all steps but the first": ended.train_s,
        "memory of a device": None if ended.memory_bytes is None else float(ended.memory_bytes),
    }
