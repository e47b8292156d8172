"""What a network keeps besides its parameters: batch norm's running statistics above all (beside step 6 on the walk).

They are the one thing that differs between ranks: each has those of its own samples, and whoever looks from outside
sees their average.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.comm.world import World


@contextmanager
def averaged_statistics(model: nn.Module, world: World) -> Iterator[None]:
    """While inside, batch norm's running statistics are their average over ranks; then each rank has its own again.

    Training goes on from a rank's own: an average in between would round them, and what a run ends with would depend
    on when somebody looked.
    """
    own = flatten_statistics(model)
    if world.size == 1 or not own.numel():
        yield
        return
    fill_statistics(model, average_over(own, world))
    try:
        yield
    finally:
        fill_statistics(model, own)


def average_over(own: Tensor, world: World) -> Tensor:
    """The average of what every rank has; in a world of one, that itself."""
    return world.sum(own.clone()).div_(world.size) if world.size > 1 else own


def gather_rows(own: Tensor, world: World) -> Tensor:
    """What every rank has, one row each; a ResNet-50's statistics are 0.2 MB a rank."""
    rows = own.new_zeros(world.size, own.numel())
    rows[world.rank] = own
    return world.sum(rows)


def flatten_statistics(model: nn.Module) -> Tensor:
    """A copy of this rank's running statistics in one array."""
    statistics = list_averaged(model)
    return torch.cat([buffer.detach().flatten() for buffer in statistics]) if statistics else torch.zeros(0)


@torch.no_grad()
def fill_statistics(model: nn.Module, flat: Tensor) -> None:
    """The way back; in place, because a recorded step has their addresses."""
    for buffer, part in zip(list_averaged(model), split_statistics(model, flat).values(), strict=True):
        buffer.copy_(part)


def split_statistics(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Views of such an array by the names and in the shapes of the statistics."""
    named = {name: buffer for name, buffer in list_statistics(model).items() if buffer.is_floating_point()}
    parts: tuple[Tensor, ...] = flat.split([buffer.numel() for buffer in named.values()]) if named else ()
    return {name: part.view_as(buffer) for (name, buffer), part in zip(named.items(), parts, strict=True)}


def list_averaged(model: nn.Module) -> list[Tensor]:
    """Those of which there is an average: numbers, and no counts."""
    return [buffer for buffer in list_statistics(model).values() if buffer.is_floating_point()]


def list_statistics(model: nn.Module) -> dict[str, Tensor]:
    """What a network keeps besides its parameters, by name: batch norm's statistics, and whatever else it has."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def list_passing(model: nn.Module) -> list[Tensor]:
    """Buffers that a network does not keep: tables that it builds anew, scratch."""
    kept = model.state_dict(keep_vars=True)
    return [buffer for name, buffer in model.named_buffers() if name not in kept]
