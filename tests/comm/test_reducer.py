"""Each rank's summed gradients against those of one process that saw every rank's samples."""

import gc
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.comm.channel import Pending
from lockstep.comm.cost import FLAT, Choice
from lockstep.comm.fusion import ReductionPlan, add_tail, plan_buffers
from lockstep.comm.hybrid import Hybrid
from lockstep.comm.reducer import Landing, Reducer, allocate_gradients
from lockstep.comm.topology import find_topology
from lockstep.comm.wire import Wire
from lockstep.comm.world import World
from lockstep.layout import plan_layout
from lockstep.optim.groups import describe_parameters
from lockstep.optim.storage import build_weights, mixed_views
from tests.ranks import Backend, over_nccl, run_ranks, world_of_one


def build_network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    # By its running statistics, which do not depend on the shares.
    middle = nn.BatchNorm2d(7).eval() if norm else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(3, 7, 3), middle, nn.ReLU(), nn.Conv2d(7, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4 * 4, 3)
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
    dtype: torch.dtype = torch.float32,
    landing: Landing | None = None,
) -> tuple[dict[str, torch.Tensor], float]:
    model = build_network(norm=dtype != torch.float32)
    layout = plan_layout(describe_parameters(model, half=dtype != torch.float32))
    build_weights(model, layout, world.device, dtype)
    gradients = allocate_gradients(layout.numel, world.device, split=layout.split, dtype=dtype)
    parameters = dict(model.named_parameters())
    slots = mixed_views(*gradients, layout)
    buffers = add_tail(layout, plan_buffers(layout.head, threshold, layout.head_element_bytes))
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
        landing=landing,
    )
    start = sum(shares[: world.rank])
    own = samples(sum(shares))[start : start + shares[world.rank]]
    for _ in range(2):  # the second step must not remember the first
        reducer.begin()
        reducer.side[0] = world.rank + 1
        chunks = own.chunk(passes) if len(own) else ()
        for index, chunk in enumerate(chunks):
            loss = model(chunk.to(dtype)).float().square().sum() / sum(shares)
            if index == len(chunks) - 1:
                reducer.arm()
            loss.backward()
        reducer.finish()
    if isinstance(reducer.gradients, list):
        slots = [
            g.view(view.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2) if view.dim() == 4 else g.view_as(view)
            for g, view in zip(reducer.gradients, slots, strict=True)
        ]
    named = {slot.name: view.clone() for slot, view in zip(layout.slots, slots, strict=True)}
    return named, reducer.side[0].item()


def expected(count: int, norm: bool = False) -> dict[str, torch.Tensor]:
    model = build_network(norm)
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


@pytest.mark.parametrize("passes", [1, 3])
def test_one_rank_needs_no_group(passes: int) -> None:
    named, _ = reduce_once(world_of_one(), [6], 1.0, True, passes)
    for name, gradient in expected(6).items():
        torch.testing.assert_close(named[name], gradient, rtol=1e-5, atol=1e-6)


def build_alone(model: nn.Module) -> tuple[Reducer, list[str]]:
    """The reducer of a CPU alone in the world, and the names of its slots."""
    layout = plan_layout(describe_parameters(model))
    build_weights(model, layout, "cpu")
    gradients = allocate_gradients(layout.numel, torch.device("cpu"))
    own = dict(model.named_parameters())
    buffers = add_tail(layout, plan_buffers(layout.head, 1.0, 4))
    plan = ReductionPlan(buffers, (FLAT,) * len(buffers), overlap=True)
    names = [slot.name for slot in layout.slots]
    return Reducer([own[name] for name in names], gradients, mixed_views(*gradients, layout), plan), names


def test_a_closed_reducer_leaves_no_memory_behind() -> None:
    model = nn.Linear(3, 2)
    reducer, _ = build_alone(model)
    model(torch.ones(1, 3)).sum().backward()
    left = weakref.ref(reducer)
    reducer.close()
    del reducer, model
    gc.collect()
    assert left() is None


def test_alone_on_a_cpu_gradients_stay_where_backward_left_them() -> None:
    model = nn.Linear(3, 2)
    reducer, names = build_alone(model)
    for step in (1.0, 2.0):
        reducer.begin()
        reducer.arm()
        (step * model.bias.sum()).backward()  # the weights have no gradient
        reducer.finish()
        found = dict(zip(names, reducer.gradients, strict=True))
        assert found["bias"].data_ptr() == model.bias.grad.data_ptr()  # type: ignore[union-attr]
        assert found["bias"].tolist() == [step, step]
        assert found["weight"].tolist() == [0.0] * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choice", [FLAT, Choice("doubling"), Choice("torus", 2)], ids=str)
def test_half_and_fp32_gradients_travel_in_their_own_format(dtype: torch.dtype, choice: Choice) -> None:
    shares = [2, 0, 3]
    oracle = expected(sum(shares), norm=True)
    (first, votes), *others = run_ranks(reduce_once, 3, shares, 300.0, True, 1, choice, dtype)
    assert votes == 6
    assert {name for name, gradient in first.items() if gradient.dtype == torch.float32} == {"1.weight", "1.bias"}
    for name, gradient in oracle.items():
        tolerance = 2e-3 if dtype == torch.float16 else 2e-2
        error = torch.linalg.norm(first[name].float() - gradient) / torch.linalg.norm(gradient)
        assert error < tolerance, (name, error)
        assert all(torch.equal(first[name], other[name]) for other, _ in others)


