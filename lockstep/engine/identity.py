"""Which run a folder holds: a number drawn when the run begins, told to all ranks by rank 0 (step 0 on the walk).

A path does not tell: folders are deleted, moved and copied, and containers that share a machine's memory have equal
paths. What lies outside the folder, which is snapshots, goes by the path and this number.
"""

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.comm.world import World
from lockstep.files import read_small, write_whole

IDENTITY_FILE = ".identity"
NUM_BYTES = 16
WRITTEN = re.compile(r"[0-9a-f]{32}")


def share_identity(folder: Path, world: World, warn: Callable[[str], None]) -> str:
    """The run's identity on every rank, which must all call it; empty, with a sentence, where none can be kept."""
    run, failure = "", ""
    if world.is_first:
        try:
            run = read_identity(folder) or write_identity(folder)
        except OSError as error:
            failure = f"{folder / IDENTITY_FILE} could not be written ({error.strerror or error})"
    if failure:
        warn(failure)
    return str(world.broadcast_value(run))


def read_identity(folder: Path) -> str:
    """The identity of the run in a folder; empty where it has none, as before it began."""
    try:
        written = read_small(folder / IDENTITY_FILE, 2 * NUM_BYTES + 1).decode(errors="replace").strip()
    except OSError:
        return ""
    return written if WRITTEN.fullmatch(written) else ""


def write_identity(folder: Path) -> str:
    """Draw an identity for the run in a folder; OSError where it cannot be kept there."""
    run = secrets.token_hex(NUM_BYTES)
    write_whole(folder / IDENTITY_FILE, f"{run}\n")
    return run


def forget_identity(folder: Path) -> None:
    """What another run left in a folder is not of the run that begins there."""
    with suppress(OSError):
        (folder / IDENTITY_FILE).unlink()
