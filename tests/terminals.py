"""Terminals of a test's own, and what happens when nobody reads them."""

import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def open_terminal() -> Iterator[tuple[int, int]]:
    """A terminal: the end of who reads it, and the program's."""
    ends = pty.openpty()
    try:
        yield ends
    finally:
        for end in ends:
            with suppress(OSError):
                os.close(end)


def fill(file: int) -> None:
    """Leave no room in a terminal that nobody reads."""
    os.set_blocking(file, False)
    with suppress(BlockingIOError):
        while True:
            os.write(file, b"x")
    os.set_blocking(file, True)
