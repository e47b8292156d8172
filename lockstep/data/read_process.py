"""Files read and parsed by processes of their own, into shared memory (steps 2 and 3 on the walk).

Python runs one thread at a time, and a thread that reads a file gives its turn away four times. Threads that feed
nvJPEG spent more time waiting for each other than nvJPEG took; here they ask for a whole block of samples and wait
once. Pillow decodes a small image almost wholly in its turn, so that many threads decode no more than one and hold up
the step as well; where there is no nvJPEG to read for, a process hands over such images' pixels instead of their bytes.

What a process cannot read or decode or has no room for, and everything before it is ready and after it has died or
hung, is left to the caller, who reads it himself and counts what is bad. Torch-free: this module is also what the
process runs.
"""

import mmap
import os
import queue
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from lockstep.data.decode import DecodeError, Header, count_bytes, decode, read_header
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.reader import Loaded
from lockstep.data.sources import Source

# Of one process: a block of photographs, encoded or decoded; pages never written to take no memory.
MEMORY_BYTES, DECODED_BYTES = 1 << 25, 1 << 27
END_S = 5.0  # for a process to end
LOOK_S = 0.1  # between two looks whether a process is worth waiting for
# Where half of the samples take longer than this, on storage across a network or a disk that turns, so many are read at
# once.
FAR_S, FAR_THREADS = 0.001, 16
READY = "ready"
DECODES = "decodes"  # what a process is told that shall
Found = tuple[int, int, Header] | None  # from where to where in the memory


