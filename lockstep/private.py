"""Folders that nobody else can have put something into, for what is believed as it is found there. Torch-free."""

import errno
import os
import stat
from pathlib import Path

WRITING = 0o022
COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # where torch's compiler keeps its code


def make_private(folder: Path, denied: int = 0o077) -> None:
    """Make a folder of ours alone, or see that it is one: others may write to the place where it lies."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder, denied):
        raise OSError(errno.EPERM, "others can write to it", str(folder))


def is_private(folder: Path, denied: int = 0o077) -> bool:
    """Whether it is ours and others have none of these rights: by default they cannot even read it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & denied


def find_compiled() -> Path:
    """Where torch's compiler keeps its code if nobody says otherwise: in the user's own cache."""
    place = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(place).absolute() / "lockstep-compiled"
