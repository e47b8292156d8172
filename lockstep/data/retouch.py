"""What is done to the squares of a training batch beyond crop and flip (step 5): moved, changed, erased, mixed.

    levels of a square → shifted → one operation of the policy → normalised → part of it erased → mixed with another

Every draw is a hash of (seed, epoch, sample), made for a whole batch at once. On the CPU the thread that makes a row
does all but the mixing, which is for the thread that completes the batch: NumPy and Pillow, as PyTorch would start
threads of its own. On a GPU the same is done to the batch behind its crop, on the input's stream, in three launches of
`kernels/retouch_kernel.py`; what `make_batch` does without them is their plain version.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.augment import (
    ERASE_STREAM,
    SHIFT_STREAM,
    TRIES,
    Boxes,
    draw_uniform,
    fit_crops,
    spread_crops,
)
from lockstep.data.decode import Pixels
from lockstep.data.mixing import Mixing, cover_boxes, draw_mixing, mix_labels, mix_pairs, mix_plain
from lockstep.data.order import Samples, StepPlan
from lockstep.data.policy import (
    Operations,
    apply_operation,
    apply_operations,
    draw_operations,
    fix_moves,
    plan_moves,
)

# The share of an image that random erasing takes and its width over height (Zhong et al. 2017, arXiv 1708.04896).
ERASED_AREA, ERASED_RATIO = (0.02, 0.4), (0.3, 1 / 0.3)
# Numbers that a GPU changes at once: what they take in between is a few times their size.
MAX_ELEMENTS = 1 << 25
LEVELS = (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)  # mean and deviation that leave a crop's levels as they are

Send = Callable[[Tensor], Tensor]  # an array to the device
Crop = Callable[[Tensor, Tensor, tuple[float, ...], tuple[float, ...]], None]  # table, out, mean, std
Launch = Callable[..., None]  # calls a function that launches kernels: one thread at a time

# A row of the kernels' plan, 8 bytes each.
ROW = np.dtype(
    [
        ("kind", np.int64),  # of the operation, and its amount
        ("amount", np.float64),
        ("move", np.int64, 6),  # where a pixel comes from, as `fix_moves` has it
        ("shift", np.int64, 2),
        ("erased", np.int64, 4),
        ("weight", np.float64),  # of the pair that begins here, and its box
        ("exchanged", np.int64, 4),
    ]
)


@dataclass(frozen=True)
class Augmentation:
    """What training samples undergo beyond crop and flip; nothing by default."""

    pad: int = 0  # pixels of reflection around a square, from which one of its size is cut
    policy: str = "none"  # or "trivial": one operation of random strength
    erase: float = 0.0  # the probability that a part is erased
    cutout: int = 0  # the side of a square that is erased of every sample, in pixels
    mixup: float = 0.0  # alphas of the distributions of shares
    cutmix: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether samples are mixed, and labels are therefore three numbers."""
        return bool(self.mixup or self.cutmix)


