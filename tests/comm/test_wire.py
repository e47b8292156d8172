"""What half precision on the wire does to small, large and ordinary gradients, over four ranks.

FP16's smallest step is 2**-24, a value below half of it becomes zero, and 65504 is its largest number.
"""

import math
from itertools import product
from typing import get_args

import pytest
import torch

from lockstep.comm.allreduce import ALGORITHMS, build_groups
from lockstep.comm.wire import Wire
from lockstep.comm.world import World
from tests.ranks import Backend, over_nccl, run_ranks

DIVISIONS = ("before", "split", "fp32")
Sums = dict[tuple[str, str, str], torch.Tensor]

CASES: dict[str, tuple[float, float]] = {  # rank 0's gradient, every other rank's
    "small": (1.5 * 2**-26, 1.5 * 2**-26),
    "smaller": (0.9 * 2**-26, 0.9 * 2**-26),
    "large sum": (12000.0, 12000.0),
    "one large": (20000.0, 0.0),
}


def sum_cases(world: World) -> Sums:
    groups = build_groups([range(2), range(2, world.size)], world.rank)
    values = {name: torch.full((5,), pair[min(world.rank, 1)], device=world.device) for name, pair in CASES.items()}
    for numel in (0, 1, 3, 1001):
        noise = torch.randn(numel, generator=torch.Generator().manual_seed(world.rank))
        values[f"random {numel}"] = noise.to(world.device)
    sums: Sums = {}
    for dtype, division, name in product(("fp32", "fp16", "bf16"), DIVISIONS, values):
        sums[dtype, division, name] = values[name].clone()
        Wire(dtype, division).sum(sums[dtype, division, name], ALGORITHMS["hierarchical"], groups)  # type: ignore[arg-type]
    sums["exact", "", "random 1001"] = values["random 1001"].double()
    torch.distributed.all_reduce(sums["exact", "", "random 1001"])
    return sums


@pytest.fixture(scope="module", params=["gloo", over_nccl()])
def by_rank(request: pytest.FixtureRequest) -> list[Sums]:
    return run_ranks(sum_cases, 4, backend=request.param)


def first(by_rank: list[Sums], dtype: str, division: str, case: str) -> float:
    values = by_rank[0][dtype, division, case]
    assert len(values.unique()) == 1  # the same whichever rank adds it up
    return float(values[0])


@pytest.mark.parametrize(("division", "survives"), [("before", False), ("split", True), ("fp32", True)])
def test_small_gradients_flush_to_zero_unless_scaled_up(by_rank: list[Sums], division: str, survives: bool) -> None:
    assert (first(by_rank, "fp16", division, "small") > 0) == survives


@pytest.mark.parametrize(("division", "survives"), [("before", False), ("split", False), ("fp32", True)])
def test_smaller_gradients_need_the_whole_scale(by_rank: list[Sums], division: str, survives: bool) -> None:
    assert (first(by_rank, "fp16", division, "smaller") > 0) == survives


@pytest.mark.parametrize(("division", "survives"), [("before", True), ("split", False), ("fp32", True)])
def test_a_scaled_sum_overflows_unless_added_in_fp32(by_rank: list[Sums], division: str, survives: bool) -> None:
    value = first(by_rank, "fp16", division, "large sum")
    assert value == (48000.0 if survives else math.inf)


@pytest.mark.parametrize(("division", "survives"), [("before", True), ("split", True), ("fp32", False)])
def test_one_large_gradient_overflows_the_whole_scale(by_rank: list[Sums], division: str, survives: bool) -> None:
    value = first(by_rank, "fp16", division, "one large")
    assert value == (20000.0 if survives else math.inf)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("case", CASES)
def test_bf16_has_the_range_of_fp32(by_rank: list[Sums], division: str, case: str) -> None:
    exact = CASES[case][0] + 3 * CASES[case][1]
    assert first(by_rank, "bf16", division, case) == pytest.approx(exact, rel=2**-6)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_additions_in_fp32_leave_the_smallest_error(by_rank: list[Sums], dtype: str) -> None:
    exact = by_rank[0]["exact", "", "random 1001"]
    errors = {division: float((by_rank[0][dtype, division, "random 1001"] - exact).norm()) for division in DIVISIONS}
    assert 0 < errors["fp32"] < min(errors["before"], errors["split"])


def test_fp32_travels_as_it_is(by_rank: list[Sums]) -> None:
    for division in DIVISIONS:
        torch.testing.assert_close(
            by_rank[0]["fp32", division, "random 1001"].double(),
            by_rank[0]["exact", "", "random 1001"],
            rtol=1e-5,
            atol=1e-6,
        )


def test_every_rank_gets_the_same_bits(by_rank: list[Sums]) -> None:
    for key, value in by_rank[0].items():
        for other in by_rank[1:]:
            assert torch.equal(other[key], value), key


def test_the_divisions_tested_are_all_there_are() -> None:
    assert get_args(Wire.__init__.__annotations__["division"]) == DIVISIONS


def sum_halves(world: World) -> list[torch.Tensor]:
    groups = build_groups([range(world.size)], world.rank)
    dtypes = (torch.float16, torch.bfloat16)
    buffers = [torch.full((3,), 0.1 + world.rank, dtype=dtype, device=world.device) for dtype in dtypes]
    for buffer in buffers:
        Wire("fp16", "split").sum(buffer, ALGORITHMS["doubling"], groups)
    return buffers


@pytest.mark.parametrize("backend", ["gloo", over_nccl()])
def test_half_buffers_travel_as_they_are(backend: Backend) -> None:
    for buffers in run_ranks(sum_halves, 2, backend=backend):
        for buffer in buffers:
            expected = torch.tensor(0.1, dtype=buffer.dtype) + torch.tensor(1.1, dtype=buffer.dtype)
            assert buffer.tolist() == [float(expected)] * 3
