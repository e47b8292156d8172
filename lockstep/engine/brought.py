"""What a program brings to a run: its own network, data and loss, as objects or by name (step 0 on the walk).

Recipes hold names, `package.module:name`, which every rank looks up. What has no name, such as a module that is built
already, is `given` in the recipe, and the program has to give it again when the run goes on.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.data.own_data import open_own
from lockstep.data.sources import DataSet
from lockstep.errors import LockstepError
from lockstep.models.initialize import seeded
from lockstep.models.vetting import vet_network
from lockstep.named import GIVEN, describe, find_named, is_name, phrase_error
from lockstep.optim.loss import OwnLoss


@dataclass(frozen=True)
class Brought:
    """Objects, where a recipe says `given`; None elsewhere."""

    model: nn.Module | Callable[[int], nn.Module] | None = None
    data: Any = None  # (train, val), or a function that returns them
    loss: Any = None


NOTHING = Brought()


def has_own_data(source: str) -> bool:
    """Whether `data.source` names something of the user's."""
    return source == GIVEN or is_name(source)


def open_own_data(source: str, brought: Brought, limit_s: float) -> tuple[DataSet, DataSet]:
    """The user's training and validation data."""
    found = _find(source, "data.source", brought.data)
    setting = "data" if source == GIVEN else f'data.source = "{source}"'
    if callable(found):
        try:
            found = found()
        except LockstepError:
            raise
        except Exception as error:
            raise LockstepError(f"{setting} failed: {phrase_error(error)}.") from error
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise LockstepError(f"{setting} is a {type(found).__name__}, and must be two data sets: (train, val).")
    train, val = found
    return open_own(train, val, limit_s)


def build_own_loss(loss: str, brought: Brought, device: torch.device) -> OwnLoss:
    """The user's loss."""
    return OwnLoss(_find(loss, "optim.loss", brought.loss), device)


def build_given(
    brought: Brought, num_classes: int, seed: int, image_sizes: tuple[int, ...], settings: Mapping[str, Any]
) -> nn.Module:
    """The network that the program gave: a copy of a module with its weights, or what a function builds for a seed."""
    given = _find(GIVEN, "model.name", brought.model)
    name = f"The network {describe(given)}"
    try:
        with seeded(seed):
            model = copy.deepcopy(given) if isinstance(given, nn.Module) else given(num_classes=num_classes, **settings)
    except LockstepError:
        raise
    except Exception as error:
        raise LockstepError(f"{name} cannot be built: {phrase_error(error)}.") from error
    if not isinstance(model, nn.Module):
        raise LockstepError(f"{name} is a {type(model).__name__}; give an nn.Module or what builds one.")
    vet_network(name, model.cpu(), num_classes, image_sizes)
    return model


def _find(name: str, setting: str, given: Any) -> Any:
    if name != GIVEN:
        return find_named(name, setting)
    if given is None:
        argument = {"model.name": "model", "data.source": "data", "optim.loss": "loss"}[setting]
        others = {"model": ", lockstep.load, lockstep.evaluate or lockstep.export", "data": " or lockstep.evaluate"}
        raise LockstepError(
            f'{setting} = "{GIVEN}" stands for an object that a program gave to this run; give it again in a program, '
            f"as {argument}=… of lockstep.train(…, resume=True){others.get(argument, '')}."
        )
    return given
