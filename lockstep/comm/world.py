"""Who am I: rank, node, device; start and stop the world of ranks.

A rank is started by torchrun (`lockstep train` uses its launcher too) or by Slurm's srun; both leave their word in
the environment. torch.distributed moves the bytes: NCCL between GPUs, Gloo between CPUs.
"""

import atexit
import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from lockstep.comm import values
from lockstep.comm.census import Agreement, find_place, take_census
from lockstep.comm.meeting import (
    call_again,
    is_kept_by_launcher,
    is_loopback,
    join_store,
    separate_attempt,
    stay_on_loopback,
)
from lockstep.comm.pulse import Pulse
from lockstep.comm.seal import Seal
from lockstep.errors import LockstepError, LostContact
from lockstep.restarts import can_restart
from lockstep.terminal import say

_worlds = itertools.count()  # that this process has been in: a program may train several times
PATIENCE_S = 600.0  # while kernels are chosen and compiled
# NCCL's watchdog ends the process four times this long after it has noted that a collective timed out. PyTorch's own
# 15 s are for a record of what was under way; here it is the time for `lookout.py` to say who is behind.
LAST_WORDS_MS = 2000
STEPS_APART = 7919  # ports between the steps of a Slurm job: more than jobs that run at a time are apart


@dataclass(frozen=True)
class Membership:
    """A rank's place among all ranks and where they meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


@dataclass(frozen=True)
class World:
    """One process and its device among all ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    num_threads: int  # CPU cores this rank may use
    pulse: Pulse | None = None  # a world of one needs none
    notice: str = ""  # on rank 0: why the backend is not the usual one
    timeout_s: float = PATIENCE_S  # that ranks wait for each other

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()

    def note_failure(self, error: BaseException) -> None:
        """This rank cannot go on; the others shall know why, unless one of them was lost before it.

        Also of what every rank finds at once: it may be that only this one does, and rank 0 would say nothing.
        """
        if self.pulse:
            self.pulse.fail("" if isinstance(error, LostContact) else _phrase(error))

    def broadcast_value(self, value: Any, source: int = 0) -> Any:
        """One rank's plain value on every rank, by `values.py`: tuples become lists, also in a world of one."""
        if self.size == 1:
            return values.decode(values.encode(value))
        return values.broadcast_value(value, self._message_device(), source)

    def broadcast_bytes(self, data: bytes, *, most: int = values.MAX_BYTES) -> bytes:
        """Rank 0's bytes, on every rank."""
        return data if self.size == 1 else values.broadcast_bytes(data, self._message_device(), most=most)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with that of one."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over all ranks, in place; integers wrap modulo 2**64, as the ledger needs."""
        if self.size > 1:
            shared = tensor.to(self._message_device())
            dist.all_reduce(shared)
            tensor.copy_(shared)
        return tensor

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over all ranks, element by element, in place."""
        if self.size > 1:
            shared = tensor.to(self._message_device())
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            tensor.copy_(shared)
        return tensor

    def gather_values(self, value: Any) -> list[Any]:
        """Every rank's plain value, in rank order, on every rank."""
        if self.size == 1:
            return [values.decode(values.encode(value))]
        return values.gather_values(value, self._message_device())

    @contextmanager
    def patience(self) -> Iterator[None]:
        """While inside, a GPU's rank waits longer for the others: kernels are chosen and compiled, for minutes on some.

        A rank that is lost is noticed all the same, by its pulse (`lookout.py`). CPU ranks have the timeout alone to
        notice it by, and compile nothing unasked.
        """
        if self.size == 1 or self.device.type != "cuda" or self.timeout_s >= PATIENCE_S:
            yield
            return
        set_timeout(PATIENCE_S)
        try:
            yield
        finally:
            set_timeout(self.timeout_s)

    def _message_device(self) -> torch.device:
        return self.device if dist.get_backend() == "nccl" else torch.device("cpu")


