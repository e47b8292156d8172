"""Decoded images that stay on the device: a small data set is decoded once, and later epochs only crop it."""

import threading
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.order import Samples
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.probe import probe_sides
from lockstep.data.sources import Source

# Samples whose headers stand for all when the size of a data set is estimated.
NUM_PROBES = 200


def estimate_bytes(source: Source, read_timeout_s: float = READ_TIMEOUT_S) -> float:
    """What all images of a source take when decoded, from the headers of a few spread evenly over it."""
    sides = probe_sides(source, NUM_PROBES, read_timeout_s)
    return float(np.mean(3 * sides.prod(axis=1))) * source.num_samples if len(sides) else 0.0


class Resident:
    """The images seen so far, up to a limit; where each lies, by sample."""

    def __init__(self, num_samples: int, max_bytes: float) -> None:
        self._bytes_left = max_bytes
        self.num_missing = num_samples
        self._addresses = np.zeros(num_samples, np.int64)  # 0: not here
        self._strides = np.zeros((num_samples, 3), np.int64)
        self._sides = np.zeros((num_samples, 2), np.int64)
        self._memory: list[Tensor] = []
        self._lock = threading.Lock()

    @property
    def num_images(self) -> int:
        """Images on the device."""
        return len(self._addresses) - self.num_missing

    @property
    def is_whole(self) -> bool:
        """Whether every image is here, and nothing is left to read."""
        return self.num_missing == 0

    def holds(self, samples: Samples) -> NDArray[np.bool_]:
        """Which of these are here."""
        held: NDArray[np.bool_] = self._addresses[samples] != 0
        return held

    def find(self, samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Addresses, strides and sides of samples that are here."""
        return self._addresses[samples], self._strides[samples], self._sides[samples]

    def keep(
        self,
        samples: Samples,
        addresses: NDArray[np.int64],
        strides: NDArray[np.int64],
        sides: NDArray[np.int64],
        memory: list[Tensor],
    ) -> None:
        """Keep images that just came to the device in `memory`, unless the limit is reached."""
        with self._lock:
            num_bytes = sum(tensor.nbytes for tensor in memory)
            if num_bytes > self._bytes_left:
                return
            self._bytes_left -= num_bytes
            self._memory += memory
            self.num_missing -= len(np.unique(samples[self._addresses[samples] == 0]))
            self._strides[samples], self._sides[samples] = strides, sides
            self._addresses[samples] = addresses  # last: from here on other threads find them


class Shelf:
    """Residents that outlive the pipelines that filled them, for others over the same source: those of later runs."""

    def __init__(self) -> None:
        # With the source itself, so that no other can get its identity.
        self._kept: dict[tuple[int, str], tuple[Source, Resident | None]] = {}

    def take(self, source: Source, way: str, build: Callable[[], Resident | None]) -> Resident | None:
        """What is kept of a source that is decoded this way; built on first use, and so is the decision against it."""
        place = id(source), way
        if place not in self._kept:
            self._kept[place] = source, build()
        return self._kept[place][1]

    def keep_only(self, *sources: Source) -> None:
        """Let go of all other sources' images."""
        self._kept = {place: kept for place, kept in self._kept.items() if any(kept[0] is one for one in sources)}


def free_device_bytes(device: torch.device) -> int:
    """Device memory that nobody uses; nothing on a CPU, where nothing is kept."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
