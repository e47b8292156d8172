"""What a run can leave on the machine, apart from its own processes and files; and a view of it that is ours alone.

In a mount namespace of its own this command sees no other program's shared memory, and whatever it mounts goes when it
ends, however it ends. Torch-free.
"""

import contextlib
import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.bench.chaos.disk import read_mounts

SHARED_MEMORY = Path("/dev/shm")
NAMESPACES = Path("/run/netns")
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


def seclude() -> bool:
    """Give this process and all it starts mounts and shared memory of their own, for good; False where it may not."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
            return False
        return bool(libc.mount(b"tmpfs", os.fsencode(SHARED_MEMORY), b"tmpfs", 0, None) == 0)
    return False


@dataclass(frozen=True)
class Surroundings:
    """What was there at one moment; where it is not `is_ours`, nobody can say whose new memory and mounts are."""

    is_ours: bool = False
    memory: frozenset[str] = field(default_factory=lambda: _list(SHARED_MEMORY))
    namespaces: frozenset[str] = field(default_factory=lambda: _list(NAMESPACES))
    mounts: frozenset[str] = field(default_factory=lambda: frozenset(read_mounts()))

    def list_new(self) -> list[str]:
        """What has come since and is still there, in words."""
        now = Surroundings()
        # Others have shared memory and mounts too; and clusters, whose names hold the process that owns them.
        mine = f"lockstep-{os.getpid()}-"
        new = [f"shared memory {name}" for name in now.memory - self.memory if self.is_ours]
        new += [f"namespace {name}" for name in now.namespaces - self.namespaces if name.startswith(mine)]
        new += [f"mount {line.split()[1]}" for line in now.mounts - self.mounts if self.is_ours]
        return sorted(new)


def _list(folder: Path) -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(os.listdir(folder))
    return frozenset()
