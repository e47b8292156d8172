"""What a step changes, in one list: trials put it back, checkpoints hold it, on any rank count.

Nothing else is saved, because everything else is a function of it: the data order of the cursor, crops and dropout of
the seed, the learning rate of the step, the half weights of the master weights. Batch-norm statistics are the one thing
that differs between ranks: the network is saved with their average, and beside it every rank's own, so that as many
ranks go on to the last bit as if nobody had stopped them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.data.order import Cursor, Ledger, step_at
from lockstep.data.sources import IMAGES, is_same
from lockstep.engine.build import Parts, share_array
from lockstep.engine.checkpoint import Files, Saved, list_checkpoints, load_checkpoint, save_checkpoint
from lockstep.engine.counters import CLASSES, check_counters, describe_counters, fill_counters, name_classes
from lockstep.engine.starting import phrase_last_good
from lockstep.engine.state_files import (
    AVERAGE,
    WEIGHTS,
    average_ranks,
    collect_files,
    fill_arrays,
    find_rows,
    gather_ranks,
    share_rows,
)
from lockstep.engine.statistics import averaged_statistics, list_passing, list_statistics, split_statistics
from lockstep.errors import Diverged, LockstepError, SharedError
from lockstep.optim.storage import fill_constants


@dataclass
class State:
    """Where a run stands."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    ledger: Ledger = field(default_factory=Ledger)  # this rank's part of the running epoch


@dataclass(frozen=True)
class Written:
    """Who wrote a checkpoint, and how it counted."""

    world_size: int
    step: int
    global_batch: int | None  # None: by a version that did not say


@dataclass(frozen=True)
class Changing:
    """Every array that a step changes. Whatever is added to a step that lasts beyond it is added here."""

    over_layout: dict[str, Tensor]  # flat, over the layout: master weights, what the update rule keeps, their average
    statistics: dict[str, Tensor]  # of batch norm, and the network's other buffers, by its names
    averaged: dict[str, Tensor]  # the average's statistics, by the same names; none where there is no average
    counters: dict[str, Tensor]  # a few numbers each, the same on every rank: a checkpoint's manifest has them by name

    def arrays(self) -> list[Tensor]:
        """All of them, always in the same order."""
        groups = (self.over_layout, self.statistics, self.averaged, self.counters)
        return [array for group in groups for array in group.values()]


def list_changing(parts: Parts) -> Changing:
    """What a step of these parts changes; the half weights follow by `refresh`."""
    average = parts.average
    return Changing(
        over_layout={WEIGHTS: parts.weights, **parts.rule.state(), **({AVERAGE: average.weights} if average else {})},
        statistics=list_statistics(parts.model),
        averaged=split_statistics(parts.model, average.statistics) if average else {},
        counters={"rule_steps": parts.rule.count, **(parts.loss_scale.arrays() if parts.loss_scale else {})},
    )


def refresh(parts: Parts) -> None:
    """Bring what is derived up to date after the arrays were changed from outside a step."""
    parts.half_weights.copy_(parts.weights[: parts.layout.split])
    fill_constants(parts.model, parts.constants)
    parts.rule.refresh()


@contextmanager
def put_back(parts: Parts) -> Iterator[None]:
    """Whatever steps change within, changes back."""
    arrays = [*list_changing(parts).arrays(), *list_passing(parts.model)]
    # Kept on the host, so that trials need no more device memory than the run.
    before = [array.to("cpu", copy=True) for array in arrays]
    try:
        yield
    finally:
        for array, value in zip(arrays, before, strict=True):
            array.copy_(value)
        refresh(parts)


def sum_ledger(ledger: Ledger, world: World) -> Ledger:
    """The ranks' ledgers added up, on every rank."""
    words = np.array([ledger.value, ledger.count], dtype=np.uint64).view(np.int64)
    value, count = world.sum(torch.from_numpy(words)).numpy().view(np.uint64)
    return Ledger(int(value), int(count))


def find_infinite(parts: Parts) -> str:
    """Which arrays hold a number that is not finite; empty if none does. Asked once, by one look at the device."""
    changing = list_changing(parts)
    arrays = changing.over_layout | changing.counters
    groups = {"batch-norm statistics": changing.statistics, "average's statistics": changing.averaged}
    for name, group in groups.items():
        statistics = [array.flatten() for array in group.values() if array.is_floating_point()]
        arrays |= {name: torch.cat(statistics)} if statistics else {}
    arrays = {name: array for name, array in arrays.items() if array.is_floating_point() and array.numel()}
    # The least and the greatest of an array are finite only if all of it is: a NaN is both.
    extremes = torch.stack([torch.stack(array.aminmax()) for array in arrays.values()])
    is_finite = extremes.isfinite().all(dim=1).tolist()
    return ", ".join(name for name, is_good in zip(arrays, is_finite, strict=True) if not is_good)


def refuse_infinite(folder: Path, step: int, parts: Parts, world: World) -> None:
    """End the run rather than write what nobody can go on from; all ranks decide alike, whoever found it."""
    found = find_infinite(parts)
    if not world.sum(torch.tensor([int(bool(found))])).item():
        return
    good = next(iter(list_checkpoints(folder)), None)
    raise Diverged(
        f"After step {step} the {found or 'arrays of another rank'} are no longer finite, so no checkpoint was "
        f"written; lower optim.lr or lengthen optim.warmup, and {phrase_last_good(good)}"
    )


