"""Logits → loss and correct predictions, summed over samples, never averaged: step 6 of the walk.

The engine divides by the global batch, so averages are exact however unevenly the samples are shared among the ranks.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.errors import LockstepError
from lockstep.named import describe, phrase_error

SummedLoss = Callable[[Tensor, Tensor], Tensor]  # logits, labels -> the sum over the samples
# Labels are N whole numbers, or N × 3 FP32 where samples are mixed: label, the other's label, the share of the first.


def split_mixed(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The labels of mixed samples, those of the others in them, and the shares of the first."""
    first, other, share = labels.unbind(1)
    return first.long(), other.long(), share


def cross_entropy_sum(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The cross-entropy summed over the batch, in FP32 whatever the logits' precision."""
    if labels.dim() == 2:
        first, other, share = split_mixed(labels)
        log_p = functional.log_softmax(logits.float(), dim=1)
        own, others = (log_p.gather(1, label[:, None])[:, 0] for label in (first, other))
        likely = (1 - label_smoothing) * (share * own + (1 - share) * others) + label_smoothing * log_p.mean(dim=1)
        return -likely.sum()
    return functional.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=label_smoothing)


class OwnLoss:
    """A user's loss: (FP32 logits, labels) → one value a sample, or their mean; here it becomes a sum.

    Where samples are mixed it is asked twice, for either label, and must give one value a sample: each counts by the
    label's share. A class is called once, without arguments, for the loss itself. A module is copied to the device.
    """

    def __init__(self, loss: Any, device: torch.device) -> None:
        self._name = describe(loss)
        try:
            self._loss = loss() if isinstance(loss, type) else loss
            if isinstance(self._loss, nn.Module):
                self._loss = copy.deepcopy(self._loss).to(device)
        except Exception as error:
            raise self._refuse(f"cannot be built: {phrase_error(error)}") from error
        if not callable(self._loss):
            raise self._refuse("is not callable; give a function of logits and labels")
        if getattr(self._loss, "reduction", "") == "sum":
            raise self._refuse(
                "gives a sum over its samples, which would count as their mean; set its reduction to none"
            )
        if isinstance(self._loss, nn.Module) and next(self._loss.parameters(), None) is not None:
            raise self._refuse("has parameters, which nobody would train; make them a part of the network, or buffers")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        count = len(labels)
        if not count:  # of which a mean would be no number
            return logits.float().sum()
        if labels.dim() == 2:
            first, other, share = split_mixed(labels)
            return (share * self._ask_each(logits, first) + (1 - share) * self._ask_each(logits, other)).sum()
        value = self._ask(logits, labels)
        return value.sum() if value.dim() else value * count

    def _ask_each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """One value for each sample."""
        value = self._ask(logits, labels)
        if not value.dim():
            raise self._refuse(
                "gave the mean over its samples, and augment.mixup and augment.cutmix weigh each sample by itself; "
                "return one value for each, or set both to 0"
            )
        return value

    def _ask(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What the user's code gives, if it is one value for each sample or their mean."""
        count = len(labels)
        try:
            value = self._loss(logits.float(), labels)
        except LockstepError:
            raise
        except torch.OutOfMemoryError:  # for which there is a sentence
            raise
        except Exception as error:
            raise self._refuse(f"failed: {phrase_error(error)}") from error
        if not isinstance(value, Tensor) or value.shape not in (torch.Size(()), torch.Size((count,))):
            got = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise self._refuse(f"gave {got} for {count} samples; return one value for each, or their mean")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise self._refuse("gave a value without a gradient; compute it from the logits, by torch's operations")
        return value.float()

    def _refuse(self, problem: str) -> LockstepError:
        return LockstepError(f"The loss {self._name} {problem}.")


@torch.no_grad()
def count_correct(logits: Tensor, labels: Tensor, k: tuple[int, ...] = (1, 5)) -> Tensor:
    """For each k, how many labels are among the k highest logits (int64); a tie goes to the lower class number.

    Of a mixed sample the label with the larger share counts.
    """
    if labels.dim() == 2:
        first, other, share = split_mixed(labels)
        labels = torch.where(share >= 0.5, first, other)
    # Counting the classes behind the label, rather than sorting, resolves ties alike on every device and puts a label
    # whose logit is NaN last: a diverged network is never right by accident.
    label = labels.unsqueeze(1)
    own = logits.gather(1, label)
    classes = torch.arange(logits.shape[1], device=logits.device)
    behind = (logits < own) | ((logits == own) & (classes > label))
    place = logits.shape[1] - 1 - behind.sum(dim=1)
    return torch.stack([(place < limit).sum() for limit in k])
