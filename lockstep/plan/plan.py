"""What a run does in every step: how it is executed, how gradients travel, how batches are made. Torch-free.

`choose.py` picks a plan, `engine/apply.py` follows it, and the run keeps it as `plan.toml`, so that a resumed run adds
in the same order. The file names slots; where they lie follows from the layout, so a file that does not fit is found
out.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import tomli_w

from lockstep.comm.cost import GROUPED, Choice
from lockstep.comm.fusion import Buffer, ReductionPlan
from lockstep.errors import LockstepError
from lockstep.layout import Layout
from lockstep.recipe_values import show

Kernels = Literal["own", "torch"]
Compile = Literal["off", "whole", "stage", "block"]
DecoderKind = Literal["cpu", "nvjpeg", "both"]
MOST = 1 << 20  # of any number in a plan's input: more is a slip of the keyboard


@dataclass(frozen=True)
class Execution:
    """One way to execute the step."""

    kernels: Kernels = "torch"
    recorded: bool = False
    compile: Compile = "off"

    def __str__(self) -> str:
        parts = ["own kernels"] if self.kernels == "own" else []
        parts += [f"compiled {'whole' if self.compile == 'whole' else 'by ' + self.compile}"] * (self.compile != "off")
        return ", ".join(parts or ["PyTorch's kernels"]) + (", recorded" if self.recorded else ", launched one by one")


@dataclass(frozen=True)
class InputPlan:
    """Who makes batches: with 0 batches ahead the pipeline finds out how many it takes."""

    decoder: DecoderKind
    threads: int
    read_processes: int
    prefetch_batches: int


@dataclass(frozen=True)
class Plan:
    """All of it."""

    execution: Execution
    reduction: ReductionPlan
    input: InputPlan


def describe_reduction(reduction: ReductionPlan) -> str:
    """Buffers, algorithms and overlap in a few words."""
    total = len(reduction.buffers)
    counts = {choice: reduction.choices.count(choice) for choice in dict.fromkeys(reduction.choices)}
    how = ", ".join(f"{count} by {choice}" if len(counts) > 1 else f"by {choice}" for choice, count in counts.items())
    when = "under" if reduction.overlap else "after"
    return f"{total} buffer{'s' if total > 1 else ''} {when} the backward pass ({how})"


def to_table(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, for TOML and for events."""
    return {
        "execution": asdict(plan.execution),
        "reduction": to_reduction_table(plan.reduction),
        "input": asdict(plan.input),
    }


def to_reduction_table(reduction: ReductionPlan) -> dict[str, Any]:
    """The part of a plan that says how gradients travel; `read_reduction` reads it back."""
    return {
        "overlap": reduction.overlap,
        "buffer": [
            {"first": buffer.first, "last": buffer.last, "bytes": buffer.num_bytes, "all_reduce": str(choice)}
            for buffer, choice in zip(reduction.buffers, reduction.choices, strict=True)
        ],
    }


def to_toml(plan: Plan) -> str:
    """The plan for people and for the run that goes on; `from_toml` reads it back."""
    header = "# How this run takes its steps, as chosen before the first one; a resumed run follows it.\n"
    return header + tomli_w.dumps(to_table(plan))


def from_toml(text: str, layout: Layout, num_ranks: int) -> Plan:
    """Read back what `to_toml` wrote; what does not describe a plan for this layout is a sentence."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise LockstepError(f"The plan is not valid TOML: {error}.") from None
    return Plan(
        execution=_read_execution(_read_part(table, "execution")),
        reduction=read_reduction(_read_part(table, "reduction"), layout, num_ranks),
        input=_read_input(_read_part(table, "input")),
    )


def _read_part(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = table.get(name)
    if not isinstance(part, dict):
        raise LockstepError(f"The plan has no table [{name}]; delete the file to have it measured anew.")
    return part


def _read_execution(table: Mapping[str, Any]) -> Execution:
    kernels, recorded, compiled = (table.get(field.name) for field in fields(Execution))
    if kernels not in get_args(Kernels) or compiled not in get_args(Compile) or not isinstance(recorded, bool):
        raise LockstepError(f"The plan's [execution] is {show(dict(table))}, which is no way to execute a step.")
    return Execution(cast(Kernels, kernels), recorded, cast(Compile, compiled))


def _read_input(table: Mapping[str, Any]) -> InputPlan:
    decoder = table.get("decoder")
    counts = [table.get(field.name) for field in fields(InputPlan)[1:]]
    are_counts = all(type(count) is int and 0 <= count <= MOST for count in counts)
    if decoder not in get_args(DecoderKind) or not are_counts or not table["threads"]:
        raise LockstepError(f"The plan's [input] is {show(dict(table))}, which is no way to make batches.")
    return InputPlan(decoder, *counts)  # type: ignore[arg-type]


def read_reduction(table: Mapping[str, Any], layout: Layout, num_ranks: int) -> ReductionPlan:
    """How gradients travel, from a file or from another rank; what does not fit this layout is a sentence."""
    rows = table.get("buffer")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise LockstepError("The plan's [reduction] has no list of buffers.")
    lasts = [row.get("last") for row in rows]
    firsts = [row.get("first") for row in rows]
    num_slots = len(layout.slots)
    edges = [*firsts, num_slots]
    # Where no gradient is FP32, the last buffer holds the side numbers alone and is empty.
    filled = edges[:-1] if layout.split == layout.numel else edges
    if (
        not rows
        or not all(type(edge) is int for edge in (*firsts, *lasts))
        or edges[0] != 0
        or lasts != edges[1:]
        or any(early >= late for early, late in pairwise(filled))
        or not isinstance(table.get("overlap"), bool)
    ):
        raise LockstepError(f"The plan's buffers do not hold each of the {num_slots} gradients once, in order.")
    choices = tuple(_read_choice(row.get("all_reduce"), num_ranks) for row in rows)
    return ReductionPlan(place_buffers(layout, firsts), choices, table["overlap"])


def _read_choice(text: object, num_ranks: int) -> Choice:
    choice = Choice.parse(text) if isinstance(text, str) and len(text) < 64 else None
    if choice is None or choice.group_size > num_ranks:
        raise LockstepError(f"The plan sums a buffer by {show(text)}, which {num_ranks} ranks cannot do.")
    assert choice.group_size == 1 or choice.algorithm in GROUPED
    return choice


def place_buffers(layout: Layout, firsts: Sequence[int]) -> tuple[Buffer, ...]:
    """The buffers that begin at these slots, each where it lies in the flat arrays; none holds two formats."""
    num_half = sum(slot.half for slot in layout.slots)
    if layout.split and num_half not in firsts:
        raise LockstepError(f"The plan's buffers mix the {num_half} half gradients with FP32 ones.")

    def offset(slot: int) -> int:
        return layout.slots[slot].offset if slot < len(layout.slots) else layout.numel

    edges = [*firsts, len(layout.slots)]
    return tuple(
        # Where all is half, the tail is empty and lies behind them, FP32 as the side numbers are.
        Buffer(offset(first), offset(last), first, last, 2 if first < num_half else 4)
        for first, last in pairwise(edges)
    )
