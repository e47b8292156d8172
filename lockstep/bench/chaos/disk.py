"""A small disk for runs, which can be filled, break and be slow. Torch-free.

It is an ext4 file system on a file in memory, so that what happens to it is what happens to real ones: an error makes
the kernel turn it read-only under whoever writes (a plain remount is refused while the log is open), and a frozen one
keeps every write waiting. Where this user has no such device it is a tmpfs, which can only be full; where he may not
mount, a folder.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

DISK_MB = 32
FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h
FROZEN_S, THAWED_S = 0.15, 0.03  # in turn, on a slow disk
KINDS = ("full disk", "read-only disk", "slow disk")


class Disk:
    """A folder on a disk of its own."""

    def __init__(self, folder: Path, image: Path | None = None, *, is_limited: bool = False) -> None:
        self.folder = folder
        self._image = image  # None where there is no device
        self._is_limited = is_limited or image is not None

    @property
    def left_out(self) -> set[str]:
        """The faults that cannot be had here."""
        return set(KINDS[1:] if self._image is None else ()) | set(() if self._is_limited else KINDS)

    def fill(self) -> None:
        """Leave no byte free."""
        for size in (1 << 16, 1 << 10):
            with contextlib.suppress(OSError), (self.folder / "filler").open("ab", buffering=0) as file:
                while file.write(bytes(size)) == size:
                    pass

    def empty(self) -> None:
        """Give the space back."""
        (self.folder / "filler").unlink(missing_ok=True)

    def spoil(self) -> None:
        """Let the kernel find an error, at which it takes no more writes."""
        source = next(line.split()[0] for line in read_mounts() if line.split()[1] == str(self.folder))
        (Path("/sys/fs/ext4") / Path(source).name / "trigger_fs_error").write_text("1")

    def renew(self) -> None:
        """Take the spoilt disk out and put it in again; nobody may be using it."""
        end = time.monotonic() + 5
        while not _call("umount", str(self.folder)) and time.monotonic() < end:
            time.sleep(0.05)
        assert self._image is not None
        _mount(self._image, self.folder)

    def slow_down(self, seconds: float) -> None:
        """Let writes wait most of the time, for a while."""
        end = time.monotonic() + seconds
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            while time.monotonic() < end:
                fcntl.ioctl(handle, FREEZE, 0)
                time.sleep(FROZEN_S)
                fcntl.ioctl(handle, THAW, 0)
                time.sleep(THAWED_S)
        finally:
            with contextlib.suppress(OSError):  # it is thawed already
                fcntl.ioctl(handle, THAW, 0)
            os.close(handle)


@contextlib.contextmanager
def open_disk(parent: Path) -> Iterator[Disk]:
    """The best disk that this user can have, under `parent`, and its removal."""
    memory, folder = parent / "memory", parent / "disk"
    memory.mkdir()
    folder.mkdir()
    image = memory / "image"
    try:
        if _mount_memory(memory, 2 * DISK_MB) and _format(image) and _mount(image, folder):
            (folder / "lost+found").rmdir()
            yield Disk(folder, image)
        else:
            yield Disk(folder, is_limited=_mount_memory(folder, DISK_MB))
    finally:
        for mount in (folder, memory):
            _call("umount", "-l", str(mount))


def read_mounts() -> list[str]:
    """What is mounted, as this process sees it, a line each."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/mounts").read_text().splitlines()
    return []


def _mount_memory(folder: Path, size_mb: int) -> bool:
    return _call("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder))


def _format(image: Path) -> bool:
    if shutil.which("mkfs.ext4") is None:
        return False
    with image.open("wb") as file:
        file.truncate(DISK_MB << 20)
    return _call("mkfs.ext4", "-q", "-m", "0", str(image))


def _mount(image: Path, folder: Path) -> bool:
    return _call("mount", "-t", "ext4", "-o", "loop,errors=remount-ro", str(image), str(folder))


def _call(*argv: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(argv, check=False, capture_output=True).returncode == 0
    return False
