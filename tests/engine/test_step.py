"""One step against the loop everyone writes, and the way a batch is cut into passes."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lockstep.config import RunConfig, TrainConfig
from lockstep.data.order import Cursor, share, split_batch
from lockstep.data.pipeline import Batch
from lockstep.engine.build import Parts, assemble
from lockstep.engine.passes import check_shares, plan_passes
from lockstep.engine.step import CORRECT, LOSS, STOP, train_step
from lockstep.errors import LockstepError
from lockstep.optim.schedule import Schedule
from tests.ranks import world_of_one

NUM_CLASSES = 5


def build_network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(54, NUM_CLASSES)
    )


def build_parts(model: nn.Module, *, max_batch: int = 256, accumulate: int = 0, **optim: object) -> Parts:
    passes = {"max_batch_per_rank": max_batch, "accumulate": accumulate}
    config = RunConfig.model_validate(
        {
            "optim": {"name": "sgd", "lr": 0.1, **optim},
            "train": {"global_batch": 64, "duration": "9st", **passes},
        }
    )
    return assemble(config, world_of_one(), model, Schedule("constant", 0.1, total_steps=9))


def build_batch(count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        images=torch.randn(count, 3, 8, 8, generator=generator),
        labels=torch.randint(0, NUM_CLASSES, (count,), generator=generator),
        global_size=count,
        epoch=0,
        samples=np.arange(count),
        cursor=Cursor(0, count),
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("max_batch", [256, 7])
def test_steps_equal_a_plain_loop_with_torch_sgd(nesterov: bool, label_smoothing: float, max_batch: int) -> None:
    model = build_network()
    plain = copy.deepcopy(model)
    settings = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    parts = build_parts(model, max_batch=max_batch, label_smoothing=label_smoothing, **settings)
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in plain.parameters() if p.ndim > 1]},
            {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
        nesterov=nesterov,
    )
    for step, (count, lr) in enumerate([(32, 0.1), (32, 0.2), (20, 0.2), (9, 0.05), (1, 0.05)]):
        batch = build_batch(count, seed=step)
        train_step(parts, batch, lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        logits = plain(batch.images)
        functional.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing).backward()
        optimizer.step()
    expected = dict(plain.named_parameters())
    moved = dict(build_network().named_parameters())
    for name, parameter in parts.model.named_parameters():
        assert (parameter - moved[name]).abs().max() > 1e-3
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("accumulate", [0, 5])
@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_steps_equal_a_plain_loop_with_torch_adamw(accumulate: int, clip_norm: float) -> None:
    """Accumulated as that loop would, and clipped by torch.nn.utils when all passes are done."""
    model = build_network()
    plain = copy.deepcopy(model)
    settings = {"weight_decay": 0.01, "adamw_epsilon": 1e-3, "clip_norm": clip_norm}
    parts = build_parts(model, name="adamw", accumulate=accumulate, **settings)
    groups = [{"params": [p], "weight_decay": 0.01 if p.ndim > 1 else 0.0} for p in plain.parameters()]
    optimizer = torch.optim.AdamW(groups, eps=1e-3)
    norms = []
    for step, (count, lr) in enumerate([(64, 0.01), (64, 0.02), (20, 0.02)]):
        batch = build_batch(count, seed=step)
        train_step(parts, batch, lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        for images, labels in zip(batch.images.split(7), batch.labels.split(7), strict=True):
            (functional.cross_entropy(plain(images), labels, reduction="sum") / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm or float("inf")))
        optimizer.step()
    assert min(norms) > 0.1
    expected = dict(plain.named_parameters())
    moved = dict(build_network().named_parameters())
    for name, parameter in parts.model.named_parameters():
        assert (parameter - moved[name]).abs().max() > 1e-3
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("max_batch", [64, 5])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_side_numbers_are_mean_loss_and_right_answers(max_batch: int, label_smoothing: float) -> None:
    model, batch = build_network(), build_batch(23)
    logits = model(batch.images).detach().double().numpy()
    labels = batch.labels.numpy()
    logarithms = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.eye(NUM_CLASSES)[labels] * (1 - label_smoothing) + label_smoothing / NUM_CLASSES
    parts = build_parts(model, max_batch=max_batch, label_smoothing=label_smoothing)
    side = train_step(parts, batch, 0.1)
    assert side[LOSS].item() == pytest.approx(-(target * logarithms).sum(axis=1).mean(), rel=1e-6)
    correct = int((logits.argmax(axis=1) == labels).sum())
    assert 0 < correct < 23
    assert side[CORRECT].item() == correct
    assert side[STOP].item() == 0


def test_a_wish_to_stop_is_a_vote_and_is_forgotten_at_the_next_step() -> None:
    parts = build_parts(build_network())
    assert train_step(parts, build_batch(4), 0.1, stop=True)[STOP].item() == 1
    assert train_step(parts, build_batch(4), 0.1)[STOP].item() == 0


def test_a_rank_without_samples_takes_the_step_of_momentum_alone() -> None:
    parts = build_parts(build_network(), momentum=0.5, weight_decay=0.0)
    train_step(parts, build_batch(8), 0.1)
    before, velocity = parts.weights.clone(), parts.rule.state()["momentum"].clone()
    assert velocity.abs().max() > 0
    side = train_step(parts, build_batch(0), 0.1)
    torch.testing.assert_close(parts.weights, before - 0.1 * 0.5 * velocity)
    assert side[LOSS].item() == side[CORRECT].item() == 0


@given(st.integers(0, 300), st.integers(1, 80))
def test_passes_cover_the_batch_once_and_in_order(count: int, max_size: int) -> None:
    numbers = range(count)
    assert [number for part, _ in split_batch(count, max_size) for number in numbers[part]] == list(numbers)


@given(st.integers(0, 300), st.integers(1, 80))
def test_passes_are_as_few_as_possible_and_nearly_equal(count: int, max_size: int) -> None:
    sizes = [part.stop - part.start for part, _ in split_batch(count, max_size)]
    assert len(sizes) == (count + max_size - 1) // max_size
    assert all(1 <= size <= max_size for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(st.integers(1, 300), st.integers(1, 80))
def test_exactly_the_last_pass_is_marked(count: int, max_size: int) -> None:
    marks = [is_last for _, is_last in split_batch(count, max_size)]
    assert marks == [False] * (len(marks) - 1) + [True]


def test_an_empty_batch_has_no_pass() -> None:
    assert list(split_batch(0, 16)) == []


@given(st.data(), st.integers(1, 5000), st.integers(1, 40))
def test_a_rank_that_accumulates_takes_as_many_passes_as_asked_for_and_fewer_over_less(
    data: st.DataObject, global_batch: int, num_ranks: int
) -> None:
    num_ranks = min(num_ranks, global_batch)
    accumulate = data.draw(st.integers(1, global_batch // num_ranks))
    train = TrainConfig(global_batch=global_batch, duration="1ep", accumulate=accumulate)  # type: ignore[arg-type]
    for rank in {0, num_ranks - 1}:
        start, stop = share(global_batch, rank, num_ranks)
        size = plan_passes(train, rank, num_ranks)
        whole = [part.stop - part.start for part, _ in split_batch(stop - start, size)]
        assert len(whole) == accumulate
        assert min(whole) >= 1
        fewer = [part.stop - part.start for part, _ in split_batch(data.draw(st.integers(0, stop - start)), size)]
        assert len(fewer) <= accumulate
        assert max(fewer, default=0) <= max(whole)


def test_a_pass_without_a_sample_is_refused() -> None:
    train = {"global_batch": 8, "duration": "1ep", "accumulate": 3}
    config = RunConfig.model_validate({"optim": {"lr": 0.1}, "train": train})
    check_shares(config, 2)
    with pytest.raises(LockstepError) as caught:
        check_shares(config, 3)
    assert str(caught.value) == (
        "train.global_batch = 8 cannot be shared by 3 ranks in train.accumulate = 3 passes each; give at least one "
        "sample to each pass."
    )
