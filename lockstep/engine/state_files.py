"""Between the arrays of a run and the files of a checkpoint (step 10 on the walk; `state.py` comes before it).

`model` is the network under its usual names, `average` the same with averaged weights and statistics, `optimizer` what
the update rule keeps. Each holds the average of the ranks' running statistics; `statistics` holds every rank's own, so
that as many ranks go on to the last bit.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lockstep.comm.world import World
from lockstep.engine.build import Parts
from lockstep.engine.statistics import (
    average_over,
    fill_statistics,
    flatten_statistics,
    gather_rows,
    split_statistics,
)
from lockstep.errors import LockstepError
from lockstep.optim.storage import load_named, named_arrays

if TYPE_CHECKING:
    from lockstep.engine.state import Changing

WEIGHTS, AVERAGE = "weights", "average"  # arrays over the layout; the second is also a file, and rows of statistics
MODEL, OPTIMIZER, STATISTICS = "model", "optimizer", "statistics"  # files
RANKS = "ranks"  # in a checkpoint's statistics: the rows of all ranks

Arrays = dict[str, Tensor]


def gather_ranks(parts: Parts, world: World) -> Arrays:
    """Every rank's own statistics and those of its average, one row each; every rank must call it."""
    own = _list_own(parts) if world.size > 1 else {}
    return {kind: gather_rows(flat, world) for kind, flat in own.items() if flat.numel()}


def average_ranks(parts: Parts, world: World) -> Arrays:
    """The average's statistics by name, averaged over ranks; every rank must call it."""
    if parts.average is None:
        return {}
    return split_statistics(parts.model, average_over(parts.average.statistics, world))


def collect_files(
    parts: Parts, changing: "Changing", averaged: Mapping[str, Tensor], rows: Arrays
) -> dict[str, Arrays]:
    """What a checkpoint holds, as copies; the model's statistics are the average over ranks just now.

    `averaged` are the average's statistics, `rows` those of every rank.
    """
    # What is not trained belongs to the network all the same.
    beside = parts.constants | {name: buffer.detach().clone() for name, buffer in changing.statistics.items()}
    named = {kind: named_arrays(flat, parts.layout) for kind, flat in changing.over_layout.items()}
    files = {
        MODEL: named.pop(WEIGHTS) | beside,
        AVERAGE: named.pop(AVERAGE, {}) | beside | {name: array.clone() for name, array in averaged.items()},
        OPTIMIZER: {f"{kind}/{name}": array for kind, arrays in named.items() for name, array in arrays.items()},
        STATISTICS: rows,
    }
    lacking = {name for name, is_there in ((AVERAGE, parts.average is not None), (STATISTICS, rows)) if not is_there}
    return {name: arrays for name, arrays in files.items() if name not in lacking}


def fill_arrays(parts: Parts, changing: "Changing", files: Mapping[str, Arrays]) -> None:
    """The way back; a checkpoint of another model is a sentence. An average that it lacks is left alone."""
    kept = changing.statistics.keys() | parts.constants.keys()
    for kind, flat in changing.over_layout.items():
        if kind == AVERAGE and AVERAGE not in files:
            continue
        if kind in (WEIGHTS, AVERAGE):
            network = files[MODEL if kind == WEIGHTS else AVERAGE]
            own = {name: array for name, array in network.items() if name not in kept}
        else:
            prefix = f"{kind}/"
            own = {n.removeprefix(prefix): array for n, array in files[OPTIMIZER].items() if n.startswith(prefix)}
            _check_format(kind, flat, own)
        load_named(flat, parts.layout, own)
    _fill_named(changing.statistics | parts.constants, files[MODEL])
    if parts.average and AVERAGE in files:
        _fill_named(split_statistics(parts.model, parts.average.statistics), files[AVERAGE])


def _check_format(kind: str, flat: Tensor, own: Mapping[str, Tensor]) -> None:
    """Refuse whole numbers of other bits: each counts in a unit of its own."""
    wanted = flat.dtype
    if other := next((array.dtype for array in own.values() if array.dtype != wanted), None):
        saved, now = (str(dtype).removeprefix("torch.") for dtype in (other, wanted))
        raise LockstepError(
            f"The checkpoint holds the {kind.replace('_', ' ')} as {saved} and this run as {now}; resume with the "
            "optim.bits that the run was started with."
        )


def _fill_named(places: Mapping[str, Tensor], network: Mapping[str, Tensor]) -> None:
    for name, values in places.items():
        if name not in network or network[name].shape != values.shape:
            raise LockstepError(f"The checkpoint does not fit this model: {name} is missing or of another shape.")
        values.copy_(network[name])


def find_rows(parts: Parts, world: World, files: Mapping[str, Arrays]) -> Arrays:
    """Each rank's own statistics, if as many ranks wrote the checkpoint; others start from the average."""
    rows = files.get(STATISTICS, {})
    return {kind: rows[kind] for kind, own in _list_own(parts).items() if _fits(rows.get(kind), own, world)}


def share_rows(parts: Parts, world: World, kinds: list[str], rows: Arrays, source: int) -> None:
    """Give every rank its row of what rank `source` has read."""
    for kind, own in _list_own(parts).items():
        if kind not in kinds:
            continue
        shared = rows[kind].to(own) if kind in rows else own.new_zeros(world.size, own.numel())
        world.broadcast(shared, source)
        if kind == RANKS:
            fill_statistics(parts.model, shared[world.rank])
        else:
            own.copy_(shared[world.rank])


def _list_own(parts: Parts) -> Arrays:
    """This rank's statistics in one array, a copy, and the average's own array, where there is one."""
    return {RANKS: flatten_statistics(parts.model)} | ({AVERAGE: parts.average.statistics} if parts.average else {})


def _fits(rows: Tensor | None, own: Tensor, world: World) -> bool:
    return rows is not None and tuple(rows.shape) == (world.size, own.numel())
