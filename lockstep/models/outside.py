"""Networks from elsewhere: `package.module:name` in the user's code, `torchvision:NAME`, `timm:NAME` (step 0).

A recipe that names code runs it, as a program would be run. Whatever goes wrong in there is one sentence.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn

from lockstep.errors import LockstepError
from lockstep.models.initialize import seeded
from lockstep.named import find_named, phrase_error

LIBRARIES = ("torchvision", "timm")
LONGEST = 160  # characters of what others say, in a sentence


def is_outside(name: str) -> bool:
    """Whether a model's name means a network from elsewhere."""
    return ":" in name


def build_outside(name: str, num_classes: int, seed: int, settings: Mapping[str, Any]) -> nn.Module:
    """Call what the name means with `num_classes` and the settings, under the seed: the same weights on every rank."""
    library, _, own = name.partition(":")
    given: dict[str, Any] = {"num_classes": num_classes}
    place: tuple[str, ...] = (own,)
    with seeded(seed):  # what is imported for the first time may draw numbers itself, and then no longer
        if library == "timm":
            build, given = require("timm", f"model.name = {name}").create_model, {"pretrained": False, **given}
        elif library == "torchvision":
            build, given = require("torchvision", f"model.name = {name}").models.get_model, {"weights": None, **given}
        else:
            build, place = import_named(name), ()
    with seeded(seed):
        model = _call(name, build, given, settings, *place)
    if not isinstance(model, nn.Module):
        raise LockstepError(
            f"model.name = {name} gave {_kind(model)} and no torch.nn.Module; return the network itself."
        )
    return model.cpu()


def require(library: str, what: str) -> Any:
    """An optional library; a sentence with what to install where it is not there."""
    if find_spec(library) is None:
        raise LockstepError(f"{what} needs {library}, which is not installed; install it with `pip install {library}`.")
    try:
        if library == "torchvision":
            importlib.import_module("torchvision.models")
        return importlib.import_module(library)
    except Exception as error:  # built for another PyTorch, as it often is
        raise LockstepError(
            f"{what}: {library} cannot be imported ({phrase_error(error)}); install one that fits."
        ) from error


def import_named(name: str) -> Callable[..., Any]:
    """The function or class `package.module:name`, also from the current directory."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise LockstepError(f"model.name = {name[:LONGEST]} is no network; write package.module:name.")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise LockstepError(
            f"model.name = {name} is in Python's own library, which has no networks; name your own code."
        )
    found = find_named(name, "model.name")
    if not callable(found) or isinstance(found, nn.Module):
        raise LockstepError(
            f"model.name = {name} is {_kind(found)}, which cannot be called for a new network; name a class, or a "
            "function that builds it."
        )
    return found  # type: ignore[no-any-return]


def _call(
    name: str, build: Callable[..., Any], given: Mapping[str, Any], settings: Mapping[str, Any], *place: str
) -> Any:
    if taken := sorted(given.keys() & settings.keys()):
        raise LockstepError(f"model.settings must not hold {taken[0]}, which Lockstep itself gives; leave it out.")
    try:
        return build(*place, **given, **settings)
    except (Exception, SystemExit) as error:
        shown = ", ".join(f"{key} = {value!r}" for key, value in (*given.items(), *settings.items()))
        raise LockstepError(
            f"model.name = {name} failed when called with {shown[:LONGEST]} ({phrase_error(error)}); correct "
            f"model.name or model.settings.{_name_nearest(name)}"
        ) from error


def _name_nearest(name: str) -> str:
    """Which network of a library may have been meant; nothing where it has this very one, or none like it."""
    library, _, own = name.partition(":")
    source: Any = {"timm": sys.modules.get("timm"), "torchvision": sys.modules.get("torchvision.models")}.get(library)
    names = list(source.list_models()) if hasattr(source, "list_models") else []
    arch = own.partition(".")[0]  # timm's names of weights follow a dot
    near = [] if arch in names else difflib.get_close_matches(arch, names, 1)
    return f" The nearest is {library}:{near[0]}." if near else ""


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