@pytest.mark.parametrize(("shares", "overlap"), [([4], True), ([3, 2], False), ([3, 2], True), ([3, 0], True)])
def test_gradients_moved_by_buffer_are_the_same(shares: list[int], overlap: bool) -> None:
    late = run_ranks(reduce_once, len(shares), shares, 500.0, overlap, 2, FLAT, torch.float16, "by buffer")
    soon = run_ranks(reduce_once, len(shares), shares, 500.0, overlap, 2, FLAT, torch.float16, "at once")
    for (found, votes), (wanted, _) in zip(late, soon, strict=True):
        assert votes == sum(range(1, len(shares) + 1))
        assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), over_nccl(2), over_nccl(4)])
def test_side_numbers_travel_in_fp32_whatever_the_wire(backend: Backend, size: int) -> None:
    """A count of 60,000 on every rank adds up to more than FP16 can hold; digits beyond 2,048 would be rounded."""
    for sums in run_ranks(reduce_counts, size, backend=backend):
        assert sums == [60_001.0 * size] * 6


def reduce_counts(world: World) -> list[float]:
    found = []
    for dtype in ("fp16", "bf16"):
        for division in ("before", "split", "fp32"):
            reducer, model, hybrid = build_among(world, Wire(dtype, division))  # type: ignore[arg-type]
            reducer.begin()
            reducer.side[0] = 60_001.0
            reducer.arm()
            model(samples(2).to(world.device)).square().sum().backward()
            reducer.finish()
            found.append(reducer.side[0].item())
            assert all(torch.isfinite(array).all() for array in reducer.flat)
            hybrid.close()
    return found


def build_among(world: World, wire: Wire) -> tuple[Reducer, nn.Module, Hybrid]:
    """A reducer of one of several ranks, with the network it listens to."""
    model = build_network()
    layout = plan_layout(describe_parameters(model))
    build_weights(model, layout, world.device)
    gradients = allocate_gradients(layout.numel, world.device)
    buffers = add_tail(layout, plan_buffers(layout.head, 500.0, 4))
    hybrid = Hybrid(find_topology(["here"] * world.size), world.rank, world.device, wire)
    own = dict(model.named_parameters())
    reducer = Reducer(
        [own[slot.name] for slot in layout.slots],
        gradients,
        mixed_views(*gradients, layout),
        ReductionPlan(buffers, (FLAT,) * len(buffers), overlap=True),
        start=hybrid.start,
    )
    return reducer, model, hybrid


def test_a_network_without_batch_norm_still_sends_its_side_numbers() -> None:
    """All slots are half then, and the last buffer holds the side numbers alone."""
    for _, votes in run_ranks(reduce_votes, 2):
        assert votes == 3


def reduce_votes(world: World) -> tuple[None, float]:
    model = nn.Linear(4, 2)
    layout = plan_layout(describe_parameters(model, half=True))
    assert layout.split == layout.numel
    build_weights(model, layout, world.device, torch.float16)
    gradients = allocate_gradients(layout.numel, world.device, split=layout.split, dtype=torch.float16)
    buffers = add_tail(layout, plan_buffers(layout.head, 1.0, 2))
    hybrid = Hybrid(find_topology(["here"] * world.size), world.rank, world.device, Wire())
    parameters = dict(model.named_parameters())
    reducer = Reducer(
        [parameters[slot.name] for slot in layout.slots],
        gradients,
        mixed_views(*gradients, layout),
        ReductionPlan(buffers, (FLAT,) * len(buffers), overlap=True),
        start=hybrid.start,
    )
    reducer.begin()
    reducer.side[0] = world.rank + 1
    reducer.arm()
    model(torch.ones(3, 4).half()).float().sum().backward()
    reducer.finish()
    assert parameters["bias"].grad is None
    assert gradients[0].sum() == 2 * 3 * 2 * (4 + 1)  # ranks × samples × outputs × (weights and bias)
    return None, reducer.side[0].item()


def test_a_run_that_goes_on_names_its_steps_by_its_own_numbers() -> None:
    """Trials and earlier parts of a run do not count: the sentence on a lost rank is read beside the run's log."""
    reducer, _ = build_alone(build_network())
    notes: list[tuple[int, int]] = []
    reducer._pulse = SimpleNamespace(note=lambda *sent: notes.append(sent))  # type: ignore[assignment]
    for _ in range(5):
        reducer.begin()
    reducer.count_from(88)
    reducer.begin()
    assert reducer._step == 89
    assert notes == [(89, 0)]


class Sending(Pending):
    """Work on a device that is done when the test says so."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.through = False

    @property
    def is_done(self) -> bool:
        return self.through


def test_on_a_gpu_the_pulse_hears_of_what_is_done_and_not_of_what_is_sent() -> None:
    """The host runs ahead of its device; what it has only sent would make a lost rank look further than it is."""
    notes: list[tuple[int, int]] = []
    reducer = Reducer.__new__(Reducer)
    reducer._pulse = SimpleNamespace(note=lambda *sent: notes.append(sent))  # type: ignore[assignment]
    reducer._under_way, reducer._on_gpu = deque(), True
    sums = [Sending() for _ in range(3)]
    for number, pending in enumerate(sums):
        reducer._sums = [pending]
        reducer._note_progress((0, number + 1))
    assert notes == []
    sums[0].through = sums[2].through = True
    reducer._sums = [Sending()]
    reducer._note_progress((0, 4))
    assert notes == [(0, 1)]  # strictly in order: the third waits for the second
