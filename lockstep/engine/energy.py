"""Joules that the devices of a run have used, where they tell (step 10 on the walk): NVML for GPUs, RAPL for CPUs.

Both are counters that run for ever. NVML is part of NVIDIA's driver and is called directly: no package is needed.
"""

import contextlib
import ctypes
import socket
import time
from pathlib import Path
from typing import Protocol

import torch

from lockstep.comm.world import World

POWERCAP = Path("/sys/class/powercap")
LOOK_S = 60.0  # between looks at counters that begin again at zero, after a quarter of an hour at the earliest


class Meter(Protocol):
    """A counter of joules, by the name of its device."""

    name: str

    def read(self) -> float: ...


class Nvml:
    """A GPU's own counter, as its driver gives it."""

    def __init__(self, device: torch.device) -> None:
        """OSError or AttributeError where there is no such driver; RuntimeError where the device does not tell."""
        self.name = f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        _check(self._library.nvmlInit_v2())
        _check(self._library.nvmlDeviceGetHandleByUUID(self.name.encode(), ctypes.byref(self._handle)))
        self.read()

    def read(self) -> float:
        millijoules = ctypes.c_ulonglong()
        _check(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)))
        return millijoules.value / 1e3


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVML returned {status}")


class Rapl:
    """A CPU package's counter, which begins again at zero when it is full."""

    def __init__(self, folder: Path) -> None:
        """OSError or ValueError where it cannot be read."""
        self.name = f"{socket.gethostname()}/{folder.name}"
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last, self._total, self._looked_s = self._look(), 0, time.monotonic()

    def read(self) -> float:
        now = self._look()
        self._total += (now - self._last) % (self._range + 1)
        self._last, self._looked_s = now, time.monotonic()
        return self._total / 1e6

    def look_now_and_then(self) -> None:
        """Read it before it can have begun again twice."""
        if time.monotonic() - self._looked_s > LOOK_S:
            self.read()

    def _look(self) -> int:
        return int(self._file.read_text())


class Energy:
    """What this rank's device has used since the run began; a CPU's packages belong to the first rank of their node."""

    def __init__(self, world: World, powercap: Path = POWERCAP) -> None:
        self._meters: list[Meter] = []
        if world.device.type == "cuda":
            with contextlib.suppress(OSError, AttributeError, RuntimeError):
                self._meters.append(Nvml(world.device))
        elif world.local_rank == 0:
            for folder in sorted(powercap.glob("intel-rapl:*")):
                if folder.name.count(":") == 1:  # a package, and not one of its parts
                    with contextlib.suppress(OSError, ValueError):
                        self._meters.append(Rapl(folder))
        self._before = {meter.name: meter.read() for meter in self._meters}

    def look(self) -> None:
        """To be called now and then."""
        for meter in self._meters:
            if isinstance(meter, Rapl):
                with contextlib.suppress(OSError, ValueError):
                    meter.look_now_and_then()

    def count(self, world: World, *, alone: bool) -> float | None:
        """Joules of all devices, each counted once; None if any rank's GPU does not tell, or no device does.

        Every rank must call it; `alone` asks no other, which may be gone.
        """
        used: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            used = {meter.name: meter.read() - self._before[meter.name] for meter in self._meters}
        found = [used] if alone else world.gather_values(used)
        if world.device.type == "cuda" and not all(found):
            return None
        joules: dict[str, float] = {}
        for meters in found:
            for name, value in meters.items():
                joules[name] = max(float(value), joules.get(name, 0.0))
        return sum(joules.values()) if joules else None
