"""Run a function as several real ranks: processes forked from a server that has torch loaded already.

Over Gloo they are ranks of one host. Over NCCL they share one GPU: NCCL refuses two ranks of one host on one GPU, so
each rank has a host of its own, as far as NCCL can tell, and they meet over sockets.
"""

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import pytest
import torch

from lockstep.bench.shared_gpu import describe_rank
from lockstep.comm.world import Membership, World, join_world

Backend = Literal["gloo", "nccl"]

context = multiprocessing.get_context("forkserver")
# It must not touch CUDA, which works in no process forked afterwards; importing does not.
context.set_forkserver_preload(
    ["lockstep.engine.run", "lockstep.engine.launch", "lockstep.cli", "pytest", "hypothesis", "tests.ahead"]
)


def over_nccl(*values: Any) -> Any:
    """A case of a test that also runs over Gloo: the backend's name and `values`, for a machine with a GPU."""
    return pytest.param("nccl", *values, marks=pytest.mark.gpu)


def find_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, backend: Backend = "gloo", timeout_s: float = 120
) -> list[Any]:
    """`function(world, *arguments)` on every rank; the results in rank order, or the first failure's traceback.

    Tensors in the results are on the CPU: a GPU's memory dies with its rank.
    """
    port = find_port()
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(theirs, function, rank, size, port, backend, arguments))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return _collect(pipes, timeout_s)
    except BaseException:
        for process in processes:
            process.kill()  # they wait for the one that failed
        raise
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _collect(pipes: Sequence[Connection], timeout_s: float) -> list[Any]:
    """Every rank's value, in rank order; whoever fails first is the one to hear."""
    values: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    while len(values) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in values]
        ready = wait([pipes[rank] for rank in missing], max(0.0, end - time.monotonic()))
        assert ready, f"ranks {missing} gave no answer within {timeout_s} s"
        for rank in missing:
            if pipes[rank] not in ready:
                continue
            try:
                is_good, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                is_good, value = False, "its process ended without an answer"
            assert is_good, f"rank {rank} failed:\n{value}"
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    backend: Backend,
    arguments: tuple[Any, ...],
) -> None:
    local_rank, local_size = rank, size
    if backend == "nccl":
        os.environ |= describe_rank(rank)  # before NCCL starts, which reads it once
        local_rank, local_size = 0, 1
    try:
        member = Membership(rank, size, local_rank, local_size, "127.0.0.1", port)
        with join_world(member, backend=backend, timeout_s=60) as world:
            # Tests run side by side: two threads of a tiny pass would wait for each other most of the time.
            torch.set_num_threads(1)
            value = _call(pipe, function, world, arguments)
        answer = (True, value)
    except Exception:
        answer = (False, traceback.format_exc())
    _tell(pipe, answer)


def _call(pipe: Connection, function: Callable[..., Any], world: World, arguments: tuple[Any, ...]) -> Any:
    """The function's value; a failure is told at once, as leaving the world may hang while others wait in NCCL."""
    try:
        return to_host(function(world, *arguments))
    except BaseException:
        _tell(pipe, (False, traceback.format_exc()))
        raise SystemExit(1) from None


def _tell(pipe: Connection, answer: tuple[bool, Any]) -> None:
    # Plain pickle copies tensors; multiprocessing's own would share memory that dies with this process.
    pipe.send_bytes(pickle.dumps(answer))


def to_host(value: Any) -> Any:
    """The same value with every tensor in it on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)._make(map(to_host, value))  # type: ignore[attr-defined]
    if isinstance(value, tuple | list):
        return type(value)(map(to_host, value))
    return value


def world_of_one() -> World:
    """A world that needs no process group."""
    with join_world(None) as world:
        return world