def _phrase(error: BaseException) -> str:
    """Why a rank cannot go on, in a line; of what comes with a traceback, its last."""
    if isinstance(error, LockstepError):
        return str(error)
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def read_membership(environment: Mapping[str, str]) -> Membership | None:
    """The world that torchrun or srun started this process in, or None when it was started by hand."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _check(_read_torchrun(environment))
    # A step of one task is an interactive shell: let the launcher start the ranks there.
    if "SLURM_STEP_ID" in environment and _read_int(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _check(_read_slurm(environment))
    return None


def _check(found: Membership) -> Membership:
    """Refuse a place that no world has: the ranks would wait for each other until the timeout."""
    if not 0 <= found.rank < found.size:
        raise LockstepError(
            f"The environment says that this is rank {found.rank} of {found.size}; start the ranks again, or unset "
            "RANK and WORLD_SIZE for a run by itself."
        )
    if not 0 < found.port < 1 << 16:
        raise LockstepError(
            f"The environment names port {found.port} (MASTER_PORT), and there is none; use 1 to 65535."
        )
    return found


def _read_torchrun(environment: Mapping[str, str]) -> Membership:
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if key not in environment]
    if missing:
        raise LockstepError(
            f"RANK and WORLD_SIZE are set but not {' and '.join(missing)}; start ranks with torchrun, or unset both."
        )
    size = _read_int(environment, "WORLD_SIZE")
    # A starter that names no local rank, such as a Kubernetes job of one rank per pod, has one rank on each node.
    local_size = size if "LOCAL_RANK" in environment else 1
    return Membership(
        rank=_read_int(environment, "RANK"),
        size=size,
        local_rank=_read_int(environment, "LOCAL_RANK", 0),
        local_size=_read_int(environment, "LOCAL_WORLD_SIZE", local_size),
        address=environment["MASTER_ADDR"],
        port=_read_int(environment, "MASTER_PORT"),
    )


def _read_slurm(environment: Mapping[str, str]) -> Membership:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    tasks_per_node = expand_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    # Jobs that share a node must not meet at the same port, nor steps of one job that run side by side.
    number = _read_int(environment, "SLURM_JOB_ID", 0) + STEPS_APART * _read_int(environment, "SLURM_STEP_ID", 0)
    return Membership(
        rank=_read_int(environment, "SLURM_PROCID"),
        size=_read_int(environment, "SLURM_STEP_NUM_TASKS"),
        local_rank=_read_int(environment, "SLURM_LOCALID"),
        local_size=tasks_per_node[_read_int(environment, "SLURM_NODEID", 0) % len(tasks_per_node)],
        address=environment.get("MASTER_ADDR") or first_node(nodes) or "127.0.0.1",
        port=_read_int(environment, "MASTER_PORT", 20000 + number % 20000),
    )


def _read_int(environment: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environment.get(key)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LockstepError(
            f"The environment variable {key} is {text!r}, not a number; start the ranks again."
        ) from None


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list such as `gpu[003-006,9],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", nodes)
    if not match:
        return ""
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[-,]", numbers)[0] if numbers else "") + suffix


def expand_tasks(tasks: str) -> list[int]:
    """Slurm's `8(x3),4` -> [8, 8, 8, 4]: tasks on each node."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(repeat or 1)
    return counts or [1]


