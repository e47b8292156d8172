"""A run's folder has one owner: a lock on a file in it, held by rank 0 from before the first file to after the last.

The kernel lets go of the lock when the process ends, however it ends: nothing is left to clean up by hand.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.comm.world import World
from lockstep.errors import LockstepError, SharedError
from lockstep.files import clear_leftovers

LOCK_FILE = ".lock"


@contextmanager
def own_folder(folder: Path, world: World) -> Iterator[None]:
    """While inside, the folder is this run's alone; every rank hears when it is another's."""
    file, failure = -1, ""
    if world.is_first:
        try:
            file = lock_folder(folder)
            clear_leftovers(folder)
            clear_leftovers(folder / "checkpoints")
        except LockstepError as error:
            failure = str(error)
    try:
        failure = world.broadcast_value(failure)
        if failure:
            raise SharedError(failure)
        yield
    finally:
        if file >= 0:
            os.close(file)


def check_unowned(folder: Path) -> None:
    """Refuse a folder that another run holds, before any rank starts."""
    if (folder / LOCK_FILE).exists():
        os.close(lock_folder(folder))


def lock_folder(folder: Path) -> int:
    """Take the lock and return the open file that holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LockstepError(
            f"The run's folder {folder} cannot be written ({error.strerror}); choose another --out."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise LockstepError(
                f"{folder} is in use by a run that has not ended ({owner}); stop that one first, or choose another "
                "--out."
            ) from None
        return file  # a file system without locks: better a run without one than no run
    os.truncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file
