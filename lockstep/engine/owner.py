"""A run's folder has one owner: a lock on a file in it, held by rank 0 from before the first file to after the last.

The kernel lets go of the lock when the process ends, however it ends: nothing is left to clean up by hand. A start that
is refused before the run's configuration is there leaves nothing: neither the lock's file nor folders made for it.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.comm.world import World
from lockstep.engine.checkpoint import clear_aside
from lockstep.engine.starting import is_begun
from lockstep.errors import LockstepError, SharedError
from lockstep.files import clear_leftovers

LOCK_FILE = ".lock"


@dataclass(frozen=True)
class Owner:
    """Who holds a folder: rank 0 by an open file, the others by its word."""

    folder: Path
    file: int

    def is_in_place(self) -> bool:
        """Whether the folder of this name is still the one that is held; a file system that fails does not say no."""
        try:
            return self.file < 0 or _is_at(self.file, self.folder / LOCK_FILE)
        except OSError:
            return True


@contextmanager
def own_folder(folder: Path, world: World) -> Iterator[Owner]:
    """While inside, the folder is this run's alone; every rank hears when it is another's."""
    file, failure = -1, ""
    made: list[Path] = []
    if world.is_first:
        made = [path for path in (folder / LOCK_FILE, folder, *folder.parents) if not os.path.lexists(path)]
        try:
            file = lock_folder(folder)
            clear_leftovers(folder)
            clear_aside(folder / "checkpoints")
        except LockstepError as error:
            failure = str(error)
            _take_back([path for path in made if path.name != LOCK_FILE])  # the lock may be another's
    owner = Owner(folder, file)
    try:
        failure = world.broadcast_value(failure)
        if failure:
            raise SharedError(failure)
        yield owner
    finally:
        if file >= 0:
            # Where the folder was moved away, one of the same name may be another run's that has not begun yet.
            if owner.is_in_place() and not is_begun(folder):
                _take_back(made)
            os.close(file)


def _take_back(made: list[Path]) -> None:
    """Remove what was made for a run that did not begin, up to the first folder that somebody else uses too."""
    with suppress(OSError):
        for path in made:
            path.rmdir() if path.is_dir() else path.unlink()


def check_unowned(folder: Path) -> None:
    """Refuse a folder that another run holds, before any rank starts."""
    if os.path.lexists(folder / LOCK_FILE):
        os.close(lock_folder(folder))


def lock_folder(folder: Path) -> int:
    """Take the lock and return the open file that holds it."""
    while True:
        file = _lock_file(folder)
        if _is_at(file, folder / LOCK_FILE):
            break
        os.close(file)  # of a start that was refused, and took it back meanwhile
    with suppress(OSError):  # for whoever finds it locked; a full disk has its sentence where a run needs the room
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _lock_file(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not where a link leads: in a folder that others can write to, it may lead to any file of this user.
        file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP and (folder / LOCK_FILE).is_symlink():
            raise _refuse_lock(folder) from None
        raise LockstepError(
            f"The run's folder {folder} cannot be written ({error.strerror}); choose another --out."
        ) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _refuse_lock(folder)
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
        # Else a file system without locks: better a run without one than no run.
    return file


def _refuse_lock(folder: Path) -> LockstepError:
    return LockstepError(f"{folder / LOCK_FILE} is not a plain file, so no run can hold it; remove it.")
