"""Files opened for reading (step 2 on the walk): plain ones only, and none larger than an image can be. Torch-free.

Whatever else may have a name, such as a pipe or a device, can keep its reader waiting for ever.
"""

import errno
import os
import stat
from pathlib import Path

# A file that takes longer does not come, as far as anybody can tell; a disk that spins up takes ten.
READ_TIMEOUT_S = 60.0
# Far beyond any photograph; without a limit one sparse file would ask for all the memory there is.
MAX_SAMPLE_BYTES = 1 << 28

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_plain(path: str | bytes | Path) -> tuple[int, int]:
    """A plain file, open for reading, and its bytes; OSError for whatever else has that name."""
    try:
        # Not blocking: a pipe would hold up the very call that opens it. Plain files do not mind.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # what the system says of sockets
            raise OSError(errno.EINVAL, "it is a socket or a device and not a file", path) from error
        raise
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode):
        return file, status.st_size
    os.close(file)
    raise not_plain(path, status)


def not_plain(path: str | bytes | Path, status: os.stat_result) -> OSError:
    """The error for what is no plain file."""
    kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    return OSError(errno.EINVAL, f"it is {kind} and not a file", path)


def measure_plain(path: str | bytes | Path) -> int:
    """Bytes of a plain file, which is not opened."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise not_plain(path, status)
    return status.st_size


def read_plain(path: str | bytes | Path, max_bytes: int = MAX_SAMPLE_BYTES) -> bytes:
    """All of a plain file; OSError when it cannot be read or is too large."""
    file, num_bytes = open_plain(path)  # a file object would cost Python more
    try:
        check_length(num_bytes, max_bytes)
        data = os.read(file, num_bytes)
        while len(data) < num_bytes and (more := os.read(file, num_bytes - len(data))):
            data += more
        return data
    finally:
        os.close(file)


def check_length(num_bytes: int, max_bytes: int = MAX_SAMPLE_BYTES) -> None:
    """OSError when that is more than anybody should read at once."""
    if num_bytes > max_bytes:
        raise OSError(errno.EFBIG, f"its {num_bytes:,} bytes are more than the {max_bytes:,} allowed")
