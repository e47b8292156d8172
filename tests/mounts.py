"""A mount that does not answer: a file system whose server never says a word."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DETACH = 2  # umount2's: at once, whoever still waits in it


@contextmanager
def hung_mount(place: Path) -> Iterator[None]:
    """While inside, whoever asks for this folder or file waits; skips where this user cannot mount."""
    system = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"needs /dev/fuse ({error.strerror})")
    try:
        mode = "40000" if place.is_dir() else "100000"
        options = f"fd={server},rootmode={mode},user_id={os.getuid()},group_id={os.getgid()}"
        if system.mount(b"hung", os.fsencode(place), b"fuse", 0, options.encode()):
            pytest.skip(f"needs the rights to mount ({os.strerror(ctypes.get_errno())})")
        try:
            yield
        finally:
            system.umount2(os.fsencode(place), DETACH)
    finally:
        os.close(server)  # whoever still waits gets an error
