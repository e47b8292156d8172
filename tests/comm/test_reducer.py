"""Each rank's summed gradients against those of one process that saw every rank's samples."""

import pytest
import torch
from torch import nn

from lockstep.comm.cost import Choice
from lockstep.comm.fusion import ReductionPlan, plan_buffers
from lockstep.comm.hybrid import FLAT, Hybrid
from lockstep.comm.reducer import Reducer, allocate_gradients
from lockstep.comm.topology import find_topology
from lockstep.comm.wire import Wire
from lockstep.comm.world import World
from lockstep.layout import plan_layout
from lockstep.optim.groups import describe_parameters
from lockstep.optim.storage import build_weights, mixed_views
from tests.ranks import run_ranks, world_of_one


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Conv2d(7, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4 * 4, 3)
    )


def samples(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def reduce_once(
    world: World,
    shares: list[int],
    threshold: float,
    overlap: bool,
    passes: int = 1,
    choice: Choice = FLAT,
    late: bool = False,
) -> tuple[dict[str, torch.Tensor], float]:
    model = build_network()
    layout = plan_layout(describe_parameters(model))
    build_weights(model, layout, world.device)
    gradients = allocate_gradients(layout.numel, world.device)
    parameters = dict(model.named_parameters())
    slots = mixed_views(*gradients, layout)
    buffers = plan_buffers(layout, threshold)
    plan = ReductionPlan(buffers, (choice,) * len(buffers), overlap)
    hybrid = None
    if world.size > 1:
        hybrid = Hybrid(find_topology(["here"] * world.size), world.rank, world.device, Wire())
        hybrid.prepare(plan.choices)
    reducer = Reducer(
        [parameters[slot.name] for slot in layout.slots],
        gradients,
        slots,
        plan,
        start=hybrid.start if hybrid else None,
    )
    reducer.copies_late |= late
    start = sum(shares[: world.rank])
    own = samples(sum(shares))[start : start + shares[world.rank]]
    for _ in range(2):  # the second step must not remember the first
        reducer.begin()
        reducer.side[0] = world.rank + 1
        chunks = own.chunk(passes) if len(own) else ()
        for index, chunk in enumerate(chunks):
            loss = model(chunk).square().sum() / sum(shares)
            if index == len(chunks) - 1:
                reducer.arm()
            loss.backward()
        reducer.finish()
    named = {slot.name: view.clone() for slot, view in zip(layout.slots, slots, strict=True)}
    return named, reducer.side[0].item()


def expected(count: int) -> dict[str, torch.Tensor]:
    model = build_network()
    (model(samples(count)).square().sum() / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("shares", "threshold", "overlap", "passes"),
    [
        ([4, 4], 1.0, True, 1),  # a buffer per slot
        ([5, 2], 1e9, True, 2),  # one buffer, several passes
        ([3, 0, 4], 500.0, True, 1),  # a rank with no samples
        ([1, 2, 3, 1], 500.0, False, 1),
    ],
)
def test_the_sum_over_uneven_shares_is_the_gradient_of_the_global_mean(
    shares: list[int], threshold: float, overlap: bool, passes: int
) -> None:
    oracle = expected(sum(shares))
    results = run_ranks(reduce_once, len(shares), shares, threshold, overlap, passes)
    for named, votes in results:
        assert votes == sum(range(1, len(shares) + 1))
        for name, gradient in oracle.items():
            torch.testing.assert_close(named[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", [Choice("doubling"), Choice("hierarchical", 2), Choice("torus", 2)], ids=str)
def test_any_choice_of_algorithm_gives_the_same_sum(choice: Choice) -> None:
    shares = [2, 1, 3]
    oracle = expected(sum(shares))
    for named, votes in run_ranks(reduce_once, 3, shares, 500.0, True, 1, choice):
        assert votes == 6
        for name, gradient in oracle.items():
            torch.testing.assert_close(named[name], gradient, rtol=1e-5, atol=1e-6)


def test_every_rank_holds_bit_identical_sums() -> None:
    (first, _), (second, _) = run_ranks(reduce_once, 2, [3, 4], 500.0, True)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_rank_needs_no_group() -> None:
    named, _ = reduce_once(world_of_one(), [6], 1.0, True)
    for name, gradient in expected(6).items():
        torch.testing.assert_close(named[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_copied_all_at_once_are_the_same(passes: int) -> None:
    named, _ = reduce_once(world_of_one(), [6], 1.0, False, passes, late=True)
    for name, gradient in expected(6).items():
        torch.testing.assert_close(named[name], gradient, rtol=1e-5, atol=1e-6)
