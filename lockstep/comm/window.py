"""Memory that the ranks of one node share (step 7 on the walk): inside a node no byte need pass a socket.

Each rank lays its part of a buffer into its own segment and adds up its piece from everyone's; the sums come back
through one segment more. It takes the place of the messages that `allreduce.py` sends inside a group, and adds in the
same fixed order. The memory has no name and dies with the last rank that has it. It is handed over a socket whose name
every user of the machine can see, so both ends ask the system who is at the other.
"""

import contextlib
import mmap
import os
import socket
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.values import gather_values

# Of each rank; a longer buffer goes in turns. With 32 ranks on 2 cores turns of 1 MiB took twice as long, turns of
# 16 MiB a fifth less.
SEGMENT_BYTES = 4 << 20

CPU = torch.device("cpu")
BACKLOG = 64  # room for a stranger's calls beside ours
MAX_WAIT_S = 600.0
CREDENTIALS = struct.Struct("3i")  # process, user, group: what the system says of the other end
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
    """This node's window; every rank calls it, and all get one, or none where any rank cannot have it."""
    members = next(tuple(node) for node in nodes if rank in node)
    timeout_s = timeout_s or MAX_WAIT_S
    with contextlib.ExitStack() as stack:  # closes what was opened if anything fails
        listener = handle = line = None
        name = f"\0lockstep-{uuid.uuid4()}"  # no file, and no other socket of this name anywhere
        with contextlib.suppress(OSError, AttributeError):  # some systems have no such sockets, or no such memory
            if rank == members[0]:
                handle = os.memfd_create("lockstep")
                stack.callback(os.close, handle)
                os.posix_fallocate(handle, 0, (len(members) + 1) * SEGMENT_BYTES)  # now or never
                listener = stack.enter_context(_listen(name, len(members), timeout_s))
        who = gather_values([name, os.getpid(), _name_pid_space()], CPU)
        with contextlib.suppress(OSError, AttributeError):
            if rank != members[0]:
                line = stack.enter_context(_call(who, members[0], rank, timeout_s))
        # A connection waits in the listener's queue, so by now all know whether everyone has reached its first member.
        if not all(gather_values((listener if rank == members[0] else line) is not None, CPU)):
            return None
        if listener is not None and handle is not None:
            lines = _share(listener, handle, len(members) - 1, timeout_s, _list_pids(who, members[1:], rank))
        else:
            assert line is not None
            handle = socket.recv_fds(line, 1, 1)[1][0]
            stack.callback(os.close, handle)
            lines = [line.dup()]
        memory = torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8)
        return Window(members, rank, memory, lines)


def _listen(name: str, num_members: int, timeout_s: float) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name)
    listener.listen(num_members + BACKLOG)
    listener.settimeout(timeout_s)
    return listener


def _call(who: Sequence[Any], first: int, rank: int, timeout_s: float) -> socket.socket:
    """A line to the node's first rank; OSError where there is none, or where someone else answers."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(timeout_s)
    try:
        line.connect(str(who[first][0]))
        if not is_ours(line, _list_pids(who, [first], rank)):
            raise ConnectionRefusedError
    except OSError:
        line.close()
        raise
    return line


def _share(
    listener: socket.socket, handle: int, count: int, timeout_s: float | None, pids: frozenset[int] | None
) -> list[socket.socket]:
    """Give the memory to every rank that called, and hang up on anyone else."""
    lines: list[socket.socket] = []
    while len(lines) < count:
        try:
            line = listener.accept()[0]
        except TimeoutError as error:
            raise RuntimeError("Timed out waiting for a rank of this node.") from error
        if is_ours(line, pids):
            line.settimeout(timeout_s)
            socket.send_fds(line, [b"."], [handle])
            lines.append(line)
        else:
            line.close()
    return lines


def is_ours(line: socket.socket, pids: frozenset[int] | None) -> bool:
    """Whether the other end is a process of this user and, where they are known, one of these."""
    pid, user, _ = CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return user == os.geteuid() and (pids is None or pid in pids)


def _list_pids(who: Sequence[Any], members: Sequence[int], rank: int) -> frozenset[int] | None:
    """The processes of these ranks; None where they count their processes apart, as containers do."""
    if any(who[member][2] != who[rank][2] for member in members):
        return None
    return frozenset(int(who[member][1]) for member in members)


def _name_pid_space() -> str:
    """What is the same for processes that count each other alike; empty where the system does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
