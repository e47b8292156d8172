"""Weights that a run starts from, other than drawn ones: `model.weights` (before step 0 on the walk).

Rank 0 reads and the others receive. A run that goes on never asks for them again: its checkpoints hold the whole
network.
"""

from pathlib import Path

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.engine.build import Parts, share_array
from lockstep.engine.checkpoint import MANIFEST, DamagedCheckpoint, load_checkpoint, read_checkpoint
from lockstep.engine.state import list_changing, refresh
from lockstep.engine.state_files import AVERAGE, MODEL
from lockstep.errors import LockstepError, SharedError
from lockstep.models.outside import LIBRARIES
from lockstep.models.weights import Fit, fetch_weights, fit_weights, read_weights
from lockstep.optim.storage import views

NETWORKS = (AVERAGE, MODEL)  # files of a checkpoint to start from, the first preferred


def load_start(asked: str, parts: Parts, world: World, num_classes: int) -> list[str]:
    """Fill the parts with the weights asked for, on every rank; returns what there is to say about them."""
    if not asked:
        return []
    failure, notes = "", []
    if world.is_first:
        try:
            fit = fit_weights(f"model.weights = {asked}", read_source(asked), parts.model, num_classes)
            _fill(parts, fit)
            notes = fit.notes
        except LockstepError as error:
            failure = str(error)
    failure = str(world.broadcast_value(failure))
    if failure:
        raise SharedError(failure)
    for values in (parts.weights, *parts.constants.values(), *list_changing(parts).statistics.values()):
        share_array(world, values)
    refresh(parts)
    if parts.average:
        parts.average.begin()
    return [f"Starting from {asked}.", *notes] if world.is_first else []


def read_source(asked: str) -> dict[str, Tensor]:
    """The arrays of a file, a run's or a checkpoint's folder, or a library, by name."""
    if asked.partition(":")[0] in LIBRARIES and ":" in asked:
        return fetch_weights(asked)
    path = Path(asked).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise LockstepError(
            f"model.weights = {asked} is no file and no folder; give a .safetensors or .pth file, a run's folder, "
            "torchvision:NAME or timm:NAME."
        )
    return read_weights(path)


def _read_folder(path: Path) -> dict[str, Tensor]:
    """The network of a checkpoint, or of a run's newest good one; the averaged one where there is one."""
    if (path / MANIFEST).is_file():
        try:
            files = read_checkpoint(path, NETWORKS).files
        except DamagedCheckpoint as damage:
            raise LockstepError(
                f"The checkpoint {path} is damaged ({damage}); give another (model.weights)."
            ) from damage
    elif (path / "checkpoints").is_dir():
        files = load_checkpoint(path / "checkpoints", warn=lambda text: None, only=NETWORKS).files
    else:
        raise LockstepError(f"The folder {path} holds neither a run nor a checkpoint; check model.weights.")
    if not files:
        raise LockstepError(f"The checkpoint in {path} holds no network; check model.weights.")
    (network,) = files.values()
    return network


@torch.no_grad()
def _fill(parts: Parts, fit: Fit) -> None:
    slots = {slot.name: view for slot, view in zip(parts.layout.slots, views(parts.weights, parts.layout), strict=True)}
    places = slots | parts.constants | list_changing(parts).statistics
    for name, values in fit.arrays.items():
        places[name].copy_(values)
