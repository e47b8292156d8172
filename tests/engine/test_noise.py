"""The noise scale against gradients whose noise is known."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.comm.cost import FLAT
from lockstep.comm.fusion import Buffer, ReductionPlan
from lockstep.comm.reducer import Reducer, allocate_gradients
from lockstep.engine.instruments import Cadence, Instruments
from lockstep.engine.noise import NoiseScale
from lockstep.engine.step import run_passes
from lockstep.engine.timing import Clock
from lockstep.optim.rule import Norms, Rule, Slots
from lockstep.report.run import SilentSink
from tests.ranks import world_of_one


def test_it_finds_the_noise_that_gradients_were_drawn_with() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(0, 1, 200)
    deviation = 3.0  # of every sample's gradient in every dimension: tr(Σ) = 200 · 9
    shares = [5, 6, 5]
    noise = NoiseScale()
    estimates = []
    for _ in range(400):
        samples = truth + rng.normal(0, deviation, (sum(shares), len(truth)))
        means = [part.mean(axis=0) for part in np.split(samples, np.cumsum(shares)[:-1])]
        noise.add(
            small_square=float(np.mean([mean @ mean for mean in means])),
            small_inverse=float(np.mean([1 / share for share in shares])),
            big_square=float(samples.mean(axis=0) @ samples.mean(axis=0)),
            big=sum(shares),
        )
        estimates.append(noise.samples)
    expected = len(truth) * deviation**2 / (truth @ truth)
    assert np.mean([value for value in estimates[20:] if value]) == pytest.approx(expected, rel=0.05)
    assert estimates[0] == pytest.approx(expected, rel=0.6)  # the first is no smaller for the averages' zero start


def test_nothing_is_known_before_the_first_estimate_or_of_one_rank() -> None:
    noise = NoiseScale()
    assert noise.samples is None
    noise.add(small_square=2.0, small_inverse=1 / 16, big_square=2.0, big=16)
    assert noise.samples is None


def test_chance_that_makes_the_noise_negative_is_not_a_number() -> None:
    noise = NoiseScale()
    noise.add(small_square=1.0, small_inverse=1 / 8, big_square=2.0, big=16)
    assert noise.samples is None


class Everything(Cadence):
    """Every step is measured, none is drawn."""

    def __init__(self) -> None:
        super().__init__(0, 1000, 1)

    def is_measured(self, step: int) -> bool:
        return True

    def begins_timeline(self, step: int) -> bool:
        return False

    def ends_timeline(self, step: int) -> bool:
        return False


class NormsOfGradients(Rule):
    """Updates nothing and says how large the gradients were."""

    def __init__(self) -> None:
        self.measures = False

    def _update(self, weights: Slots, gradients: Slots, lr: torch.Tensor) -> None:
        raise AssertionError

    def constants(self) -> dict[str, Any]:
        return {}

    def read_norms(self, weights: torch.Tensor, gradients: tuple[torch.Tensor, torch.Tensor]) -> Norms:
        norms = torch.cat(gradients).norm().reshape(1)
        return Norms(norms, norms, None, torch.ones(()))


def build_linear(network: torch.nn.Linear, samples_of_a_pass: int) -> Any:
    """The parts of a step whose loss is the network's output: a sample's gradient is the sample itself."""
    gradients = allocate_gradients(network.weight.numel(), torch.device("cpu"))
    plan = ReductionPlan((Buffer(0, network.weight.numel(), 0, 1),), (FLAT,), overlap=False)
    slots = [gradients[1][: network.weight.numel()].view_as(network.weight)]
    return SimpleNamespace(
        model=network,
        reducer=Reducer([network.weight], gradients, slots, plan, landing="at once"),
        hybrid=None,
        rule=NormsOfGradients(),
        weights=network.weight,
        lr=torch.zeros(()),
        note=torch.zeros(1),
        loss=lambda logits, labels: logits.sum(),
        loss_scale=None,
        dtype=torch.float32,
        clock=Clock(torch.device("cpu")),
        max_batch_per_rank=samples_of_a_pass,
    )


def test_one_rank_finds_the_noise_from_its_first_pass() -> None:
    rng = np.random.default_rng(2)
    truth, deviation, batch = rng.normal(0, 1, 200), 3.0, 22
    parts = build_linear(torch.nn.Linear(200, 1, bias=False), 8)  # passes of 7, 7 and 8
    instruments = Instruments(parts, world_of_one(), SilentSink(), Everything())
    estimates = []
    for step in range(1, 500):
        samples = torch.from_numpy(truth + rng.normal(0, deviation, (batch, 200))).float()
        labels = torch.zeros(batch, dtype=torch.int64)
        instruments.begin_step(step)
        run_passes(parts, samples, labels, batch)
        parts.reducer.finish()
        estimates.append(instruments.report(step, SimpleNamespace(labels=labels, global_size=batch)))  # type: ignore[arg-type]
    expected = 200 * deviation**2 / (truth @ truth)
    assert np.mean([value for value in estimates[20:] if value]) == pytest.approx(expected, rel=0.07)


def test_a_step_of_one_pass_on_one_rank_says_nothing() -> None:
    parts = build_linear(torch.nn.Linear(4, 1, bias=False), 8)
    instruments = Instruments(parts, world_of_one(), SilentSink(), Everything())
    instruments.begin_step(1)
    labels = torch.zeros(8, dtype=torch.int64)
    run_passes(parts, torch.ones(8, 4), labels, 8)
    parts.reducer.finish()
    assert instruments.report(1, SimpleNamespace(labels=labels, global_size=8)) is None  # type: ignore[arg-type]
    assert parts.reducer.first_square == 0


def test_what_is_not_finite_leaves_the_averages_alone() -> None:
    noise = NoiseScale()
    noise.add(small_square=3.0, small_inverse=1 / 8, big_square=2.0, big=16)
    known = noise.samples
    noise.add(small_square=float("inf"), small_inverse=1 / 8, big_square=2.0, big=16)
    noise.add(small_square=float("nan"), small_inverse=1 / 8, big_square=2.0, big=16)
    assert known == noise.samples == pytest.approx(16.0 / 1.0)
