"""Every algorithm against torch.distributed's own all-reduce in FP64, over real ranks.

Ranks cost a second to start, so one start serves many cases: hypothesis runs inside the ranks, without chance, so that
all draw the same cases, and the ranks agree on each verdict, so that all see the same failure and shrink it together.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.comm import allreduce, cost
from lockstep.comm.allreduce import ALGORITHMS, Groups, build_groups, own_spans
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from tests.ranks import Backend, over_nccl, run_ranks, world_of_one

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
# Limits so low that short test buffers take the paths of long ones.
LOW_LIMITS = {"SHORT_BYTES": 64, "TWO_MASTERS_BYTES": 128, "SCRATCH_BYTES": 1024}
HOMES = {"SHORT_BYTES": allreduce, "TWO_MASTERS_BYTES": cost, "SCRATCH_BYTES": allreduce}
REAL_LIMITS = {name: getattr(home, name) for name, home in HOMES.items()}


@contextmanager
def limit(limits: dict[str, int]) -> Iterator[None]:
    """While inside, these limits hold."""
    with ExitStack() as stack:
        for name, value in limits.items():
            stack.enter_context(patch.object(HOMES[name], name, value))
        yield


def fill(numel: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def cut(size: int, cuts: Sequence[int]) -> list[list[int]]:
    """Consecutive ranks with a new group at each of `cuts`."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < size}), size]
    return [list(range(start, end)) for start, end in itertools.pairwise(edges)]


def on_the_wire(values: Tensor) -> Tensor:
    """Where the backend's own collectives reach it: NCCL's on the GPU, Gloo's on the CPU."""
    return values.to("cuda" if dist.get_backend() == "nccl" else "cpu")


def agree(is_good: bool) -> bool:
    """Whether it is good on every rank."""
    verdict = on_the_wire(torch.tensor([int(is_good)]))
    dist.all_reduce(verdict)
    return int(verdict) == dist.get_world_size()


def check_case(
    groups: Groups, device: torch.device, numel: int, dtype: torch.dtype, margin: int, limits: dict[str, int]
) -> None:
    """Every algorithm sums a view of a larger array within rounding, the same on every rank, and touches no more."""
    before = fill(numel + 2 * margin, dtype, seed=groups.rank, device=device)
    view = slice(margin, margin + numel)
    arrays = [before.clone() for _ in ALGORITHMS]
    with limit(limits):
        for algorithm, array in zip(ALGORITHMS.values(), arrays, strict=True):
            algorithm(array[view], groups)
    results = torch.stack([array[view] for array in arrays]).cpu()
    for array in arrays:
        array[view] = before[view]

    exact = before[view].cpu().double()
    sums = on_the_wire(torch.stack([exact, exact.abs()]))
    dist.all_reduce(sums)
    sums = sums.cpu()
    first = on_the_wire(results.clone().view(torch.uint8))
    dist.broadcast(first, src=0)
    # Each addition rounds once, by at most half an epsilon of the sum of magnitudes.
    bound = groups.num_ranks * torch.finfo(dtype).eps * sums[1] + 1e-6
    close = ((results.double() - sums[0]).abs() <= bound).all(dim=1)
    failed = [name for name, is_close in zip(ALGORITHMS, close.tolist(), strict=True) if not is_close]
    assert agree(not failed), f"wrong sums on this or another rank: {failed}"
    assert agree(torch.equal(first.cpu(), results.view(torch.uint8))), (
        "not the same bits as rank 0 on this or another rank"
    )
    assert agree(all(torch.equal(array, before) for array in arrays)), "an element outside the buffer was changed"


def check_many(world: World, num_cases: int) -> None:
    shared = build_groups([list(range(world.size))], world.rank)

    @settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(
        numel=st.one_of(st.sampled_from([0, 1, 2, world.size - 1, world.size + 1]), st.integers(0, 3000)),
        dtype=st.sampled_from(DTYPES),
        cuts=st.one_of(
            st.lists(st.integers(1, world.size), max_size=world.size),
            st.integers(1, world.size).map(lambda size: list(range(0, world.size, size))),
        ),
        margin=st.integers(0, 9),
        is_long=st.booleans(),
    )
    def check(numel: int, dtype: torch.dtype, cuts: list[int], margin: int, is_long: bool) -> None:
        groups = build_groups(cut(world.size, cuts), world.rank, share=shared)
        check_case(groups, world.device, numel, dtype, margin, LOW_LIMITS if is_long else REAL_LIMITS)

    check()


