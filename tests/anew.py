"""Libraries that a test makes up, where those of that name may be installed and imported already."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def imported_anew(*libraries: str) -> Iterator[None]:
    """While inside, what has these names is imported afresh; what was there before is back after it."""
    before = _forget(libraries)
    try:
        yield
    finally:
        _forget(libraries)
        sys.modules.update(before)


def _forget(libraries: tuple[str, ...]) -> dict[str, ModuleType]:
    found = [name for name in sys.modules if name.partition(".")[0] in libraries]
    return {name: sys.modules.pop(name) for name in found}
