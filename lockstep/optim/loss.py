"""Logits → loss and correct predictions, summed over samples, never averaged: step 6 of the walk.

The engine divides by the global batch, so averages are exact however unevenly the samples are shared among the ranks.
"""

import torch
from torch import Tensor
from torch.nn import functional


def cross_entropy_sum(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The cross-entropy summed over the batch, in FP32 whatever the logits' precision."""
    return functional.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=label_smoothing)


@torch.no_grad()
def count_correct(logits: Tensor, labels: Tensor, k: tuple[int, ...] = (1, 5)) -> Tensor:
    """For each k, how many labels are among the k highest logits (int64); a tie goes to the lower class number."""
    # Counting the classes behind the label, rather than sorting, resolves ties alike on every device and puts a label
    # whose logit is NaN last: a diverged network is never right by accident.
    label = labels.unsqueeze(1)
    own = logits.gather(1, label)
    classes = torch.arange(logits.shape[1], device=logits.device)
    behind = (logits < own) | ((logits == own) & (classes > label))
    place = logits.shape[1] - 1 - behind.sum(dim=1)
    return torch.stack([(place < limit).sum() for limit in k])
