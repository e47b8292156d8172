"""Sums a buffer over all ranks in place (step 7 on the walk): flat, hierarchical, torus, doubling, with one signature.

All but `flat` are built from messages between pairs of ranks, the same code over Gloo and NCCL. Additions happen in a
fixed order, so every rank gets the same bits, every time. On a CPU shared by many ranks the number of messages is the
cost of a short buffer: a ring sends 2p(p-1) of them, `hierarchical` about 2p. The three phases are those of Jia et al.
2018 (arXiv 1807.11205).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.cost import SHORT_BYTES, count_pieces
from lockstep.comm.window import Window, open_window
from lockstep.errors import LockstepError

SCRATCH_BYTES = 64 * 1024 * 1024  # longer buffers go in turns, so that a rank's scratch stays within about this


class Scratch:
    """Memory that calls reuse, by purpose, grown to the largest; calls at the same time need one each."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised array, valid until the next call for the same purpose."""
        num_bytes = numel * dtype.itemsize
        array = self._arrays.get((purpose, device))
        if array is None or array.numel() < num_bytes:
            array = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._arrays[purpose, device] = array
        return array[:num_bytes].view(dtype)


@dataclass(frozen=True)
class Groups:
    """All ranks divided into groups, and what carries their messages; for one channel, not two at a time."""

    rank: int
    members: tuple[tuple[int, ...], ...]
    process_group: dist.ProcessGroup | None  # of all ranks, for these messages alone; None in a world of one
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    window: Window | None = field(default=None, repr=False)  # inside this rank's node, where ranks can have one
    nodes: tuple[tuple[int, ...], ...] = ()  # that windows were opened in

    @property
    def num_ranks(self) -> int:
        return sum(len(group) for group in self.members)

    @property
    def own(self) -> tuple[int, ...]:
        """The group this rank is in; its first member is the master."""
        return next(group for group in self.members if self.rank in group)

    @property
    def largest(self) -> int:
        return max(len(group) for group in self.members)

    @property
    def is_windowed(self) -> bool:
        """Whether groups move their bytes through memory in common: all of them or none, as all cut buffers alike."""
        return self.window is not None and set(self.members) <= set(self.nodes)


Algorithm = Callable[[Tensor, Groups], None]


def build_groups(
    groups: Sequence[Sequence[int]],
    rank: int,
    *,
    nodes: Sequence[Sequence[int]] = (),
    share: Groups | None = None,
    timeout_s: float | None = None,
) -> Groups:
    """Divide all ranks into `groups`; every rank calls it, in the same order.

    A process group of its own keeps the messages apart from collectives that other threads start; `share` takes that
    of groups built before, and their scratch and window, for use in turns. Groups that are one of the `nodes` each
    move their bytes through memory in common, where they can.
    """
    members = tuple(tuple(group) for group in groups if group)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if sorted(member for group in members for member in group) != list(range(num_ranks)):
        raise LockstepError(f"The groups {members} must hold each of the {num_ranks} ranks once; plan them again.")
    if share is not None:
        return Groups(rank, members, share.process_group, share.scratch, share.window, share.nodes)
    if num_ranks == 1:
        return Groups(rank, members, None)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    process_group = dist.new_group(timeout=timeout)
    # NCCL wants all ranks in a communicator's first call; the messages later involve only some.
    dist.barrier(process_group)
    window = None
    if dist.get_backend(process_group) == "gloo" and any(len(node) > 1 for node in nodes):
        window = open_window(nodes, rank, timeout_s)
    return Groups(rank, members, process_group, window=window, nodes=tuple(map(tuple, nodes)))


def flat(buffer: Tensor, groups: Groups) -> None:
    """The backend's own all-reduce."""
    if groups.num_ranks > 1 and buffer.numel():
        dist.all_reduce(buffer, group=groups.process_group)


def hierarchical(buffer: Tensor, groups: Groups) -> None:
    """Reduce inside each group to its master, all-reduce among masters, broadcast inside each group.

    A long buffer has two halves with a master each, so that not all but one wait.
    """
    _sum_by_pieces(buffer, count_pieces("hierarchical", buffer.nbytes, groups.largest), groups)


def torus(buffer: Tensor, groups: Groups) -> None:
    """Reduce-scatter inside each group, all-reduce of each piece across groups, all-gather inside each group."""
    _sum_by_pieces(buffer, count_pieces("torus", buffer.nbytes, groups.largest), groups)


