"""torch's compiler, before it compiles: what it keeps lies where nobody else can put any (step 0 on the walk)."""

import os
from pathlib import Path

from lockstep.errors import SharedError
from lockstep.private import COMPILED, WRITING, find_compiled, make_private


def guard_compiled() -> None:
    """Before anything is compiled: torch unpickles and runs what it finds in that folder, whoever has put it there.

    By itself it takes one in /tmp, with a name that anybody can guess. Whoever names a folder is believed. Headers it
    keeps in /tmp even then, and compiles whatever it finds there into code for the CPU: so none are kept.
    """
    folder = find_compiled()
    if os.environ.setdefault(COMPILED, str(folder)) == str(folder):
        _make_private(folder)
    from torch._inductor import config  # which reads that variable

    config.cpp_cache_precompile_headers = False


def _make_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private(folder, WRITING)  # torch itself lets others read what it makes
    except OSError as error:
        raise SharedError(
            f"torch's compiler cannot keep its code in {folder} ({error.strerror or error}); set {COMPILED} to a "
            "folder that only you can write to."
        ) from error
