"""What users bring, by name: `package.module:name` ↔ the function, class or object there (step 0 on the walk).

A name is what a recipe can hold and what every rank can look up for itself. Torch-free.
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
GIVEN = "given"  # in a recipe's place for a name: what the program gave has none
LONGEST = 200  # characters of an error in a sentence

_being_imported: list[str] = []


def is_name(text: str) -> bool:
    """Whether a text has the form `package.module:name`."""
    return len(text) <= LONGEST and NAME.fullmatch(text) is not None


def find_named(name: str, setting: str) -> Any:
    """The object of a name; `setting` says in a sentence who asks for it."""
    module_name, _, path = name.partition(":")
    _being_imported.append(module_name)
    try:
        found: Any = _import(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code that runs
        if isinstance(error, AttributeError) and module_name in sys.modules:
            raise LockstepError(
                f"{setting} = {name}: {module_name} has no {path}; check the name behind the colon."
            ) from error
        raise LockstepError(
            f"{setting} = {name} cannot be imported ({phrase_error(error)}); start from the folder that holds "
            f"{module_name.partition('.')[0]} (now {Path.cwd()}), or add that folder to PYTHONPATH."
        ) from error
    finally:
        _being_imported.pop()
    return found


def _import(module: str) -> Any:
    """A module, also one that lies in the current folder: a program that is installed does not look there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        here = str(Path.cwd())
        if error.name != module.partition(".")[0] or here in sys.path:
            raise
        sys.path.append(here)
        importlib.invalidate_caches()
        return importlib.import_module(module)


def find_name(value: Any) -> str:
    """The name by which another process finds the same thing; empty for a lambda, a part of a script, an object."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module == "__main__":
        return ""
    name = f"{module}:{path}"
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return name if found is value and is_name(name) else ""


def name_being_imported() -> str:
    """The module whose import has led here; empty usually."""
    return _being_imported[-1] if _being_imported else ""


def phrase_error(error: BaseException) -> str:
    """What somebody else's code raised, in one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return f"{type(error).__name__}: {text}".rstrip(".: ")


def describe(value: Callable[..., Any] | object) -> str:
    """What to call a user's thing in a sentence."""
    kind = value if hasattr(value, "__qualname__") else type(value)
    return str(getattr(kind, "__qualname__", kind)).rpartition("<locals>.")[2]
