"""Two samples in one: mixup (arXiv 1710.09412), CutMix (arXiv 1905.04899), and what becomes of labels (step 5).

The positions 2i and 2i + 1 of a global batch are a pair: the order is random, so pairs are, and a pair is the same on
any number of ranks (`order.py: plan_step`). Both of a pair are mixed alike, each from the other: one draw, of the
pair's first sample. The last of an odd batch has nobody and stays as it is. `mix_plain` does a pair at a time, on the
host.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.augment import MIX_STREAM, Shares, draw_uniform
from lockstep.data.order import Samples

# Numbers of a pair's stream before those of its two gamma variables: which of the two it is, and where the box lies.
GAMMAS = 3
# Below it every share is 0 or 1 to the last digit.
LEAST_ALPHA = 1e-9


class Mixing(NamedTuple):
    """How P pairs are mixed: outside its box an image keeps a weight, inside it is the other's."""

    weights: Shares
    boxes: NDArray[np.int64]  # top, left, height and width; empty ones for mixup
    shares: Shares  # of a result that is its own: mixup's weight, CutMix' area


def draw_mixing(seed: int, epoch: int, samples: Samples, size: int, mixup: float, cutmix: float) -> Mixing:
    """How the pairs that begin with these samples are mixed; of mixup and CutMix, one where both have an alpha."""
    choice, *centre = draw_uniform(seed, epoch, MIX_STREAM, samples, GAMMAS).T
    cuts = choice >= 0.5 if mixup and cutmix else np.full(len(samples), bool(cutmix))
    kept = np.empty(len(samples))
    for alpha, chosen in ((mixup, ~cuts), (cutmix, cuts)):
        if chosen.any():
            kept[chosen] = draw_beta(alpha, seed, epoch, samples[chosen])
    # Cut off at the borders, as the papers' code does: what the box then covers is what counts.
    half = (size * np.sqrt(1 - kept)).astype(np.int64) // 2 * cuts
    middle = (np.stack(centre, axis=1) * size).astype(np.int64)
    low = np.clip(middle - half[:, None], 0, size)
    extent = np.clip(middle + half[:, None], 0, size) - low
    covered = extent.prod(axis=1) / size**2
    return Mixing(np.where(cuts, 1.0, kept), np.concatenate([low, extent], axis=1), np.where(cuts, 1 - covered, kept))


def draw_beta(alpha: float, seed: int, epoch: int, samples: Samples) -> Shares:
    """One number of the distribution Beta(alpha, alpha) for each sample: X / (X + Y) of two gamma variables."""
    x, y = (_draw_log_gamma(alpha, seed, epoch, samples, part) for part in (0, 1))
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(y - x))


def _draw_log_gamma(alpha: float, seed: int, epoch: int, samples: Samples, part: int) -> Shares:
    """The logarithm of gamma variables by Marsaglia & Tsang 2000, who draw again what is rejected, one in twenty.

    They ask for a shape of at least 1; that of alpha + 1 is brought down by a power, whose logarithm cannot underflow.
    """
    scale = alpha + 2 / 3
    found = np.empty(len(samples))
    left = np.arange(len(samples))
    tries = 0
    while len(left):
        first = GAMMAS + 4 * (2 * tries + part)
        radius, angle, accept, power = draw_uniform(seed, epoch, MIX_STREAM, samples[left], 4, first).T
        normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * math.pi * angle)
        cube = (1 + normal / math.sqrt(9 * scale)) ** 3
        logarithm = np.log(np.maximum(cube, 1e-300))
        is_taken = (cube > 0) & (np.log1p(-accept) < normal**2 / 2 + scale * (1 - cube + logarithm))
        values = math.log(scale) + logarithm + np.log1p(-power) / max(alpha, LEAST_ALPHA)
        found[left[is_taken]] = values[is_taken]
        left = left[~is_taken]
        tries += 1
    return found


def mix_labels(labels: NDArray[np.int64], mixing: Mixing) -> NDArray[np.float32]:
    """Label, the other's label, and the share of the first, for each sample of the pairs; N × 3."""
    mixed = np.stack([labels, labels, np.ones(len(labels))], axis=1).astype(np.float32)
    end = 2 * len(mixing.shares)
    mixed[:end, 1] = labels[:end].reshape(-1, 2)[:, ::-1].ravel()
    mixed[:end, 2] = np.repeat(mixing.shares, 2)
    return mixed


def mix_plain(images: NDArray[np.float32], mixing: Mixing) -> None:
    """Mix the pairs of N × height × width × channels, in place."""
    for pair, (weight, box) in enumerate(zip(mixing.weights.astype(np.float32), mixing.boxes.tolist(), strict=True)):
        one, other = images[2 * pair], images[2 * pair + 1]
        if weight < 1:
            one[:], other[:] = weight * one + (1 - weight) * other, weight * other + (1 - weight) * one
        top, left, height, width = box
        part = np.s_[top : top + height, left : left + width]
        one[part], other[part] = other[part].copy(), one[part].copy()


def mix_pairs(images: Tensor, weights: Tensor, boxes: Tensor) -> None:
    """The same for N × channels × height × width on any device, weights and boxes (P × 4) beside them."""
    end = 2 * len(weights)
    ones, others = images[0:end:2], images[1:end:2]
    kept = torch.where(cover_boxes(boxes, images.shape[2]), 0, weights.float()[:, None, None])[:, None]
    mixed = kept * ones + (1 - kept) * others, kept * others + (1 - kept) * ones  # in FP32
    ones.copy_(mixed[0])
    others.copy_(mixed[1])


def cover_boxes(boxes: Tensor, size: int) -> Tensor:
    """Which pixels of N squares lie in their boxes (N × 4: top, left, height and width)."""
    steps = torch.arange(size, device=boxes.device)
    top, left, height, width = boxes.unbind(1)
    down = (steps >= top[:, None]) & (steps < (top + height)[:, None])
    across = (steps >= left[:, None]) & (steps < (left + width)[:, None])
    return down[:, :, None] & across[:, None, :]
