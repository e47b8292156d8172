"""Who has which device and which cores, so that all ranks agree on one backend and nobody's cores are counted twice.

Ranks leave a record each in the store before any backend starts; rank 0 reads them all and leaves each its answer, so
that the store is asked a constant number of questions by every other rank. How many GPUs a rank sees says little: under
Slurm each task may see one GPU of its own, and the same number may be one GPU for all. A device's own identity tells.
"""

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Store

from lockstep.comm.meeting import peek
from lockstep.comm.seal import Seal
from lockstep.errors import LockstepError, SharedError

RECORD = re.compile(r"([!-~]{1,128}) ([!-~]{1,128}) ([0-9a-f]{1,1024})", re.ASCII)
ANSWER = re.compile(r"(nccl|shared|gloo|none) (\d{1,6}) (\d{1,9})", re.ASCII)
NO_DEVICE = "-"
SLOWER = "so all ranks use Gloo, which is slower than NCCL"
POLL_S = 0.02
HEARD_S = 5.0


class Place(NamedTuple):
    """What one rank runs on."""

    host: str
    device: str  # the GPU's own identity; NO_DEVICE without one
    cores: int  # a bit for each core that it may use


class Decision(NamedTuple):
    """One backend for all, and why it is not the usual one.

    `none` where the one asked for cannot be had; `shared` is NCCL where several ranks have one GPU.
    """

    backend: str
    reason: str = ""
    culprit: int = 0  # the rank it is about


class Agreement(NamedTuple):
    """What the census came to, for one rank."""

    backend: str
    num_threads: int
    notice: str  # on rank 0, where the backend is not the usual one
    shares_gpu: bool = False  # NCCL's ranks, some on one GPU: each must name a host of its own


def find_place(device: torch.device) -> Place:
    """This rank's record."""
    identity = NO_DEVICE
    if device.type == "cuda":
        identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or f"gpu{device.index}"
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Place(name_machine(), identity, sum(1 << core for core in cores))


def choose_backend(places: Sequence[Place], asked: str = "auto") -> Decision:
    """NCCL if every rank has a GPU of its own, else Gloo; what is asked for, where it is possible at all."""
    without = next((rank for rank, place in enumerate(places) if place.device == NO_DEVICE), None)
    if asked == "nccl" and without is not None:
        return Decision("none", "", without)
    if asked == "nccl" and len({place.device for place in places}) < len(places):
        return Decision("shared", "Several ranks share one GPU, so NCCL's sums go through sockets: for tests")
    if asked != "auto":
        return Decision(asked)
    if all(place.device == NO_DEVICE for place in places):
        return Decision("gloo")
    if without is not None:
        return Decision("gloo", f"Rank {without} has no GPU while others have one, {SLOWER}", without)
    owners: dict[str, int] = {}
    for rank, place in enumerate(places):
        # NCCL refuses two ranks of one host on one GPU; Gloo carries CUDA tensors through the host.
        if (first := owners.setdefault(place.device, rank)) != rank:
            return Decision("gloo", f"Ranks {first} and {rank} share one GPU, {SLOWER}", rank)
    return Decision("nccl")


def share_cores(places: Sequence[Place]) -> list[int]:
    """Threads for each rank: every core it may use counts for one part, divided by the ranks that may use it too."""
    users = Counter((place.host, core) for place in places for core in _list_cores(place.cores))
    shares = (sum(1 / users[place.host, core] for core in _list_cores(place.cores)) for place in places)
    return [max(1, int(share + 1e-6)) for share in shares]


def take_census(
    store: Store, rank: int, size: int, place: Place, *, asked: str, seal: Seal, timeout_s: float
) -> Agreement:
    """Tell the others where this rank is and hear what all agree on; every rank calls it."""
    key = f"lockstep/place/{rank}"
    store.set(key, seal.close(key, f"{place.host} {place.device} {place.cores:x}").decode())
    end = time.monotonic() + timeout_s
    notice = ""
    if rank == 0:
        rows = [_read(store, f"lockstep/place/{other}", RECORD, seal, end) for other in range(size)]
        places = [Place(host, device, int(cores, 16)) for host, device, cores in rows]
        decision = choose_backend(places, asked)
        notice = f"{decision.reason}." if decision.reason else ""
        for other, count in enumerate(share_cores(places)):
            answer = f"lockstep/agreed/{other}"
            store.set(answer, seal.close(answer, f"{decision.backend} {count} {decision.culprit}").decode())
    backend, num_threads, culprit = _read(store, f"lockstep/agreed/{rank}", ANSWER, seal, end)
    if backend == "none":
        _wait_until_heard(store, rank, size)
        raise SharedError(f"comm.backend is nccl but rank {culprit} has no CUDA device; use gloo or auto.")
    if backend == "shared":
        return Agreement("nccl", int(num_threads), notice, shares_gpu=True)
    return Agreement(backend, int(num_threads), notice)


def _wait_until_heard(store: Store, rank: int, size: int) -> None:
    """Let rank 0, which may keep the store, end after the others have heard why."""
    num_heard = store.add("lockstep/heard", 1)
    end = time.monotonic() + HEARD_S
    while rank == 0 and num_heard < size and time.monotonic() < end:
        time.sleep(POLL_S)
        num_heard = store.add("lockstep/heard", 0)


def _read(store: Store, key: str, form: re.Pattern[str], seal: Seal, end: float) -> tuple[str, ...]:
    """The fields of a value once it is there; one that is no rank's is as if it had not come."""
    while (left_s := end - time.monotonic()) > 0:
        value = peek(store, key)
        if value is None:
            store.wait([key], timedelta(seconds=left_s))
            continue
        text = seal.open(key, value)
        if found := form.fullmatch(text) if text is not None else None:
            return found.groups()
        time.sleep(POLL_S)
    raise LockstepError(
        f"A rank left no word of where it runs ({key}); check that all ranks were started, with one LOCKSTEP_SECRET or "
        "none, and that nobody else writes to their store."
    )


def _list_cores(mask: int) -> list[int]:
    return [core for core in range(mask.bit_length()) if mask >> core & 1]


def name_machine() -> str:
    """The same for all containers of one machine, and another for every machine, whatever its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
