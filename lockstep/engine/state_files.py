"""Between the arrays of a run and the files of a checkpoint (step 10 on the walk; `state.py` comes before it).

`model` is the network under its usual names, `average` the same with averaged weights and statistics, `optimizer` what
the update rule keeps. Each holds the average of the ranks' running statistics; `statistics` holds every rank's own, so
that as many ranks go on to the last bit.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.engine.build import Parts
from lockstep.engine.statistics import average_over, gather_rows, split_statistics
from lockstep.errors import LockstepError
from lockstep.optim.storage import copy_to_host, load_named, named_views

if TYPE_CHECKING:
    from lockstep.engine.state import Changing

WEIGHTS, AVERAGE = "weights", "average"  # arrays over the layout; the second is also a file, and rows of statistics
MODEL, OPTIMIZER, STATISTICS = "model", "optimizer", "statistics"  # files
RANKS = "ranks"  # in a checkpoint's statistics: the rows of all ranks
NETWORKS = {WEIGHTS: MODEL, AVERAGE: AVERAGE}  # arrays over the layout that are a network, by its file

Arrays = dict[str, Tensor]


def gather_ranks(changing: "Changing", world: World) -> Arrays:
    """Every rank's own statistics and those of its average, one row each; every rank must call it."""
    own = _list_own(changing) if world.size > 1 else {}
    return {kind: gather_rows(_flatten(arrays), world) for kind, arrays in own.items()}


def average_ranks(parts: Parts, world: World) -> Arrays:
    """The average's statistics by name, averaged over ranks; every rank must call it."""
    if parts.average is None:
        return {}
    return split_statistics(parts.model, average_over(parts.average.statistics, world))


def collect_files(parts: Parts, changing: "Changing", averaged: Arrays, rows: Arrays) -> dict[str, Arrays]:
    """What a checkpoint holds, as copies on the host; the model's statistics are the average over ranks just now.

    `averaged` are the average's statistics, `rows` those of every rank. A device full of steps has no room for copies.
    """
    files: dict[str, Arrays] = {OPTIMIZER: {}}
    for kind, flat in changing.over_layout.items():
        named = copy_to_host(named_views(flat, parts.layout))
        if kind in NETWORKS:
            statistics = changing.statistics | (averaged if kind == AVERAGE else {})  # which has no counts of its own
            # What is not trained belongs to the network all the same.
            files[NETWORKS[kind]] = named | copy_to_host(parts.constants | statistics)
        else:
            files[OPTIMIZER] |= {f"{kind}/{name}": array for name, array in named.items()}
    return files | ({STATISTICS: copy_to_host(rows)} if rows else {})


def fill_arrays(parts: Parts, changing: "Changing", files: Mapping[str, Arrays]) -> None:
    """The way back; a checkpoint of another model is a sentence. An average that it lacks is left alone."""
    kept = changing.statistics.keys() | parts.constants.keys()
    for kind, flat in changing.over_layout.items():
        if kind in NETWORKS:
            if NETWORKS[kind] not in files:
                continue
            own = {name: array for name, array in files[NETWORKS[kind]].items() if name not in kept}
        else:
            prefix = f"{kind}/"
            own = {n.removeprefix(prefix): array for n, array in files[OPTIMIZER].items() if n.startswith(prefix)}
            _check_format(kind, flat, own)
        load_named(flat, parts.layout, own)
    _fill_named(changing.statistics | parts.constants, files[MODEL])
    if AVERAGE in files:
        _fill_named(changing.averaged, files[AVERAGE])


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


def find_rows(changing: "Changing", world: World, files: Mapping[str, Arrays]) -> Arrays:
    """Each rank's own statistics, if as many ranks wrote the checkpoint; others start from the average."""
    rows = files.get(STATISTICS, {})
    sizes = {kind: (world.size, _flatten(arrays).numel()) for kind, arrays in _list_own(changing).items()}
    return {kind: rows[kind] for kind, size in sizes.items() if kind in rows and tuple(rows[kind].shape) == size}


@torch.no_grad()
def share_rows(changing: "Changing", world: World, kinds: list[str], rows: Arrays, source: int) -> None:
    """Give every rank its row of what rank `source` has read."""
    for kind, arrays in _list_own(changing).items():
        if kind not in kinds:
            continue
        own = _flatten(arrays)
        shared = rows[kind].to(own) if kind in rows else own.new_zeros(world.size, own.numel())
        world.broadcast(shared, source)
        parts = shared[world.rank].split([array.numel() for array in arrays])
        for array, part in zip(arrays, parts, strict=True):
            array.copy_(part.view_as(array))


def _list_own(changing: "Changing") -> dict[str, list[Tensor]]:
    """What each rank has of its own: its statistics, those that are numbers and no counts, and its average's."""
    groups = {RANKS: changing.statistics, AVERAGE: changing.averaged}
    own = {kind: [array for array in arrays.values() if array.is_floating_point()] for kind, arrays in groups.items()}
    return {kind: arrays for kind, arrays in own.items() if any(array.numel() for array in arrays)}


def _flatten(arrays: list[Tensor]) -> Tensor:
    """A copy of them in one array."""
    return torch.cat([array.detach().flatten() for array in arrays])
