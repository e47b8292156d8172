"""Files that are whole or not there, whenever a process is killed or the power fails. Torch-free.

Everything a run leaves behind is written by these: aside, flushed to the disk, renamed, and the folder flushed too.
What a killed write left aside is removed by the next run in that folder.
"""

import errno
import itertools
import os
import shutil
import stat
import time
from pathlib import Path

ASIDE = ".aside-"  # how the name of what is not finished begins
_count = itertools.count()


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace a file by this content, or leave it as it was; OSError says why."""
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f"{ASIDE}{path.name}-{os.getpid()}-{next(_count)}")
    try:
        write_flushed(aside, data)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file that is on the disk when this returns; its name is there after `flush_folder`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make the folder's entries survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # file systems that cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def clear_leftovers(folder: Path, older_than_s: float = 0.0) -> None:
    """Remove what a killed process left aside; in a folder that others write to, only what is old."""
    for leftover in folder.glob(f"{ASIDE}*"):
        try:
            if time.time() - leftover.lstat().st_mtime < older_than_s:
                continue
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        except OSError:  # somebody else's; it does no harm
            continue


def read_small(path: Path, max_bytes: int) -> bytes:
    """All of a plain file that is no larger than it can be; OSError for anything else that has its name."""
    # Not blocking: a pipe would hold up the very call that opens it. Plain files do not mind.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than the {max_bytes:,} bytes that make sense", str(path))
        return opened.read(status.st_size)