def prepare_checkpoint(
    folder: Path,
    state: State,
    parts: Parts,
    world: World,
    order: Mapping[str, Any],
    *,
    keep: int,
    drop_later: bool = False,
    classes: Sequence[str] = (),
) -> Callable[[], Saved] | None:
    """What writes a checkpoint of this moment, whenever it is called, on rank 0 (None elsewhere); all must call this.

    `classes` are the names of what the network tells apart, for those who use it later.
    """
    with gathered_state(folder, state, parts, world, order) as (collect, counters):
        if not world.is_first:
            return None
        counters |= name_classes(classes)
        files = collect()
    return partial(save_checkpoint, folder, state.step, files, counters, keep=keep, drop_later=drop_later)


@contextmanager
def gathered_state(
    disk: Path, state: State, parts: Parts, world: World, order: Mapping[str, Any]
) -> Iterator[tuple[Callable[[], Files], dict[str, Any]]]:
    """What collects a checkpoint's files while inside, for those that write one, and its counters; all must call this.

    `order` is what the data order depends on: seed, number of samples, global batch and the data's fingerprint. Arrays
    that are not finite are a SharedError, which names the last good checkpoint on `disk`.
    """
    ledger = sum_ledger(state.ledger, world)
    changing = list_changing(parts)
    rows, averaged = gather_ranks(changing, world), average_ranks(parts, world)
    with averaged_statistics(parts.model, world):
        refuse_infinite(disk, state.step, parts, world)
        place = {
            "step": state.step,
            "cursor": {"epoch": state.cursor.epoch, "position": state.cursor.position},
            "ledger": {"value": f"{ledger.value:016x}", "count": ledger.count},
            "rule": _name_rule(parts),
            "world_size": world.size,
            "order": dict(order),
        }
        # Not by `|`: a counter by one of these names is an error, and neither is lost.
        counters = dict(**place, **describe_counters(changing.counters))
        yield partial(collect_files, parts, changing, averaged, rows), counters


def load_state(
    folder: Path,
    parts: Parts,
    world: World,
    order: Mapping[str, Any],
    warn: Callable[[str], None],
    source: int = 0,
) -> tuple[State, Written]:
    """Go on from the last good checkpoint; also returns who wrote it.

    With another global batch the run keeps its place in the data, and the step is the one that starts there in such
    batches (`step_at`). Rank `source` reads, the others receive, so that only one needs the folder and all agree on
    which checkpoint it is.
    """
    counters: dict[str, Any] = {}
    rows: dict[str, Tensor] = {}
    failure = ""
    if world.rank == source:
        try:
            counters, rows = _read_newest(folder, parts, world, order, warn)
        except LockstepError as error:
            failure = str(error)
    failure = world.broadcast_value(failure, source)
    if failure:
        raise SharedError(failure)
    counters = world.broadcast_value(counters, source)
    changing = list_changing(parts)
    for array in (*changing.arrays(), *parts.constants.values()):
        share_array(world, array, source)
    share_rows(changing, world, counters["rows"], rows, source)
    if parts.average and not counters["has_average"]:
        parts.average.begin()
    refresh(parts)
    ledger = Ledger(int(counters["ledger"]["value"], 16), counters["ledger"]["count"]) if world.is_first else Ledger()
    cursor, written = Cursor(**counters["cursor"]), _read_writer(counters)
    step = written.step
    if written.global_batch is not None and "global_batch" in order:
        step = step_at(cursor, order["num_samples"], order["global_batch"])
    return State(step, cursor, ledger), written


def _read_newest(
    folder: Path, parts: Parts, world: World, order: Mapping[str, Any], warn: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fill the arrays from the last good checkpoint; returns what it says and the ranks' statistics, if they fit."""
    changing = list_changing(parts)
    checkpoint = load_checkpoint(folder, warn, partial(check_counters, counters=changing.counters))
    _check_rule(parts, checkpoint.state["rule"])
    _check_order(order, checkpoint.state["order"])
    fill_arrays(parts, changing, checkpoint.files)
    fill_counters(changing.counters, checkpoint.state)
    rows = find_rows(changing, world, checkpoint.files)
    # Not the names: nobody goes on by them, and there may be many.
    counters = {name: value for name, value in checkpoint.state.items() if name != CLASSES}
    return counters | {"rows": list(rows), "has_average": AVERAGE in checkpoint.files}, rows


def _read_writer(counters: Mapping[str, Any]) -> Written:
    return Written(counters["world_size"], counters["step"], counters["order"].get("global_batch"))


def _name_rule(parts: Parts) -> str:
    return type(parts.rule).__name__.lower()


def _check_rule(parts: Parts, saved: str) -> None:
    """Refuse another rule's arrays: SGD's momentum and LARS's differ by the learning rate, though not in name."""
    if saved != _name_rule(parts):
        raise LockstepError(
            f"The checkpoint holds the optimiser state of {saved} but this run uses {_name_rule(parts)}; "
            f"resume with optim.name={saved}."
        )


def _check_order(order: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse another seed or other samples: the cursor would point into another order."""
    for name in ("seed", "num_samples"):
        if order[name] != saved[name]:
            raise LockstepError(
                f"The checkpoint was written with {name} = {saved[name]}, this run has {order[name]}; "
                "resume with the seed and the data the run was started with."
            )
    # A folder and its pack have labels and a few images in common; an older checkpoint knows less of the data.
    now, then = order.get("data", {}), saved.get("data", {})
    different = {kind for kind in now.keys() & then.keys() if not is_same(kind, now[kind], then[kind])}
    if different:
        if "bytes" in different:  # of all images: the few say nothing more
            different.discard(IMAGES)
        kinds = " and ".join(sorted(different))
        raise LockstepError(
            f"The training data has changed since the checkpoint was written (other {kinds}); "
            "resume with the data the run was started with, or start a new run."
        )