class ReadProcess:
    """A process that reads samples; used by one thread at a time."""

    def __init__(
        self,
        source: Source,
        num_bytes: int = MEMORY_BYTES,
        read_timeout_s: float = READ_TIMEOUT_S,
        decodes: bool = False,
    ) -> None:
        self._read_timeout_s, self._decodes = read_timeout_s, decodes
        self.is_hung = False
        self.lent_at = 0.0  # by the monotonic clock
        file = os.memfd_create("lockstep-read")
        try:
            os.truncate(file, num_bytes)
            self._memory = memoryview(mmap.mmap(file, num_bytes))
            self._connection, theirs = Pipe()
            # In a session of its own, where no Ctrl-C reaches it: it ends when the other end of its pipe is closed.
            told = [str(theirs.fileno()), str(file), *([DECODES] if decodes else [])]
            self.process = subprocess.Popen(
                # It finds modules where this process does, and not in the current folder first. What Pillow warns of
                # every process would say again, and none knows the file's name.
                [sys.executable, "-P", "-W", "ignore", "-m", "lockstep.data.read_process", *told],
                # NumPy would start a thread a core in each, for sums that nobody asks for.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(), file),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
        finally:
            os.close(file)
        self.is_ready = False
        # A list of a million files takes a while to get across, and training need not wait for it.
        self._introduction = threading.Thread(
            target=self._introduce, args=(source,), name="lockstep-introduce", daemon=True
        )
        self._introduction.start()

    def _introduce(self, source: Source) -> None:
        try:
            self._connection.send(source)
            self.is_ready = self._connection.recv() == READY
        except Exception:  # it died, or this kind of source cannot be sent to anybody
            self.process.kill()

    def load(self, samples: Sequence[int]) -> list[Loaded | None]:
        """What it could read, until it is asked again; nothing before it is ready and after it has died.

        One that does not answer in time is ended: the caller finds out which sample it was that did not come.
        """
        found: list[Found] = [None] * len(samples)
        if self.is_ready and samples:
            try:
                self._connection.send(samples)
                self.is_hung = not self._connection.poll(self._read_timeout_s)
                if self.is_hung:
                    self.process.kill()
                    self.is_ready = False
                else:
                    found = self._connection.recv()
            except (EOFError, OSError):
                self.is_ready = False
        return [self._take(sample, item) if item else None for sample, item in zip(samples, found, strict=True)]

    def _take(self, sample: int, item: tuple[int, int, Header]) -> Loaded | None:
        """A sample where it lies in the memory; None for pixels that are not as many as their header says."""
        start, end, header = item
        data, is_decoded = self._memory[start:end], self._decodes and not header.colors
        if is_decoded and len(data) != count_bytes(header):
            return None
        return Loaded(sample, data, header, is_decoded)

    def close(self) -> None:
        """End the process, which has nothing to lose, and let go of its memory."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # a disk that does not answer may hold it
            self.process.wait(END_S)
        self._introduction.join(END_S)  # before its connection is closed, whose number may soon be another file's
        self.is_ready = False
        self._connection.close()
        self._memory = memoryview(b"")


class ReadPool:
    """A few such processes, lent one at a time; none where the system cannot share memory this way."""

    def __init__(
        self, source: Source, count: int, read_timeout_s: float = READ_TIMEOUT_S, decodes: bool = False
    ) -> None:
        self._source, self._read_timeout_s, self._decodes = source, read_timeout_s, decodes
        self._is_closed = False
        self._all: list[ReadProcess] = []
        with suppress(OSError):  # no more processes, files or memory to be had: fewer of them, or none
            for _ in range(count if hasattr(os, "memfd_create") else 0):
                self._all.append(self._start())
        self._free: queue.SimpleQueue[ReadProcess] = queue.SimpleQueue()
        for process in self._all:
            self._free.put(process)

    def _start(self) -> ReadProcess:
        num_bytes = DECODED_BYTES if self._decodes else MEMORY_BYTES
        return ReadProcess(self._source, num_bytes, self._read_timeout_s, self._decodes)

    def describe(self) -> str:
        """How many read, and whether some no longer do."""
        alive = sum(process.process.poll() is None for process in self._all)
        what = "reading and decoding" if self._decodes else "reading"
        text = f"{alive} process{'es' if alive != 1 else ''} {what}"
        return text + (f" ({len(self._all) - alive} died)" if alive < len(self._all) else "")

    def __len__(self) -> int:
        """How many there are for use."""
        return 0 if self._is_closed else len(self._all)

    @contextmanager
    def lend(self) -> Iterator[ReadProcess | None]:
        """One that nobody uses, whose answers stay as they are while it is lent.

        None where all are in use, unless they decode: then to wait is quicker than to decode here, and None is for when
        there is none to wait for.
        """
        process = self._find()
        try:
            yield process
        finally:
            if process:
                self._take_back(process)

    def _find(self) -> ReadProcess | None:
        wait_s = 0.0
        while not self._is_closed:
            with suppress(queue.Empty):
                process = self._free.get(timeout=wait_s)
                process.lent_at = time.monotonic()
                return process
            if not self._decodes or not any(map(self._is_expected, self._all)):
                break
            wait_s = min(LOOK_S, self._read_timeout_s)
        return None

    def _is_expected(self, process: ReadProcess) -> bool:
        """Whether a process will be back: not from a thread that hangs over what the process left to it."""
        is_late = time.monotonic() - process.lent_at > self._read_timeout_s
        return process.process.poll() is None and not is_late

    def _take_back(self, process: ReadProcess) -> None:
        if process.is_hung:
            self._replace(process)
        elif process.process.poll() is None:
            self._free.put(process)
        if self._is_closed:
            self._close_free()

    def _replace(self, hung: ReadProcess) -> None:
        """Start another in the place of one that hung over a file: the others are as good as before."""
        hung.close()
        with suppress(OSError):
            if not self._is_closed:
                self._all[self._all.index(hung)] = fresh = self._start()
                self._free.put(fresh)

    def retire(self) -> None:
        """There is nothing left to read: end those that nobody uses, and each of the others when it comes back."""
        self._is_closed = True
        self._close_free()

    def _close_free(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()

    def kill(self) -> None:
        """Nobody waits for an answer any more."""
        self._is_closed = True
        for process in self._all:
            process.process.kill()

    def close(self) -> None:
        """End all of them."""
        for process in self._all:
            process.close()


class Reading:
    """What the process does: samples one behind the other in its memory; decoded, where it `decodes`, if by Pillow.

    One after the other while files are near, which is quickest then; several at a time while each takes long to come.
    """

    def __init__(self, source: Source, memory: memoryview | mmap.mmap, decodes: bool = False) -> None:
        self._source, self._memory, self._decodes = source, np.frombuffer(memory, np.uint8), decodes
        self._pool = ThreadPoolExecutor(FAR_THREADS)  # starts no thread before it is used
        self._seconds: list[float] = []  # of each sample of this block
        self.is_far = False

    def read(self, samples: Sequence[int]) -> list[Found]:
        """Where each lies, up to the first that has no room: that and all after it come from elsewhere."""
        self._seconds.clear()
        found = list(self._place((self._pool.map if self.is_far else map)(self._load, samples)))
        self.is_far = statistics.median(self._seconds) > FAR_S
        return found + [None] * (len(samples) - len(found))

    def _load(self, sample: int) -> tuple[bytes, Header] | None:
        start = time.perf_counter()
        try:
            data = self._source.read(sample)
            return data, read_header(data)
        except (OSError, DecodeError):
            return None
        finally:
            self._seconds.append(time.perf_counter() - start)

    def _place(self, loaded: Iterable[tuple[bytes, Header] | None]) -> Iterator[Found]:
        at, room = 0, len(self._memory)
        for item in loaded:
            if item is None:
                yield None
                continue
            data, header = item
            is_decoded = self._decodes and not header.colors
            end = at + (count_bytes(header) if is_decoded else len(data))
            if end > room:
                return
            try:
                if is_decoded:
                    decode(data, header, buffer=self._memory[at:end])
                else:
                    self._memory[at:end] = np.frombuffer(data, np.uint8)
            except DecodeError:
                yield None
                continue
            yield at, end, header
            at = end


def serve(connection: Connection, memory: mmap.mmap, decodes: bool) -> None:
    """The process: learn what the source is, then read until nobody asks."""
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        reading = Reading(connection.recv(), memory, decodes)
        connection.send(READY)
        while True:
            connection.send(reading.read(connection.recv()))


def _end_with_parent(connection: int) -> None:
    """End the process when the other end is closed, even while a read hangs."""
    poll = select.poll()
    poll.register(connection, 0)  # no event but that end, of which one is told unasked
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 0), DECODES in sys.argv[3:])
