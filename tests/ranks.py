"""Run a function as several real ranks: processes over Gloo, forked from a server that has torch loaded already."""

import multiprocessing
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from lockstep.comm.world import Membership, World, join_world

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["lockstep.engine.run"])


def find_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout_s: float = 120) -> list[Any]:
    """`function(world, *arguments)` on every rank; the results in rank order, or the first rank's traceback."""
    port = find_port()
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(theirs, function, rank, size, port, arguments))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout_s), f"rank {rank} gave no answer within {timeout_s} s"
            is_good, value = pickle.loads(pipe.recv_bytes())
            assert is_good, f"rank {rank} failed:\n{value}"
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _run_rank(
    pipe: Connection, function: Callable[..., Any], rank: int, size: int, port: int, arguments: tuple[Any, ...]
) -> None:
    try:
        member = Membership(rank, size, rank, size, "127.0.0.1", port)
        with join_world(member, timeout_s=60) as world:
            value = function(world, *arguments)
        answer = (True, value)
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain pickle copies tensors; multiprocessing's own would share memory that dies with this process.
    pipe.send_bytes(pickle.dumps(answer))


def world_of_one() -> World:
    """A world that needs no process group."""
    with join_world(None) as world:
        return world
