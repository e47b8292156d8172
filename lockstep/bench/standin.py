"""A stand-in for the network: on one GPU, each buffer's "all-reduce" keeps the channel's stream busy for a given time.

It changes no number. Everything else, channel, events, order, is what several ranks use, so a timeline of it shows what
is hidden and what is not.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.comm.channel import Channel
from lockstep.comm.cost import Choice
from lockstep.comm.hybrid import Hybrid
from lockstep.comm.topology import Link

CALIBRATION_CYCLES = 20_000_000


class StandIn(Hybrid):
    """Takes `latency_s` + bytes / `bytes_per_s` for every buffer."""

    def __init__(self, device: torch.device, link: Link) -> None:
        self._device = device
        self._link = link
        self._is_left_to_torch = False
        self._groups = {}
        self.channel = Channel(device)
        self._cycles_per_s = _measure_cycles()

    @property
    def bytes_per_element(self) -> int:
        return 4

    def prepare(self, choices: Iterable[Choice]) -> None:
        """There is nobody to meet."""

    def run(self, buffer: Tensor, choice: Choice, num_exact: int = 0) -> None:
        """Keep the current stream busy for as long as the sum would take."""
        seconds = self._link.latency_s + buffer.nbytes / self._link.bytes_per_s
        torch.cuda._sleep(int(seconds * self._cycles_per_s))


def _measure_cycles() -> float:
    """Cycles a second of the kernel that does nothing but wait."""
    torch.cuda._sleep(CALIBRATION_CYCLES)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return CALIBRATION_CYCLES / (float(start.elapsed_time(end)) / 1000)