@dataclass(frozen=True)
class Retouch:
    """The changes of one batch, by row; None for what is not asked for."""

    shifts: NDArray[np.int64] | None  # rows and columns by which a square is moved up and left
    operations: Operations | None
    erased: NDArray[np.int64] | None  # top, left, height and width, empty for squares that stay whole
    mixing: Mixing | None
    own: slice  # the rows that remain: others are the other halves of pairs

    def change_levels(self, square: Pixels, row: int) -> Pixels:
        """One square on the host, before it is normalised."""
        if self.shifts is not None:
            down, across = (reflect(len(square), shift) for shift in self.shifts[row])
            # Whole rows, then whole pixels: several times as fast as both at once.
            square = np.take(square[down].view("V3"), across, axis=1).view(np.uint8)
        if self.operations is not None:
            square = apply_operation(square, int(self.operations.kinds[row]), float(self.operations.amounts[row]))
        return square

    def erase_part(self, image: NDArray[np.float32], row: int) -> None:
        """Zeros, the mean of all images, in one that is normalised, on the host."""
        if self.erased is not None:
            top, left, height, width = self.erased[row]
            image[top : top + height, left : left + width] = 0

    def mix(self, images: NDArray[np.float32]) -> None:
        """The pairs of a batch on the host."""
        if self.mixing is not None:
            mix_plain(images, self.mixing)

    def finish_labels(self, labels: NDArray[np.int64]) -> NDArray[Any]:
        """The labels of the rows that remain: as they are, or N × 3 FP32 where samples are mixed."""
        return (labels if self.mixing is None else mix_labels(labels, self.mixing))[self.own]

    def make_batch(
        self,
        table: Tensor,
        images: Tensor,
        crop: Crop,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        send: Send,
        launch: Launch | None = None,
    ) -> Tensor:
        """The whole batch on a device, in the empty `images`, by kernels if they can be launched; the rows that remain.

        The host waits for the device nowhere.
        """
        if launch:
            self._make_by_kernels(table, images, crop, mean, std, send, launch)
        else:
            self._make_plain(table, images, crop, mean, std, send)
        return images[self.own]

    def _make_by_kernels(
        self,
        table: Tensor,
        images: Tensor,
        crop: Crop,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        send: Send,
        launch: Launch,
    ) -> None:
        from lockstep.kernels.retouch_kernel import change_squares, mix_squares

        plan = send(self.write_plan(len(images), images.shape[2]))
        has_levels = self.operations is not None
        for rows in split_rows(images):
            part = squares = images[rows]
            if has_levels:
                squares = torch.empty_like(part, dtype=torch.float32, memory_format=torch.channels_last)
            elif self.shifts is not None:
                squares = torch.empty_like(part, memory_format=torch.channels_last)
            crop(table[rows], squares, *(LEVELS if has_levels else (mean, std)))
            if has_levels or self.shifts is not None or self.erased is not None:
                launch(change_squares, squares, plan[rows], part, mean, std, has_levels=has_levels)
        if self.mixing is not None:
            launch(mix_squares, images, plan)

    def write_plan(self, count: int, size: int) -> Tensor:
        """All of it in one array for the kernels, a `ROW` for each of the squares; on the host."""
        plan = np.zeros(count, ROW)
        if self.operations is not None:
            plan["kind"], plan["amount"] = self.operations
            plan["move"] = fix_moves(plan_moves(*self.operations, size))
        if self.shifts is not None:
            plan["shift"] = self.shifts
        if self.erased is not None:
            plan["erased"] = self.erased
        if self.mixing is not None:
            first = plan[: 2 * len(self.mixing.weights) : 2]
            first["weight"], first["exchanged"] = self.mixing[:2]
        return torch.from_numpy(plan.view(np.int64).reshape(count, ROW.itemsize // 8))

    def _make_plain(
        self, table: Tensor, images: Tensor, crop: Crop, mean: tuple[float, ...], std: tuple[float, ...], send: Send
    ) -> None:
        shifts = None if self.shifts is None else send(torch.from_numpy(self.shifts))
        erased = None if self.erased is None else send(torch.from_numpy(self.erased))
        for rows in split_rows(images):
            part = images[rows]
            if self.operations is None:
                crop(table[rows], part, mean, std)
                if shifts is not None:
                    part.copy_(shift_squares(part.permute(0, 2, 3, 1), shifts[rows]).permute(0, 3, 1, 2))
            else:
                levels = torch.empty_like(part, dtype=torch.float32, memory_format=torch.channels_last)
                crop(table[rows], levels, *LEVELS)
                squares = levels.add_(0.5).permute(0, 2, 3, 1).to(torch.uint8)
                if shifts is not None:
                    squares = shift_squares(squares, shifts[rows])
                apply_operations(squares, self.operations.select(rows), send)
                part.copy_(normalize(squares, mean, std).permute(0, 3, 1, 2))
            if erased is not None:
                part.masked_fill_(cover_boxes(erased[rows], part.shape[2])[:, None], 0)
        if self.mixing is not None:
            weights, boxes = (send(torch.from_numpy(values)) for values in self.mixing[:2])
            for rows in split_rows(images):
                pairs = slice(rows.start // 2, rows.stop // 2)
                mix_pairs(images[rows], weights[pairs], boxes[pairs])


def draw_retouch(seed: int, plan: StepPlan, size: int, wanted: Augmentation) -> Retouch | None:
    """What happens to a batch of squares of this size; None if nothing does."""
    if wanted == Augmentation():
        return None
    epoch, samples = plan.epoch, plan.made
    mixing = None
    if wanted.mixes:
        first = samples[: len(samples) // 2 * 2 : 2]
        mixing = draw_mixing(seed, epoch, first, size, wanted.mixup, wanted.cutmix)
    return Retouch(
        shifts=draw_shifts(seed, epoch, samples, wanted.pad) if wanted.pad else None,
        operations=draw_operations(seed, epoch, samples) if wanted.policy == "trivial" else None,
        erased=draw_parts(seed, epoch, samples, size, wanted),
        mixing=mixing,
        own=plan.own,
    )


def draw_shifts(seed: int, epoch: int, samples: Samples, pad: int) -> NDArray[np.int64]:
    """N × 2 from -pad to pad, all equally likely."""
    return (draw_uniform(seed, epoch, SHIFT_STREAM, samples, 2) * (2 * pad + 1)).astype(np.int64) - pad


def draw_parts(seed: int, epoch: int, samples: Samples, size: int, wanted: Augmentation) -> NDArray[np.int64] | None:
    """N × 4 boxes to erase, if any are asked for."""
    if wanted.cutout:
        return draw_cutouts(seed, epoch, samples, size, wanted.cutout)
    return draw_erased(seed, epoch, samples, size, wanted.erase) if wanted.erase else None


def draw_cutouts(seed: int, epoch: int, samples: Samples, size: int, side: int) -> NDArray[np.int64]:
    """N × 4 squares around a pixel, any of them as likely, less what lies outside (DeVries & Taylor, 1708.04552)."""
    centres = (draw_uniform(seed, epoch, ERASE_STREAM, samples, 2) * size).astype(np.int64)
    starts, ends = (np.clip(centres - side // 2 + reach, 0, size) for reach in (0, side))
    return np.concatenate([starts, ends - starts], axis=1)


def draw_erased(seed: int, epoch: int, samples: Samples, size: int, probability: float) -> NDArray[np.int64]:
    """N × 4 boxes: the first drawn one that fits, an empty one for a square that stays whole or is too small."""
    boxes = np.zeros((len(samples), 4), np.int64)
    chosen = np.flatnonzero(draw_uniform(seed, epoch, ERASE_STREAM, samples, 1)[:, 0] < probability)
    uniform = draw_uniform(seed, epoch, ERASE_STREAM, samples[chosen], 4 * TRIES, first=1)
    found: Boxes
    found, fits = fit_crops(np.full((len(chosen), 2), size, np.int64), spread_crops(uniform, ERASED_AREA, ERASED_RATIO))
    fits &= (found[:, 2:] < size).any(axis=1)  # or nothing would be left
    boxes[chosen[fits]] = found[fits].astype(np.int64)
    return boxes


def reflect(size: int, shift: int) -> NDArray[np.int64]:
    """Which pixels lie in a row that is moved by less than its size; beyond an end it runs back, the end not twice."""
    places: NDArray[np.int64] = size - 1 - np.abs(size - 1 - np.abs(np.arange(size) + shift))
    return places


def shift_squares(squares: Tensor, shifts: Tensor) -> Tensor:
    """N squares, N × size × size × channels, each moved by its shift (N × 2); as `reflect` has it."""
    count, size = squares.shape[:2]
    places = (torch.arange(size, device=squares.device) + shifts[:, :, None]).abs()
    down, across = (size - 1 - (size - 1 - places).abs()).unbind(1)
    rows = torch.arange(count, device=squares.device)
    return squares[rows[:, None, None], down[:, :, None], across[:, None, :]]


def normalize(squares: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Levels in 0…255, channels last, → (level / 255 - mean) / std in FP32."""
    channels = [
        squares[..., channel].float() * (1 / (255 * deviation)) - average / deviation
        for channel, (average, deviation) in enumerate(zip(mean, std, strict=True))
    ]
    return torch.stack(channels, dim=-1)


def split_rows(images: Tensor) -> Iterator[slice]:
    """A batch in parts of at most MAX_ELEMENTS, pairs not torn apart."""
    step = max(2, MAX_ELEMENTS // images[0].numel() // 2 * 2) if len(images) else 2
    for start in range(0, len(images), step):
        yield slice(start, min(start + step, len(images)))
