"""Networks by name: each registers itself, with its settings, in its own file (step 0 on the walk).

A file of this folder that calls `register` is found by itself: a new network touches no other file. Its settings are
the keyword arguments of its builder; their names, types and defaults are what a recipe's `[model.settings]` may hold.
"""

import difflib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import nn

from lockstep.errors import LockstepError

Build = Callable[..., nn.Module]  # (num_classes, *, image_size, and its settings) -> the network
B = TypeVar("B", bound=Build)
LONGEST = 100  # characters of a name or value in a sentence


@dataclass(frozen=True)
class Network:
    """A network and the settings it takes."""

    name: str
    build: Build
    settings: Mapping[str, Any]  # name -> its type
    initialize: bool  # whether `initialize.py` sets its starting weights


_networks: dict[str, Network] = {}


def register(*names: str, initialize: bool = False, **fixed: Any) -> Callable[[B], B]:
    """Make a builder known under these names; `fixed` are arguments that the name decides.

    `initialize`: its starting weights are those of `initialize.py`; otherwise what its own modules drew.
    """

    def note(build: B) -> B:
        hints = get_type_hints(build)
        parameters = inspect.signature(build).parameters.values()
        known = {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed}
        settings = {name: kind for name, kind in known.items() if name != "image_size"}
        for name in names:
            if name in _networks:
                raise ValueError(f"two networks are called {name}")
            _networks[name] = Network(name, _fix(build, fixed), settings, initialize)
        return build

    return note


def _fix(build: Build, fixed: Mapping[str, Any]) -> Build:
    return lambda num_classes, **settings: build(num_classes, **fixed, **settings)


@cache
def list_networks() -> dict[str, Network]:
    """All networks by name; on first use every file of this folder is read."""
    package = import_module("lockstep.models")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"lockstep.models.{module.name}")
    return dict(sorted(_networks.items(), key=lambda item: (len(item[0]), item[0])))


def find_network(name: str) -> Network:
    """The network of that name."""
    networks = list_networks()
    if name not in networks:
        raise LockstepError(
            f"There is no model '{name[:LONGEST]}': choose {' or '.join(_split(list(networks)))}, or name one as "
            "package.module:name, torchvision:NAME or timm:NAME (model.name)."
        )
    return networks[name]


def _split(names: list[str]) -> tuple[str, str]:
    """Names in words: all but the last by commas, and the last."""
    return ", ".join(names[:-1]), names[-1]


def check_settings(network: Network, settings: Mapping[str, Any]) -> None:
    """Refuse a setting that the network does not take, or of another type."""
    for name, value in settings.items():
        if name not in network.settings:
            near = difflib.get_close_matches(name, network.settings, n=1)
            advice = f"did you mean {near[0]}?" if near else f"it takes {', '.join(network.settings) or 'none'}."
            raise LockstepError(f"{network.name} has no setting '{name[:LONGEST]}' (model.settings); {advice}")
        if not _is_of(value, network.settings[name]):
            raise LockstepError(
                f"model.settings has {name} = {repr(value)[:LONGEST]}, and {network.name} wants "
                f"{_describe(network.settings[name])}."
            )


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (int, str, bool):
        return type(value) is kind
    return True  # what the builder itself must judge


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
