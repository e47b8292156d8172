"""A file whose reads come late or not at all, as from a hung server: a file system of one file, served by FUSE.

The kernel sends each call on the file down a descriptor, and whoever called waits for the answer. It is mounted over a
file of a run's data, and has its bytes. Only a hung mount's worst habit is left out: a process that is killed does not
wait for an answer. Torch-free.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
from pathlib import Path

# From linux/fuse.h.
FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, INTERRUPT, BATCH_FORGET = 2, 3, 14, 15, 18, 25, 26, 36, 42
REQUEST = struct.Struct("=IIQQIIII")  # length, opcode, unique, node, user, group, process, padding
ANSWER = struct.Struct("=IiQ")  # length, error, unique
INIT_OUT = struct.Struct("=IIIIHHIIHH32x")
ATTRIBUTES = struct.Struct("=QII QQQQQQ III IIIIIII")  # for how long, and then what stat says
OPEN_OUT = struct.Struct("=QII")
READ_IN = struct.Struct("=QQI")
DIRECT = 1  # no page of it is kept: every read comes here
DEVICE = "/dev/fuse"
MNT_DETACH = 2
REQUEST_BYTES = 1 << 17


class SlowFile:
    """A file that keeps its readers waiting, from when it is made to `close`."""

    def __init__(self, path: Path, delay_s: float | None) -> None:
        """The first read of each reader takes `delay_s`; None: it never comes. OSError where there is no FUSE."""
        self.path = path
        self.num_reads = 0
        self._content = path.read_bytes()
        self._delay_s = delay_s
        self._waiting: dict[int, bytes] = {}  # by the number of the request
        self._is_free = False
        self._lock = threading.Lock()
        self._device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode={stat.S_IFREG | 0o444:o},user_id={os.getuid()},group_id={os.getgid()}"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"lockstep", bytes(path), b"fuse", 0, options.encode()):
            os.close(self._device)
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        self._thread = threading.Thread(target=self._serve, name="lockstep-slow-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let everybody read on, and put the file itself back; readers keep what they have open."""
        with self._lock:
            self._is_free = True
            waiting = list(self._waiting)
        for unique in waiting:
            self._release(unique)
        ctypes.CDLL(None, use_errno=True).umount2(bytes(self.path), MNT_DETACH)

    def _serve(self) -> None:
        """Answer until nobody has the file any more."""
        while True:
            try:
                request = os.read(self._device, REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                os.close(self._device)  # ENODEV: the last one is gone
                return
            _, opcode, unique, *_ = REQUEST.unpack_from(request)
            self._answer(opcode, unique, request[REQUEST.size :])

    def _answer(self, opcode: int, unique: int, body: bytes) -> None:
        if opcode == INIT:
            major, minor = struct.unpack_from("=II", body)
            self._send(unique, INIT_OUT.pack(major, min(minor, 31), 0, 0, 0, 0, 4096, 1, 0, 0))
        elif opcode == GETATTR:
            size, now = len(self._content), 0
            mode, blocks = stat.S_IFREG | 0o444, -(-size // 512)
            times = (now, now, now, 0, 0, 0)
            self._send(unique, ATTRIBUTES.pack(1, 0, 0, 1, size, blocks, *times, mode, 1, 0, 0, 0, 4096, 0))
        elif opcode == OPEN:
            self._send(unique, OPEN_OUT.pack(0, DIRECT, 0))
        elif opcode == READ:
            _, offset, size = READ_IN.unpack_from(body)
            self._hold(unique, self._content[offset : offset + size], is_first=offset == 0)
        elif opcode == INTERRUPT:  # its reader was killed, or hears a signal
            self._release(struct.unpack_from("=Q", body)[0], errno.EINTR)
        elif opcode not in (FORGET, BATCH_FORGET):  # which want no answer
            self._send(unique, error=0 if opcode in (RELEASE, FLUSH) else errno.ENOSYS)

    def _hold(self, unique: int, data: bytes, *, is_first: bool) -> None:
        with self._lock:
            self.num_reads += 1
            self._waiting[unique] = data
            waits = is_first and not self._is_free
        if not waits:
            self._release(unique)
        elif self._delay_s is not None:
            threading.Timer(self._delay_s, self._release, [unique]).start()

    def _release(self, unique: int, error: int = 0) -> None:
        with self._lock:
            data = self._waiting.pop(unique, None)
        if data is not None:
            self._send(unique, b"" if error else data, error)

    def _send(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        with contextlib.suppress(OSError):  # the request is gone with its reader
            os.write(self._device, ANSWER.pack(ANSWER.size + len(data), -error, unique) + data)


def can_block(folder: Path) -> bool:
    """Whether such files can be had here."""
    probe = folder / "probe"
    probe.touch()
    try:
        SlowFile(probe, None).close()
    except OSError:
        return False
    finally:
        probe.unlink()
    return True