@pytest.mark.parametrize(
    ("backend", "size"),
    [*(("gloo", size) for size in (2, 3, 4, 5, 6, 7, 8, 9, 12, 16)), over_nccl(2), over_nccl(4)],
)
def test_every_algorithm_sums_like_torch_and_the_same_on_every_rank(backend: Backend, size: int) -> None:
    run_ranks(check_many, size, 30 if size < 8 else 10, backend=backend)


@pytest.mark.gpu
def test_a_gpus_memory_is_summed_over_gloo() -> None:
    run_ranks(check_many, 3, 10)  # where there is a GPU, a rank's device is one


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_world_of_one_keeps_its_values(name: str) -> None:
    world = world_of_one()
    for numel in (0, 1, 1000):
        buffer = fill(numel, torch.float32, seed=1, device=CPU)
        before = buffer.clone()
        ALGORITHMS[name](buffer, build_groups([[0]], world.rank))
        assert torch.equal(buffer, before)


def sum_real_sizes(world: World) -> None:
    """Sizes on both sides of the real limits."""
    groups = build_groups(cut(world.size, [3]), world.rank)
    for numel in (64 * 1024, 64 * 1024 + 1, 1024 * 1024 + 3):
        check_case(groups, world.device, numel, torch.float32, 1, REAL_LIMITS)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 5), over_nccl(4)])
def test_long_buffers_are_summed_under_the_real_limits(backend: Backend, size: int) -> None:
    run_ranks(sum_real_sizes, size, backend=backend)


def sum_with_delays(world: World) -> list[bytes]:
    """Every algorithm's result in three runs: the first undisturbed, the others with pauses between messages."""
    groups = build_groups(cut(world.size, [3]), world.rank)
    post = allreduce.post

    def pause_and_post(*arguments: Any) -> Any:
        time.sleep(random.random() * 0.004)  # other pauses on every rank and in every run
        return post(*arguments)

    results = []
    for run, name in itertools.product(range(3), ALGORITHMS):
        buffer = fill(2001, torch.float16, seed=world.rank, device=world.device)
        with limit(LOW_LIMITS), patch.object(allreduce, "post", pause_and_post if run else post):
            ALGORITHMS[name](buffer, groups)
        results.append(buffer.cpu().numpy().tobytes())
    return results


@pytest.mark.parametrize(("backend", "size"), [("gloo", 5), over_nccl(4)])
def test_the_result_does_not_depend_on_timing(backend: Backend, size: int) -> None:
    first, *others = run_ranks(sum_with_delays, size, backend=backend)
    num_algorithms = len(ALGORITHMS)
    undisturbed = first[:num_algorithms]
    assert first == undisturbed * 3
    assert all(other == first for other in others)


def count_messages(world: World, name: str) -> int:
    num_sent = 0
    post = allreduce.post

    def count_and_post(sends: Sequence[Any], receives: Sequence[Any], groups: Groups) -> Any:
        nonlocal num_sent
        num_sent += len(sends)
        return post(sends, receives, groups)

    groups = build_groups(cut(world.size, [4]), world.rank)
    with patch.object(allreduce, "post", count_and_post):
        ALGORITHMS[name](torch.ones(100), groups)
    return num_sent


def test_hierarchical_sends_each_short_message_once_up_and_once_down() -> None:
    # Two groups of four: three up and three down in each, and one swap between the two masters.
    assert sum(run_ranks(count_messages, 8, "hierarchical")) == 2 * (3 + 3) + 2


@pytest.mark.parametrize("groups", [[], [[0], [0]], [[1]], [[0, 1]]])
def test_groups_that_do_not_hold_every_rank_once_are_a_sentence(groups: list[list[int]]) -> None:
    with pytest.raises(LockstepError, match="each of the 1 ranks once"):
        build_groups(groups, 0)


@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 12))
def test_spans_tile_the_buffer_in_member_order(numel: int, num_members: int, num_pieces: int) -> None:
    spans = own_spans(torch.arange(numel), range(num_members), num_pieces)
    assert torch.cat(list(spans.values())).tolist() == list(range(numel))
    assert list(spans) == sorted(spans)
    assert len(spans) == min(num_members, num_pieces)