@contextmanager
def join_world(membership: Membership | None, *, backend: str = "auto", timeout_s: float = 600.0) -> Iterator[World]:
    """Start this rank's device and process group, and stop the group at the end; a world of one needs no group."""
    member = membership or Membership(0, 1, 0, 1, "", 0)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", member.local_rank % num_gpus) if num_gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(member.rank, member.size, member.local_rank, member.local_size, device, count_cores())
    if member.size == 1:
        torch.set_num_threads(world.num_threads)
        yield world
        return
    seal = Seal.read(os.environ)
    # Held to the end, as rank 0's may be the one that all the others talk to.
    agreed, store, line = _meet(member, device, backend, seal, timeout_s)
    if agreed.notice:
        say(f"lockstep: {agreed.notice}", sys.stderr)
    torch.set_num_threads(agreed.num_threads)
    keeper = None if is_kept_by_launcher() else 0
    pulse = Pulse(line, member.rank, member.size, keeper=keeper, seal=seal)
    try:
        yield replace(world, num_threads=agreed.num_threads, pulse=pulse, notice=agreed.notice, timeout_s=timeout_s)
    except BaseException:
        # Silent from now on, so that others find this rank lost.
        pulse.close()
        _leave_after_error(agreed.backend)
        raise
    pulse.leave(timeout_s)  # one that was cut off never will
    dist.destroy_process_group()
    pulse.close()
    del store


def _meet(
    member: Membership, device: torch.device, backend: str, seal: Seal, timeout_s: float
) -> tuple[Agreement, Store, Store]:
    """Find the other ranks and start the backend that all agree on; returns two lines to the store."""
    spans_nodes = member.size > member.local_size
    if not spans_nodes or is_loopback(member.address):
        stay_on_loopback(os.environ)  # read by the backends when they start
    address, rank, size = member.address, member.rank, member.size
    place = next(_worlds)
    # A rank that is quick must not find the store of the world before, which rank 0 is about to close.
    port = member.port if is_kept_by_launcher() else member.port + place
    try:
        store = join_store(address, port, rank, size, timeout_s, spans_nodes=spans_nodes)
        # What waits on the first line must not hold up a sign of life on the second.
        line = call_again(address, port, size, timeout_s)
        store, line = separate_attempt(store, place), separate_attempt(line, place)
        agreed = take_census(store, rank, size, find_place(device), asked=backend, seal=seal, timeout_s=timeout_s)
        if agreed.shares_gpu:
            os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")  # NCCL refuses two ranks of one host on one GPU
        _start_backend(agreed.backend, store, member, device, timeout_s)
    # Gloo takes the addresses it finds in the store at their word: what a stranger has put there may have any length.
    except (RuntimeError, ValueError, MemoryError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        # Each agent counts by itself how often it has started ranks again, and those of other counts never meet.
        is_apart = spans_nodes and is_kept_by_launcher() and can_restart(os.environ)
        advice = (
            "by torchrun with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            if is_apart
            else "and set MASTER_PORT to a free port"
        )
        raise LockstepError(
            f"Rank {rank} could not meet the other ranks at {address}:{port} ({reason[0]}); "
            f"check that all were started, {advice}."
        ) from error
    return agreed, store, line


def _start_backend(backend: str, store: Store, member: Membership, device: torch.device, timeout_s: float) -> None:
    if backend == "nccl":
        # Its watchdog's last record delays the end, and is for those who debug NCCL itself.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(LAST_WORDS_MS))
    dist.init_process_group(
        backend,
        store=store,
        rank=member.rank,
        world_size=member.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )


def set_timeout(seconds: float) -> None:
    """How long the collectives of the world, those started from now on, wait for other ranks."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def has_timed_out() -> bool:
    """Whether NCCL has given up on a collective of any group; its watchdog is about to end this process."""
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group without GPUs
            read = getattr(group._get_backend(torch.device("cuda")), "get_error", None)
            if read is not None and read().name != "SUCCESS":
                return True
    return False


def _leave_after_error(backend: str) -> None:
    """Stop the process group, unless that would wait for collectives that never come."""
    if backend != "nccl":
        dist.destroy_process_group()
        return
    # NCCL waits for its kernels when its group is destroyed, and again when the interpreter takes it down: in silence,
    # for up to the timeout. So the group stays, and the process ends at the first moment after it has said why.
    atexit.register(_end_process)


def _end_process() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def count_cores() -> int:
    """Cores this process may run on, by its affinity where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
