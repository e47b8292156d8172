"""What the images of a source are like, from the headers of a few spread evenly over it. Torch-free."""

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from lockstep.data.decode import DecodeError, Header, read_header
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.sources import Source
from lockstep.data.threads import read_each


def probe_sides(source: Source, num_probes: int, read_timeout_s: float = READ_TIMEOUT_S) -> NDArray[np.int64]:
    """Height and width of some images; fewer than asked for where some cannot be read, or do not come."""
    headers = probe_headers(source, num_probes, read_timeout_s)
    return np.array([(header.height, header.width) for header in headers], np.int64).reshape(-1, 2)


def probe_headers(source: Source, num_probes: int, read_timeout_s: float = READ_TIMEOUT_S) -> list[Header]:
    """The headers of some images; fewer than asked for where some cannot be read, or do not come."""
    probes = np.unique(np.linspace(0, source.num_samples - 1, num_probes).astype(np.int64))
    headers: list[Header] = []

    def take(_: int, data: bytes | OSError) -> None:
        if isinstance(data, TimeoutError):
            raise data  # the others may take as long
        with suppress(DecodeError):  # the pipeline counts and names what is bad when its turn comes
            headers.append(read_header(b"" if isinstance(data, OSError) else data))

    with suppress(TimeoutError):
        read_each(len(probes), lambda number: source.read(int(probes[number])), take, read_timeout_s, "a sample")
    return headers
