"""Memory that the ranks of one node share (step 7 on the walk): inside a node no byte need pass a socket.

Each rank lays its part of a buffer into its own segment and adds up its piece from everyone's; the sums come back
through one segment more. It takes the place of the messages that `allreduce.py` sends inside a group, and adds in the
same fixed order. The memory has no name and dies with the last rank that has it.
"""

import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Of each rank; a longer buffer goes in turns. With 32 ranks on 2 cores turns of 1 MiB took twice as long, turns of
# 16 MiB a fifth less.
SEGMENT_BYTES = 4 << 20

Spans = Callable[[Tensor], Mapping[int, Tensor]]  # a buffer -> the span of it that each member owns


class Window:
    """The segments of one node's ranks, and a place where they wait for each other."""

    def __init__(self, members: Sequence[int], rank: int, memory: Tensor, lines: Sequence[socket.socket]) -> None:
        """`lines` lead from the first member to all others, and from any other to the first."""
        self.members = tuple(members)
        self.segment_bytes = memory.numel() // (len(members) + 1)
        self._rank = rank
        self._memory = memory
        self._lines = lines

    def reduce_scatter(self, part: Tensor, spans: Spans) -> None:
        """Add all members' versions of this rank's span of `part` to its own, in member order."""
        for owner, span in spans(self._segment(self.members.index(self._rank), part)).items():
            if owner != self._rank:
                span.copy_(spans(part)[owner])
        self._meet()
        if (total := spans(part).get(self._rank)) is not None:
            for index, member in enumerate(self.members):
                if member != self._rank:
                    total.add_(spans(self._segment(index, part))[self._rank])

    def all_gather(self, part: Tensor, spans: Spans) -> None:
        """Fill the spans of `part` that others own with theirs."""
        mine, shared = spans(part), spans(self._segment(len(self.members), part))
        if self._rank in mine:
            shared[self._rank].copy_(mine[self._rank])
        self._meet()
        for owner, span in mine.items():
            if owner != self._rank:
                span.copy_(shared[owner])

    def close(self) -> None:
        """Hang up."""
        for line in self._lines:
            line.close()

    def _segment(self, index: int, like: Tensor) -> Tensor:
        start = index * self.segment_bytes
        return self._memory[start : start + like.nbytes].view(like.dtype)

    def _meet(self) -> None:
        """Return when every member has come here: all report to the first, which then lets all go."""
        try:
            if self._rank != self.members[0]:
                self._lines[0].send(b".")
            if not all(line.recv(1) for line in self._lines):
                raise RuntimeError("Connection closed by a rank of this node.")
            if self._rank == self.members[0]:
                for line in self._lines:
                    line.send(b".")
        except TimeoutError as error:
            raise RuntimeError("Timed out waiting for a rank of this node.") from error
        except OSError as error:
            raise RuntimeError(f"Connection to a rank of this node broke ({error.strerror}).") from error


def open_window(nodes: Sequence[Sequence[int]], rank: int, timeout_s: float | None) -> Window | None:
    """This node's window; every rank calls it, and all get one, or none where any node cannot have it."""
    members = next(tuple(node) for node in nodes if rank in node)
    lines: list[socket.socket] = []
    with _listen() as listener:
        names: list[bytes | str] = [b""] * dist.get_world_size()
        dist.all_gather_object(names, listener.getsockname() if listener else b"")
        memory: Tensor | None = None
        if listener is not None:
            with contextlib.suppress(OSError):
                if rank == members[0]:
                    memory = _share(listener, lines, members, timeout_s)
                else:
                    memory = _join(names[members[0]], lines, timeout_s)
    is_open = [False] * dist.get_world_size()
    dist.all_gather_object(is_open, memory is not None)
    if memory is None or not all(is_open):
        for line in lines:
            line.close()
        return None
    return Window(members, rank, memory, lines)


@contextlib.contextmanager
def _listen() -> Iterator[socket.socket | None]:
    """A socket without a file, which the system names; None where there is no such thing."""
    if not hasattr(os, "memfd_create"):
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen(1024)
        yield listener


def _share(
    listener: socket.socket, lines: list[socket.socket], members: Sequence[int], timeout_s: float | None
) -> Tensor:
    """Make the memory and give it to every other member."""
    listener.settimeout(timeout_s)
    handle = os.memfd_create("lockstep")
    try:
        os.ftruncate(handle, (len(members) + 1) * SEGMENT_BYTES)
        for _ in members[1:]:
            line, _ = listener.accept()
            line.settimeout(timeout_s)
            lines.append(line)
            socket.send_fds(line, [b"."], [handle])
        return _map(handle)
    finally:
        os.close(handle)


def _join(address: bytes | str, lines: list[socket.socket], timeout_s: float | None) -> Tensor:
    """Get the memory from the first member."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lines.append(line)
    line.settimeout(timeout_s)
    line.connect(address)
    _, handles, _, _ = socket.recv_fds(line, 1, 1)
    try:
        return _map(handles[0])
    finally:
        os.close(handles[0])


def _map(handle: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8)
