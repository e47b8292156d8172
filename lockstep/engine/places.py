"""Where on this machine ranks are started: a place for each, and fewer while one is not to be trusted. Torch-free.

A rank that is lost starts again in its place, because most losses are accidents. A place where a rank is lost twice
running, such as a GPU that has failed, is left out as long as enough are left, and is tried again after a while.
"""

import time
from collections.abc import Callable, Sequence

RETRY_S = 300.0  # until a place is tried again; twice as long after each time that it fails again
# Hardware queues of a rank that shares its GPU, as many as CUDA has by itself: with those of a rank that has one to
# itself (`lockstep/__init__.py`), a GPU has no room for some twenty ranks, and says that it is out of memory.
SHARED_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


class Places:
    """At least `least` and at most `most` places; `devices` names them for CUDA, and is empty on a CPU."""

    def __init__(
        self,
        least: int,
        most: int,
        devices: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        self._least = least
        self._used = list(range(most))
        self._devices = devices
        self._shares_devices = len(devices) < most
        self._clock = clock
        self._retry_s: dict[int, float] = dict.fromkeys(self._used, retry_s)
        self._left_out: dict[int, float] = {}  # place: when it is due again
        self._lost_last: int | None = None

    @property
    def num_ranks(self) -> int:
        """As many as there are places in use."""
        return len(self._used)

    def lose(self, local_rank: int) -> bool:
        """A rank was lost, and all are about to start again; whether its place is left out."""
        place = self._used[local_rank]
        is_left_out = place == self._lost_last and self.num_ranks > self._least
        if is_left_out:
            self._used.remove(place)
            self._left_out[place] = self._clock() + self._retry_s[place]
            self._retry_s[place] *= 2
        self._lost_last = None if is_left_out else place  # the ranks that go on begin with a clean slate
        return is_left_out

    @property
    def is_waiting(self) -> bool:
        """Whether a place is due to be tried again."""
        return any(due_s <= self._clock() for due_s in self._left_out.values())

    def restore(self) -> None:
        """Take in what is due; if a rank is lost there once more, it is left out again."""
        for place in [place for place, due_s in self._left_out.items() if due_s <= self._clock()]:
            del self._left_out[place]
            self._used = sorted([*self._used, place])
            self._lost_last = place

    def describe(self) -> dict[str, str]:
        """What ranks must be told of the devices in use: nothing while all are and each rank has its own."""
        if not self._devices:
            return {}
        if self._shares_devices:  # a place that is left out is then no device
            return SHARED_QUEUES
        if not self._left_out:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._devices[place] for place in self._used)}
