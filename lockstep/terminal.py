"""What is said in a terminal or a pipe: it never ends a run, and never steers the terminal. Torch-free.

A disk may be full, a terminal closed, a reader gone: a run of weeks goes on without its words.
"""

import errno
import os
import threading
import unicodedata
import weakref
from collections import deque
from contextlib import suppress
from typing import IO

LOST = (errno.ENOSPC, errno.EIO, errno.EPIPE)  # a full disk, a closed terminal, a reader that went away
MOST_WAITING = 1000  # pieces of output that a terminal may be behind
DRAIN_S = 2.0  # that a run waits at its end for a terminal to take the last of it
IDLE_S = 5.0  # after which a thread that has nothing to write ends
STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of characters that are not seen
HARMLESS = "\n\u200c\u200d"  # lines of our own, and what joins the parts of letters and emoji


def say(text: str, stream: IO[str] | None) -> None:
    """Print a line, if the stream takes it."""
    if stream is None:  # closed before the program began
        return
    with suppress(OSError, ValueError):
        stream.write(text + "\n")
        stream.flush()


def drop_failed(*streams: IO[str] | None) -> bool:
    """Whether one of these no longer takes what is written; what it still holds is then given up.

    Python would try again at its own end, and say so in lines of its own.
    """
    has_failed = False
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            has_failed = True
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()
    return has_failed


def is_of_output(error: OSError, stream: IO[str]) -> bool:
    """Whether an error may be that of a stream that holds nothing back (PYTHONUNBUFFERED) and so cannot be asked."""
    return getattr(stream, "write_through", False) and error.errno in LOST and error.filename is None


def escape(text: str) -> str:
    """Text with whatever could steer a terminal spelt out: a name may hold anything."""
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in STEERING and character not in HARMLESS
        else character
        for character in text
    )


class Aside:
    """A terminal as a stream, written to by a thread: one that nobody reads (Ctrl-S) holds up nobody.

    When it is far behind, the oldest pieces are dropped. Its file is written to past Python's own stream, whose lock
    would otherwise be held when the interpreter ends.
    """

    def __init__(self, stream: IO[str], encoding: str) -> None:
        self._stream = stream
        self._file = os.dup(stream.fileno())  # a number that stays ours, whoever closes the stream
        weakref.finalize(self, os.close, self._file).atexit = False
        self.encoding = encoding
        self._change = threading.Condition()
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)
        self._has_thread = False
        self._is_writing = False
        with suppress(OSError, ValueError):
            stream.flush()  # what was printed before comes first

    def write(self, text: str) -> int:
        with self._change:
            self._waiting.append(text)
            self._change.notify_all()
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._work, name="lockstep-terminal", daemon=True).start()
        return len(text)

    def flush(self) -> None:
        """Nothing waits here but what the thread is about to write."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._file

    def drain(self, wait_s: float = DRAIN_S) -> None:
        """Wait until all is written, for a while."""
        with self._change:
            self._change.wait_for(lambda: not self._waiting and not self._is_writing, wait_s)

    def _work(self) -> None:
        while True:
            with self._change:
                self._is_writing = False
                self._change.notify_all()
                if not self._change.wait_for(lambda: self._waiting, IDLE_S):
                    self._has_thread = False
                    return
                data = self._waiting.popleft().encode(self.encoding, "backslashreplace")
                self._is_writing = True
            with suppress(OSError):  # of a terminal that was closed
                while data:
                    data = data[os.write(self._file, data) :]
