"""Each buffer by the all-reduce chosen for it (step 7 on the walk): the paper's hybrid, with a choice per buffer.

All ranks run the same choices in the same order on one channel, so the result does not depend on timing.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.allreduce import ALGORITHMS, Groups, Scratch, build_groups
from lockstep.comm.channel import Channel, Pending
from lockstep.comm.cost import FLAT, Choice
from lockstep.comm.moment import Moment, take_moment
from lockstep.comm.topology import Topology, plan_groups
from lockstep.comm.window import Spans, Window
from lockstep.comm.wire import Wire

PIECE = 1 << 16  # elements whose squares are added up at a time


class PlannedSum(NamedTuple):
    """A sum that is to be made: elements, how, and how many of the last ones travel in FP32 whatever the wire."""

    buffer: Tensor
    choice: Choice
    num_exact: int = 0


class Sum(Protocol):
    """A sum on its way."""

    def wait(self) -> object: ...


class TimedWork:
    """PyTorch's own all-reduce on its way, and when it began and ended."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.begun: Moment | None = take_moment(on_gpu=False)
        self.done: Moment | None = None
        work.get_future().then(self._note_end)

    def wait(self) -> object:
        done = self._work.wait()
        self._note_end(None)  # the thread that is to note it may not have come to it yet
        return done

    def _note_end(self, _future: object) -> None:
        self.done = self.done or take_moment(on_gpu=False)


class Hybrid:
    """Sums buffers over all ranks, each by its own choice of algorithm and group size."""

    # Lists for what somebody wants to know of the sums that are started: when each began and ended (the channel must
    # time its work), and the squares of this rank's own gradients in each buffer before it was summed.
    timed: list[Pending | TimedWork] | None = None
    squares: list[Tensor] | None = None

    def __init__(
        self, topology: Topology, rank: int, device: torch.device, wire: Wire, timeout_s: float | None = None
    ) -> None:
        self._topology = topology
        self._rank = rank
        self._wire = wire
        self._timeout_s = timeout_s
        self._groups: dict[int, Groups] = {}
        self._device = device
        self.channel = Channel(device)
        self._is_left_to_torch = True
        self.prepare([FLAT])

    @property
    def bytes_per_element(self) -> int:
        """What an element of a buffer weighs on its way; sizes of messages are meant so."""
        return self._wire.bytes_per_element

    def prepare(self, choices: Iterable[Choice]) -> None:
        """Make the process groups these choices need; every rank must call it with the same ones."""
        choices = list(choices)
        for size in sorted({choice.group_size for choice in choices} - self._groups.keys()):
            # One process group carries all: they take turns on the channel, and every group more is a mesh of sockets.
            first = next(iter(self._groups.values()), None)
            self._groups[size] = build_groups(
                plan_groups(self._topology, size),
                self._rank,
                nodes=self._topology.nodes,
                share=first,
                timeout_s=self._timeout_s,
            )
        # Between CPUs PyTorch's own all-reduce is asynchronous already and keeps its own order, if nothing else runs.
        is_flat = self._wire.is_plain and all(choice == FLAT for choice in choices)
        self._is_left_to_torch = is_flat and self._device.type == "cpu"

    def reserve(self, sums: Iterable[PlannedSum]) -> None:
        """Take the memory that these sums need beside their buffers: a lack of it shows here, where nobody waits.

        No other rank takes part: the very code that sums runs on arrays without memory and counts what it takes.
        """
        for buffer, choice, num_exact in sums:
            groups = self._groups.get(choice.group_size)
            if groups is None:  # whoever stands in for a network has none
                continue
            tally = Tally()
            still = replace(
                groups, process_group=None, scratch=tally, window=StillWindow(groups.window) if groups.window else None
            )
            algorithm = ALGORITHMS[choice.algorithm] if choice != FLAT else _leave  # which has memory of its own
            self._wire.sum(_build_blank(buffer.numel(), buffer.dtype), algorithm, still, num_exact)
            stream = self.channel.stream  # whose memory is given back in its own order
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                for purpose, num_bytes in tally.num_bytes.items():
                    if self._is_on_device(purpose, buffer, groups):
                        groups.scratch.take(purpose, num_bytes, torch.uint8, buffer.device)

    def _is_on_device(self, purpose: str, buffer: Tensor, groups: Groups) -> bool:
        """Whether scratch lies where the buffer does; Gloo sums a GPU's on the host, whose memory is not short."""
        if not buffer.is_cuda or dist.get_backend(groups.process_group) != "gloo":
            return True
        return purpose == "wire" and self._wire.division != "fp32"

    def start(self, buffer: Tensor, choice: Choice, num_exact: int = 0, after: torch.cuda.Event | None = None) -> Sum:
        """Begin to sum a buffer in place; what is started first is summed first.

        The last `num_exact` elements travel in FP32 whatever the wire. On a GPU the sum begins after the event `after`.
        """
        squares = self.squares
        if self._is_left_to_torch:
            if squares is not None:
                squares.append(sum_squares([buffer[: buffer.numel() - num_exact]]))
            work: Sum | None = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            if self.timed is None:
                return work
            self.timed.append(TimedWork(work))
            return self.timed[-1]

        def run() -> None:
            if squares is not None:
                squares.append(sum_squares([buffer[: buffer.numel() - num_exact]]))
            self.run(buffer, choice, num_exact)

        pending = self.channel.submit(run, after)
        if self.timed is not None:
            self.timed.append(pending)
        return pending

    def run(self, buffer: Tensor, choice: Choice, num_exact: int = 0) -> None:
        """Sum a buffer in place, here and now."""
        self._wire.sum(buffer, ALGORITHMS[choice.algorithm], self._groups[choice.group_size], num_exact)

    def close(self) -> None:
        """Stop the channel and let go of the node's window."""
        self.channel.close()
        for window in {groups.window for groups in self._groups.values() if groups.window}:
            window.close()


class Blank(Tensor):
    """An array without memory: it is cut as any other, and what would be written to it is not computed.

    PyTorch's own such arrays would import half of its compiler to add two of them, which takes a second.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.add_, Tensor.mul_, Tensor.div_, Tensor.copy_):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _build_blank(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="meta").as_subclass(Blank)


class Tally(Scratch):
    """Counts the bytes that are taken for each purpose, and gives arrays without memory."""

    def __init__(self) -> None:
        self.num_bytes: dict[str, int] = {}

    def take(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.num_bytes[purpose] = max(self.num_bytes.get(purpose, 0), numel * dtype.itemsize)
        return _build_blank(numel, dtype)


class StillWindow(Window):
    """A window through which nothing passes, and where nobody is waited for."""

    def __init__(self, window: Window) -> None:
        self.members, self.segment_bytes = window.members, window.segment_bytes

    def reduce_scatter(self, part: Tensor, spans: Spans) -> None: ...

    def all_gather(self, part: Tensor, spans: Spans) -> None: ...


def _leave(buffer: Tensor, groups: Groups) -> None:
    """No all-reduce at all."""


def sum_squares(arrays: Sequence[Tensor]) -> Tensor:
    """The sum of all squares of at least one array; on a CPU, which adds up in FP32 one by one, in pieces."""
    pieces = [piece for array in arrays for piece in (array.split(PIECE) if array.is_cpu else (array,))]
    alike = [[piece for piece in pieces if piece.dtype == dtype] for dtype in {piece.dtype for piece in pieces}]
    norms = [torch.stack(torch._foreach_norm(each, 2, dtype=torch.float32)) for each in alike]
    return torch.cat(norms).double().square().sum()
