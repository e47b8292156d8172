"""Loss and counts against NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lockstep.errors import LockstepError
from lockstep.optim.loss import OwnLoss, count_correct, cross_entropy_sum


def reference_loss(logits: Any, labels: Any, smoothing: float) -> float:
    num_classes = logits.shape[1]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.full(logits.shape, smoothing / num_classes)
    target[np.arange(len(labels)), labels] += 1.0 - smoothing
    return float(-(target * log_p).sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_is_the_sum_over_samples(smoothing: float) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 3, (17, 10)), rng.integers(0, 10, 17)
    found = cross_entropy_sum(torch.tensor(logits).float(), torch.tensor(labels), smoothing)
    assert found.item() == pytest.approx(reference_loss(logits, labels, smoothing), rel=1e-6)


def draw_mixed(count: int, num_classes: int) -> tuple[Any, Any, Any]:
    """Labels of mixed samples, N × 3, and the targets that they stand for."""
    rng = np.random.default_rng(count)
    first, other, share = *rng.integers(0, num_classes, (2, count)), rng.random(count).astype(np.float32)
    targets = np.zeros((count, num_classes))
    np.add.at(targets, (np.arange(count), first), share)
    np.add.at(targets, (np.arange(count), other), 1 - share)
    return np.stack([first, other, share], axis=1).astype(np.float32), targets, rng.normal(0, 3, (count, num_classes))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_of_mixed_samples_both_labels_count_by_their_shares(smoothing: float) -> None:
    labels, targets, logits = draw_mixed(17, 10)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = -(((1 - smoothing) * targets + smoothing / 10) * log_p).sum()
    given_logits = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    found = cross_entropy_sum(given_logits, torch.tensor(labels), smoothing)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(found, given_logits)
    np.testing.assert_allclose(gradient, np.exp(log_p) - (1 - smoothing) * targets - smoothing / 10, atol=1e-5)
    own = OwnLoss(
        lambda x, y: functional.cross_entropy(x, y, reduction="none", label_smoothing=smoothing), torch.device("cpu")
    )
    assert own(given_logits, torch.tensor(labels)).item() == pytest.approx(expected, rel=1e-6)
    assert own(given_logits[:0], torch.tensor(labels[:0])).item() == 0


def test_unmixed_samples_in_either_form_have_one_loss() -> None:
    logits, labels = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 5
    mixed = torch.stack([labels.float(), (labels + 1) % 5, torch.ones(9)], dim=1)
    torch.testing.assert_close(cross_entropy_sum(logits, mixed, 0.1), cross_entropy_sum(logits, labels, 0.1))
    assert torch.equal(count_correct(logits, mixed), count_correct(logits, labels))


def test_of_a_mixed_sample_the_larger_share_is_right() -> None:
    logits = torch.eye(4)[[0, 0, 0, 3]]
    labels = torch.tensor([[0, 1, 0.6], [0, 1, 0.4], [1, 0, 0.4], [3, 2, 0.5]])
    assert count_correct(logits, labels, (1,)).tolist() == [3]


def test_a_loss_that_gives_the_mean_cannot_weigh_mixed_samples() -> None:
    labels, _, logits = draw_mixed(6, 5)
    loss = OwnLoss(nn.CrossEntropyLoss(), torch.device("cpu"))
    with pytest.raises(LockstepError, match=r"CrossEntropyLoss gave the mean .* or set both to 0\."):
        loss(torch.tensor(logits, dtype=torch.float32, requires_grad=True), torch.tensor(labels))


def test_shares_of_a_batch_add_up_to_its_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(10, 4, generator=generator), torch.randint(0, 4, (10,), generator=generator)
    shares = sum(cross_entropy_sum(logits[part], labels[part], 0.1) for part in (slice(0, 3), slice(3, 10)))
    torch.testing.assert_close(shares, cross_entropy_sum(logits, labels, 0.1))


def test_half_precision_logits_are_summed_in_fp32() -> None:
    logits = torch.zeros(4096, 10, dtype=torch.bfloat16)
    loss = cross_entropy_sum(logits, torch.zeros(4096, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(4096 * np.log(10), rel=1e-6)


@given(
    st.lists(st.tuples(st.lists(st.integers(-2, 2), min_size=6, max_size=6), st.integers(0, 5)), min_size=1, max_size=9)
)
def test_a_label_counts_when_fewer_than_k_classes_come_before_it(rows: list[tuple[list[int], int]]) -> None:
    def place(scores: list[int], label: int) -> int:
        return sorted(range(6), key=lambda c: (-scores[c], c)).index(label)

    expected = [sum(place(scores, label) < k for scores, label in rows) for k in (1, 2, 5)]
    logits = torch.tensor([scores for scores, _ in rows], dtype=torch.float32)
    labels = torch.tensor([label for _, label in rows])
    assert count_correct(logits, labels, k=(1, 2, 5)).tolist() == expected


def test_with_fewer_than_five_classes_every_label_is_in_the_top_five() -> None:
    counts = count_correct(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]), torch.tensor([0, 0]))
    assert counts.tolist() == [1, 2]
    assert counts.dtype == torch.int64


def test_logits_that_are_not_numbers_are_never_correct() -> None:
    assert count_correct(torch.full((3, 10), torch.nan), torch.tensor([0, 1, 2])).tolist() == [0, 0]


CPU = torch.device("cpu")


def draw_logits(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, 5, generator=generator).to(dtype).requires_grad_()
    return logits, torch.randint(5, (count,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_an_own_loss_sample_by_sample_has_the_gradients_of_the_built_in_one(
    smoothing: float, dtype: torch.dtype
) -> None:
    """To the last bit; the mean to rounding."""
    logits, labels = draw_logits(7, dtype)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value / 13, logits)[0]

    expected = cross_entropy_sum(logits, labels, smoothing)
    each = OwnLoss(lambda x, y: functional.cross_entropy(x, y, reduction="none", label_smoothing=smoothing), CPU)
    mean = OwnLoss(nn.CrossEntropyLoss(label_smoothing=smoothing), CPU)
    wanted = gradient(expected)
    assert torch.equal(gradient(each(logits, labels)), wanted)
    torch.testing.assert_close(each(logits, labels), expected)
    torch.testing.assert_close(mean(logits, labels), expected)
    torch.testing.assert_close(gradient(mean(logits, labels)), wanted)


def test_an_own_loss_sees_fp32_and_of_no_samples_is_zero() -> None:
    seen = []

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(logits.dtype)
        return logits.mean()

    logits, labels = draw_logits(3, torch.float16)
    OwnLoss(loss, CPU)(logits, labels)
    assert seen == [torch.float32]
    assert OwnLoss(loss, CPU)(logits[:0], labels[:0]).item() == 0
    assert OwnLoss(nn.CrossEntropyLoss, CPU)(logits, labels).item() > 0  # a class is called once


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda x, y: x, r"gave a tensor of \[4, 5\] for 4 samples; return one value for each, or their mean"),
        (lambda x, y: 1.5, "gave a float for 4 samples"),
        (lambda x, y: x.detach().mean(), "gave a value without a gradient"),
        (lambda x, y: x @ y, "failed: RuntimeError"),
        (lambda x: x, "failed: TypeError"),
        (3, "The loss int is not callable"),
        (nn.Linear(5, 1), "The loss Linear has parameters"),
        (nn.Linear, "The loss Linear cannot be built: TypeError"),
    ],
)
def test_a_loss_that_is_none_is_one_sentence(loss: Any, words: str) -> None:
    with pytest.raises(LockstepError, match=words) as caught:
        OwnLoss(loss, CPU)(*draw_logits(4))
    assert "\n" not in str(caught.value)
