"""A node's shared memory: right sums for uneven nodes and odd sizes, and an error where a rank does not come."""

import multiprocessing
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import window as module
from lockstep.comm.allreduce import ALGORITHMS, build_groups
from lockstep.comm.window import open_window
from lockstep.comm.world import World
from tests.ranks import run_ranks

Nodes = Sequence[Sequence[int]]


def draw(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, whose sums are exact in every precision."""
    return torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def sum_through_windows(world: World, nodes: Nodes) -> list[str]:
    """What went wrong at any size, algorithm and precision."""
    module.SEGMENT_BYTES = 4096  # so that some buffers go in turns
    groups = build_groups(nodes, world.rank, nodes=nodes, timeout_s=60)
    wrong = [] if groups.is_windowed else ["no window"]
    for numel in (0, 1, 2, 7, 1000, 5003):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            expected = sum(draw(rank, numel, dtype) for rank in range(world.size))
            for name in ("hierarchical", "torus"):
                found = draw(world.rank, numel, dtype)
                ALGORITHMS[name](found, groups)
                wrong += [] if torch.equal(found, expected) else [f"{name} {numel} {dtype}"]
    return wrong


@pytest.mark.parametrize(
    "nodes", [((0, 1),), ((0, 1, 2), (3, 4)), ((0, 1, 2, 3), (4,)), ((0, 2), (1, 3), (4, 5, 6))], ids=str
)
def test_sums_through_shared_memory_are_right(nodes: Nodes) -> None:
    assert run_ranks(sum_through_windows, sum(len(node) for node in nodes), nodes) == [[]] * sum(map(len, nodes))


def sum_twice(world: World) -> tuple[list[torch.Tensor], torch.Tensor]:
    nodes = ((0, 1, 2), (3, 4))
    groups = build_groups(nodes, world.rank, nodes=nodes)
    start = torch.randn(10007, generator=torch.Generator().manual_seed(world.rank))
    sums = []
    for turn in range(4):
        buffer = start.clone()
        time.sleep(0.02 * ((world.rank + turn) % 3))  # come late by turns
        ALGORITHMS["torus"](buffer, groups)
        sums.append(buffer)
    return sums, start


def test_sums_are_the_same_bits_on_every_rank_whoever_comes_late() -> None:
    answers = run_ranks(sum_twice, 5)
    first = answers[0][0][0]
    exact = torch.stack([start for _, start in answers]).double().sum(dim=0)
    torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5)
    for sums, _ in answers:
        assert all(torch.equal(found, first) for found in sums)


def test_other_groups_than_the_nodes_go_by_messages() -> None:
    assert run_ranks(is_windowed_by_group_size, 4) == [(True, False)] * 4


def is_windowed_by_group_size(world: World) -> tuple[bool, bool]:
    nodes = ((0, 1), (2, 3))
    own = build_groups(nodes, world.rank, nodes=nodes)
    return own.is_windowed, build_groups(((0, 1, 2, 3),), world.rank, share=own).is_windowed


def sum_in_parts_of_uneven_nodes(world: World) -> list[str]:
    """Groups of two, of which one is a whole node and the others are not."""
    module.SEGMENT_BYTES = 4096
    nodes = ((0, 1, 2), (3, 4))
    own = build_groups(nodes, world.rank, nodes=nodes, timeout_s=60)
    groups = build_groups(((0, 1), (2,), (3, 4)), world.rank, share=own)
    wrong = ["a window"] if groups.is_windowed else []
    for name in ("hierarchical", "torus"):
        found = draw(world.rank, 5003, torch.float32)  # longer than a segment
        ALGORITHMS[name](found, groups)
        expected = sum(draw(rank, 5003, torch.float32) for rank in range(world.size))
        wrong += [] if torch.equal(found, expected) else [name]
    return wrong


def test_groups_of_which_some_are_nodes_cut_long_buffers_alike() -> None:
    assert run_ranks(sum_in_parts_of_uneven_nodes, 5) == [[]] * 5


def open_where_one_node_cannot(world: World) -> bool:
    if world.rank == 2:
        del os.memfd_create  # as on a system that has none
    return open_window(((0, 1), (2, 3)), world.rank, 60) is None


def test_where_one_node_cannot_share_memory_no_node_does() -> None:
    assert run_ranks(open_where_one_node_cannot, 4) == [True] * 4


def lose_a_rank(world: World, how: str) -> str:
    window = open_window(((0, 1, 2),), world.rank, 60)
    assert window is not None
    for line in window._lines if how == "late" else ():
        line.settimeout(1.0)
    if world.rank == 1:
        if how == "gone":
            window.close()
        else:
            dist.barrier()  # by when the others have given it up
        return ""
    with pytest.raises(RuntimeError) as caught:
        window._meet()
    if how == "gone":
        window.close()  # as a rank's end would
    else:
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(("how", "text"), [("gone", "Connection"), ("late", "Timed out")])
def test_a_rank_that_does_not_come_is_an_error_on_the_others(how: str, text: str) -> None:
    answers = run_ranks(lose_a_rank, 3, how)
    assert answers[1] == ""
    assert any(text in answer for answer in (answers[0], answers[2]))
    assert all("onnection" in answer or "imed out" in answer for answer in (answers[0], answers[2]))


NOBODY = 65534


def test_a_process_of_this_user_that_is_not_the_rank_expected_is_refused() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        assert module.is_ours(one, None)
        assert module.is_ours(one, frozenset({os.getpid()}))
        assert not module.is_ours(one, frozenset({os.getpid() + 1}))


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with one, other:
        assert not module.is_ours(one, None)
        assert not module.is_ours(one, frozenset({os.getpid()}))


def knock_first(name: str, answer: Any, user: int | None) -> None:
    """As a stranger who saw the name in /proc/net/unix: call before the ranks do, and say what comes."""
    if user is not None:
        os.setuid(user)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(30)
        line.connect(name)
        answer.put(len(socket.recv_fds(line, 1, 1)[1]))


def open_beside_a_stranger(world: World, user: int | None) -> tuple[bool, int]:
    """Rank 0 lets a process that is no rank call first; how many handles it got.

    One of another user comes where ranks cannot be told by their processes, as in containers that count them apart.
    """
    if user is not None:
        module._list_pids = lambda *arguments: None
    listen, strangers = module._listen, []
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()

    def listen_and_be_called(name: str, *arguments: Any) -> socket.socket:
        listener = listen(name, *arguments)
        stranger = context.Process(target=knock_first, args=(name, answer, user))
        stranger.start()
        strangers.append(stranger)
        select.select([listener], [], [], 30)
        return listener

    module._listen = listen_and_be_called
    window = open_window(((0, 1),), world.rank, 60)
    assert window is not None
    window._meet()
    return True, answer.get() if strangers else 0


def test_a_stranger_who_calls_first_gets_no_memory_and_keeps_no_rank_out() -> None:
    assert run_ranks(open_beside_a_stranger, 2, None) == [(True, 0)] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the rights to become another user")
def test_another_user_who_calls_first_gets_no_memory() -> None:
    assert run_ranks(open_beside_a_stranger, 2, NOBODY) == [(True, 0)] * 2
