"""What the sides of `step.py` take of memory, and which of them stay there between their turns."""

import contextlib
import ctypes
import gc
import socket
from collections.abc import Container, Sequence
from pathlib import Path

import torch

from lockstep.bench.cases import Case, build_network, compute_loss
from lockstep.comm.world import World
from lockstep.data.pipeline import Batch
from lockstep.errors import LockstepError

# Of a side, as large as its gradients each: weights, gradients and momentum.
ARRAYS_PER_SIDE = 3
# Of the free memory: on a CPU, where passes are not measured, half is left to them and to others.
SHARE, GPU_SHARE = 0.5, 0.8


def measure_pass(case: Case, world: World, batch: Batch) -> int:
    """The bytes that a pass takes on a GPU beside weights and gradients; 0 on a CPU, where nobody counts."""
    if world.device.type != "cuda":
        return 0
    network = build_network(case, world.device)
    before = torch.cuda.memory_allocated(world.device)
    torch.cuda.reset_peak_memory_stats(world.device)
    try:
        compute_loss(network, batch, case.precision).backward()
        num_bytes = torch.cuda.max_memory_allocated(world.device) - before
    except torch.OutOfMemoryError:  # all ranks that share the GPU take theirs at once
        num_bytes = 0
    del network
    give_back_memory()
    if 0 in world.gather_values(num_bytes):
        raise LockstepError(
            f"A pass over {case.batch} images a rank does not fit into the GPU; ask for fewer ranks, a smaller --batch "
            "or a smaller network."
        )
    return num_bytes


def choose_kept(
    sides: Sequence[str], recorded: Container[str], gradient_bytes: int, pass_bytes: int, world: World
) -> tuple[str, ...]:
    """The sides that stay in memory while others have their turn; rank 0 decides for all.

    What a pass takes is given back after a turn, if need be. A recording holds on to it, so such sides go first.
    """
    arrays = ARRAYS_PER_SIDE * gradient_bytes
    num_neighbours = world.gather_values(_name_memory(world)).count(_name_memory(world))
    on_gpu = world.device.type == "cuda"
    free = torch.cuda.mem_get_info(world.device)[0] if on_gpu else read_available_bytes()

    def need(kept: Sequence[str]) -> int:
        num_held = sum(name in recorded for name in kept)
        of_others = arrays if len(kept) < len(sides) else 0
        return num_neighbours * (len(kept) * arrays + of_others + (num_held + 1) * pass_bytes)

    choices = [tuple(sides), tuple(name for name in sides if name not in recorded), ()]
    room = (GPU_SHARE if on_gpu else SHARE) * free
    fitting = next((place for place, kept in enumerate(choices) if need(kept) <= room), len(choices) - 1)
    place, fits = world.broadcast_value([fitting, need(choices[fitting]) <= free])
    if not fits:
        raise LockstepError(
            f"{num_neighbours} ranks need more than {need(()) / 1e9:.1f} GB on this {'GPU' if on_gpu else 'host'}, of "
            f"which {free / 1e9:.1f} GB are free; ask for fewer ranks, a smaller --batch or a smaller network."
        )
    return choices[int(place)]


def _name_memory(world: World) -> str:
    """The same for ranks that share their memory, on a host or on a GPU."""
    if world.device.type != "cuda":
        return socket.gethostname()
    return str(torch.cuda.get_device_properties(world.device).uuid)


def give_back_memory() -> None:
    """Return what a closed side held to the system, or the next one would come on top of it."""
    gc.collect()  # hooks and parameters hold each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # only glibc keeps it, and only glibc has this
        ctypes.CDLL(None).malloc_trim(0)


def read_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> float:
    """Memory that could be had without swapping; without end where the system does not tell."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf"))