def doubling(buffer: Tensor, groups: Groups) -> None:
    """Recursive doubling of a short buffer, halving and doubling of a long one, over all ranks."""
    with reach(buffer, groups) as reachable:
        if reachable.numel():
            _sum_among(reachable, [rank for group in groups.members for rank in group], groups)


ALGORITHMS: dict[str, Algorithm] = {
    "flat": flat,
    "hierarchical": hierarchical,
    "torus": torus,
    "doubling": doubling,
}


def _sum_by_pieces(buffer: Tensor, num_pieces: int, groups: Groups) -> None:
    """Give each piece to its owner in the group, sum it among the owners in all groups, and give the sum back.

    Owners are spread over the group; in a group with fewer members than pieces a member owns several.
    """
    columns = [[group[piece * len(group) // num_pieces] for group in groups.members] for piece in range(num_pieces)]
    spans = partial(own_spans, members=groups.own, num_pieces=num_pieces)
    window = groups.window if groups.is_windowed else None
    largest_bytes = window.segment_bytes if window else SCRATCH_BYTES * num_pieces // groups.largest
    with reach(buffer, groups) as reachable:
        for part in _cut(reachable, largest_bytes):
            works: Sequence[dist.Work] = []
            if window:
                window.reduce_scatter(part, spans)
            else:
                works = reduce_scatter(spans(part), spans(part).get(groups.rank, part[:0]), groups.own, groups)
            # In the order of pieces on every rank, so that no two wait for each other.
            for piece, column in zip(_split(part, num_pieces), columns, strict=True):
                if groups.rank in column and piece.numel():
                    _sum_among(piece, column, groups)
            if window:
                window.all_gather(part, spans)
            else:
                wait([*works, *all_gather(spans(part), groups.own, groups)])


def own_spans(buffer: Tensor, members: Sequence[int], num_pieces: int) -> dict[int, Tensor]:
    """What each member owns of `num_pieces` equal pieces: a contiguous span, as the pieces of one lie side by side."""
    spans: dict[int, Tensor] = {}
    start = 0
    for piece in range(num_pieces):
        owner = members[piece * len(members) // num_pieces]
        end = buffer.numel() * (piece + 1) // num_pieces
        start = start if owner in spans else buffer.numel() * piece // num_pieces
        spans[owner] = buffer[start:end]
    return spans


def reduce_scatter(
    spans: Mapping[int, Tensor], total: Tensor, members: Sequence[int], groups: Groups
) -> Sequence[dist.Work]:
    """Send each owner its span and add all members' versions of this rank's own to `total`, in member order.

    The works returned are those still to be waited for: Gloo hangs when one is waited for twice.
    """
    peers = [member for member in members if member != groups.rank]
    span = spans.get(groups.rank, total[:0])
    parts = _take_parts("scatter", len(peers), span, groups) if span.numel() else []
    sends = [(spans[peer], peer) for peer in _rotate(peers, groups.rank) if peer in spans]
    works = post(sends, list(zip(parts, peers, strict=False)), groups)
    for part, work in zip(parts, works, strict=False):
        work.wait()
        total.add_(part)
    return works[len(parts) :]


def all_gather(spans: Mapping[int, Tensor], members: Sequence[int], groups: Groups) -> Sequence[dist.Work]:
    """Send this rank's span, if it owns one, to every other member, and start to fill theirs."""
    peers = _rotate([member for member in members if member != groups.rank], groups.rank)
    sends = [(spans[groups.rank], peer) for peer in peers] if groups.rank in spans else []
    return post(sends, [(span, owner) for owner, span in spans.items() if owner != groups.rank], groups)


def post(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], groups: Groups
) -> Sequence[dist.Work]:
    """Start messages to and from ranks; one work for each that is not empty, the receives first.

    Gloo moves the messages of several batches at the same time, NCCL one batch after the other: the order of batches
    must make sense even if each waited for its end.
    """
    group = groups.process_group
    receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
    sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
    if group is None or not (receives or sends):
        return []
    if dist.get_backend(group) == "gloo":
        # Gloo holds a message back until its receive is known, so receives come first. Called without the layers
        # above, which were 8 to 24 % of the time of 64 KiB over 32 ranks.
        works = [group.recv([tensor], peer, 0) for tensor, peer in receives]
        return works + [group.send([tensor], peer, 0) for tensor, peer in sends]
    moves = [(dist.irecv, *receive) for receive in receives] + [(dist.isend, *send) for send in sends]
    works = dist.batch_isend_irecv([dist.P2POp(move, tensor, peer, group) for move, tensor, peer in moves])
    return works * (len(moves) // len(works))  # NCCL answers a batch with one work


@contextmanager
def reach(buffer: Tensor, groups: Groups) -> Iterator[Tensor]:
    """The buffer, or its copy on the host where the backend's messages cannot read a GPU's memory."""
    if groups.process_group is None or not buffer.is_cuda or dist.get_backend(groups.process_group) != "gloo":
        yield buffer
        return
    host = groups.scratch.take("host", buffer.numel(), buffer.dtype, torch.device("cpu"))
    host.copy_(buffer)
    yield host
    buffer.copy_(host)


def _sum_among(buffer: Tensor, ranks: Sequence[int], groups: Groups) -> None:
    """All-reduce among `ranks`; those beyond a power of two fold into a neighbour and get the sum back."""
    power = 1 << (len(ranks).bit_length() - 1)
    num_folded = 2 * (len(ranks) - power)
    index = ranks.index(groups.rank)
    if index < num_folded and index % 2:
        wait(post([(buffer, ranks[index - 1])], [], groups))
        wait(post([], [(buffer, ranks[index - 1])], groups))
        return
    if index < num_folded:
        _swap_and_add(buffer[:0], buffer, ranks[index + 1], groups)
    active = [*ranks[:num_folded:2], *ranks[num_folded:]]
    if buffer.nbytes <= SHORT_BYTES:
        _double(buffer, active, groups)
    else:
        _halve_and_double(buffer, active, groups)
    if index < num_folded:
        wait(post([(buffer, ranks[index + 1])], [], groups))


def _double(buffer: Tensor, ranks: Sequence[int], groups: Groups) -> None:
    """Swap whole buffers with partners at distance 1, 2, 4, …; a + b = b + a keeps both the same to the bit."""
    index = ranks.index(groups.rank)
    for distance in _powers_below(len(ranks)):
        _swap_and_add(buffer, buffer, ranks[index ^ distance], groups)


def _halve_and_double(buffer: Tensor, ranks: Sequence[int], groups: Groups) -> None:
    """Give half of what is left to a partner until each rank owns one piece, then the same way back.

    The nearest partner comes first: the long messages stay inside the node.
    """
    index = ranks.index(groups.rank)
    steps: list[tuple[Tensor, Tensor, int]] = []
    for distance in _powers_below(len(ranks)):
        middle = buffer.numel() // 2
        lower, upper = buffer[:middle], buffer[middle:]
        keep, give = (upper, lower) if index & distance else (lower, upper)
        partner = ranks[index ^ distance]
        _swap_and_add(give, keep, partner, groups)
        steps.append((keep, give, partner))
        buffer = keep
    for keep, give, partner in reversed(steps):
        wait(post([(keep, partner)], [(give, partner)], groups))


def _swap_and_add(give: Tensor, keep: Tensor, partner: int, groups: Groups) -> None:
    """Send `give` and add what comes back to `keep`."""
    (part,) = _take_parts("swap", 1, keep, groups)
    wait(post([(give, partner)], [(part, partner)], groups))
    keep.add_(part)


def _take_parts(purpose: str, count: int, like: Tensor, groups: Groups) -> list[Tensor]:
    """Scratch for `count` messages of the size of `like`."""
    size = like.numel()
    array = groups.scratch.take(purpose, count * size, like.dtype, like.device)
    return [array[index * size : (index + 1) * size] for index in range(count)]


def _cut(buffer: Tensor, largest_bytes: int) -> list[Tensor]:
    """As few equal parts as are no larger than about `largest_bytes`; none of an empty buffer."""
    return _split(buffer, -(-buffer.nbytes // largest_bytes))


def _split(buffer: Tensor, count: int) -> list[Tensor]:
    edges = [buffer.numel() * index // count for index in range(count + 1)] if count else []
    return [buffer[start:end] for start, end in itertools.pairwise(edges)]


def _rotate(peers: Sequence[int], rank: int) -> list[int]:
    """Those after this rank first, so that not all ranks send to the same one at the same time."""
    return sorted(peers, key=lambda peer: (peer < rank, peer))


def _powers_below(limit: int) -> list[int]:
    return [1 << exponent for exponent in range((limit - 1).bit_length())]


def wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
