"""Augmented batches: the same on any number of ranks, after a resume and on either path; each change by its formula."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

from lockstep.data import retouch
from lockstep.data.pipeline import Batch
from lockstep.data.retouch import Augmentation, draw_cutouts, draw_erased, draw_shifts, reflect, shift_squares
from lockstep.engine.recorded import refuse_waits
from tests.data.pictures import Pictures, encode, photos, picture
from tests.data.test_device_batch import TOLERANCE
from tests.data.test_pipeline import MEAN, STD, eval_pipeline, same, take, train_pipeline

EVERY = Augmentation(pad=3, policy="trivial", erase=0.5, mixup=0.4, cutmix=1.0)
ONLY = {
    "pad": Augmentation(pad=3),
    "policy": Augmentation(policy="trivial"),
    "erase": Augmentation(erase=0.5),
    "cutout": Augmentation(cutout=6),
    "mixup": Augmentation(mixup=0.4),
    "cutmix": Augmentation(cutmix=1.0),
}
WHOLE = {"crop_area": (1.0, 1.0), "flip": False, "image_size": 16}


@pytest.fixture(autouse=True)
def _no_teams() -> Iterator[None]:
    """The device's path on a CPU has PyTorch's threads beside its own, which wait for each other on few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def squares(count: int, size: int = 16) -> Pictures:
    """Photographs that need no resizing, in a format that keeps every level."""
    return Pictures([encode(picture(size, size, seed), "PNG") for seed in range(count)])


@pytest.mark.parametrize(("world_size", "device_crops"), [(2, False), (3, False), (8, False), (3, True)])
def test_any_number_of_ranks_sees_the_same_batches(world_size: int, device_crops: bool) -> None:
    # 9 samples a step, an odd number, and 3 in the last: pairs are cut and ranks go without.
    options = {"augmentation": EVERY, "global_batch": 9, "on_device": device_crops, **WHOLE}
    source = squares(21)
    alone = take(4, train_pipeline(source, **options))
    ranks = [
        take(4, train_pipeline(source, rank=rank, world_size=world_size, threads=1, **options))
        for rank in range(world_size)
    ]
    for step, whole in enumerate(alone):
        parts = [batches[step] for batches in ranks]
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        assert np.concatenate([part.samples for part in parts]).tolist() == whole.samples.tolist()
        assert all(part.images.is_contiguous(memory_format=torch.channels_last) for part in parts)


def test_a_resumed_epoch_goes_on_with_the_same_batches() -> None:
    options = {"augmentation": EVERY, "global_batch": 9, "image_size": 12}
    unbroken = take(5, train_pipeline(photos(21), **options))
    resumed = take(4, train_pipeline(photos(21), start=unbroken[0].cursor, **options))
    assert all(map(same, unbroken[1:], resumed))


@pytest.mark.parametrize("name", ONLY)
def test_each_change_differs_from_epoch_to_epoch_and_from_none(name: str) -> None:
    def by_sample(batch: Batch) -> torch.Tensor:
        return batch.images[batch.samples.argsort()]

    first, second = take(2, train_pipeline(squares(40), augmentation=ONLY[name], global_batch=40, **WHOLE))
    (plain,) = take(1, train_pipeline(squares(40), global_batch=40, **WHOLE))
    for changed in (by_sample(first) != by_sample(second), first.images != plain.images):
        assert changed.flatten(1).any(1).float().mean() > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*ONLY, "every"])
def test_the_device_gives_what_the_host_gives(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares that need no resizing are the same levels on both, so that nothing but the last rounding may differ."""
    monkeypatch.setattr(retouch, "MAX_ELEMENTS", 6 * 3 * 16**2)  # so that a batch goes in parts
    options = {"augmentation": ONLY.get(name, EVERY), "global_batch": 25, "dtype": dtype, **WHOLE}
    host = take(2, train_pipeline(squares(40), **options))
    device = take(2, train_pipeline(squares(40), on_device=True, **options))
    rounding = 4 * torch.finfo(dtype).eps
    for one, other in zip(host, device, strict=True):
        assert torch.equal(one.labels, other.labels)
        assert one.images.dtype == other.images.dtype == dtype
        assert (one.images.float() - other.images.float()).abs().max() <= rounding
        assert other.images.is_contiguous(memory_format=torch.channels_last)


def test_resized_photographs_differ_by_levels_alone() -> None:
    options = {"augmentation": Augmentation(pad=3, erase=0.5, mixup=0.4, cutmix=1.0), "global_batch": 12}
    host = take(2, train_pipeline(photos(12), **options))
    device = take(2, train_pipeline(photos(12), on_device=True, **options))
    for one, other in zip(host, device, strict=True):
        assert (one.images - other.images).abs().max() <= TOLERANCE


@pytest.mark.parametrize("size", [2, 5, 16])
def test_a_shift_is_a_crop_of_the_image_with_mirrored_borders(size: int) -> None:
    pad = min(4, size - 1)
    shifts = draw_shifts(0, 0, np.arange(50), pad)
    images = np.random.default_rng(0).integers(0, 256, (50, size, size, 3), dtype=np.uint8)
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
    moved = shift_squares(torch.from_numpy(images), torch.from_numpy(shifts)).numpy()
    for row, (down, across) in enumerate(shifts + pad):
        expected = padded[row, down : down + size, across : across + size]
        assert np.array_equal(moved[row], expected)
        places = [reflect(size, int(shift)) for shift in shifts[row]]
        assert np.array_equal(images[row][places[0][:, None], places[1]], expected)


def test_every_shift_is_equally_likely() -> None:
    shifts = draw_shifts(0, 0, np.arange(9000), 4)
    assert np.abs(np.stack([np.bincount(axis + 4) for axis in shifts.T]) / 1000 - 1).max() < 0.12


def test_erased_boxes_are_those_of_the_paper() -> None:
    boxes = draw_erased(0, 0, np.arange(8000), 64, 0.25)
    taken = boxes[boxes[:, 2] > 0]
    assert len(taken) / 8000 == pytest.approx(0.25, abs=0.02)
    assert (boxes[:, :2] + boxes[:, 2:] <= 64).all()
    area, ratio = taken[:, 2:].prod(axis=1) / 64**2, taken[:, 3] / taken[:, 2]
    assert 0.015 < area.min() < 0.025
    assert 0.37 < area.max() < 0.42
    assert 0.27 < ratio.min() < 0.35
    assert 2.9 < ratio.max() < 3.7
    assert np.median(ratio) == pytest.approx(1, abs=0.1)
    # One so small stays whole, rather than going altogether.
    assert not draw_erased(0, 0, np.arange(50), 1, 1.0).any()


def test_a_cutout_lies_around_any_pixel_and_ends_with_the_square() -> None:
    boxes = draw_cutouts(0, 0, np.arange(20000), 32, 12)
    top, left, height, width = boxes.T
    assert (np.stack([top, left]) >= 0).all()
    assert (np.stack([top + height, left + width]) <= 32).all()
    assert {height.min(), height.max()} == {width.min(), width.max()} == {6, 12}
    # Whole where the centre has 6 pixels before it and 5 behind it: 21 of 32 places.
    assert (height == 12).mean() == pytest.approx(21 / 32, abs=0.02)
    hits = np.zeros((32, 32))
    for y, x, h, w in boxes[:4000]:
        hits[y : y + h, x : x + w] += 1
    inner = hits[8:24, 8:24] / 4000
    assert inner.min() > 0.11  # 12 × 12 of 32 × 32 are 0.14
    assert inner.max() < 0.17
    # One that is far larger than the square takes all of it.
    assert draw_cutouts(0, 0, np.arange(50), 4, 100).tolist() == [[0, 0, 4, 4]] * 50


def test_an_erased_part_is_the_mean() -> None:
    (whole,) = take(1, train_pipeline(squares(40), global_batch=40, **WHOLE))
    (batch,) = take(1, train_pipeline(squares(40), augmentation=Augmentation(erase=1.0), global_batch=40, **WHOLE))
    boxes = draw_erased(3, 0, batch.samples, 16, 1.0)
    for image, before, (top, left, height, width) in zip(batch.images, whole.images, boxes, strict=True):
        expected = before.clone()
        expected[:, top : top + height, left : left + width] = 0
        assert torch.equal(image, expected)
    assert (np.array(MEAN) / np.array(STD)).any()  # so that zero is no black


def test_labels_are_two_and_the_share_of_the_first() -> None:
    source = squares(20)
    (batch,) = take(1, train_pipeline(source, augmentation=ONLY["cutmix"], global_batch=19, **WHOLE))
    (plain,) = take(1, train_pipeline(source, global_batch=19, **WHOLE))
    labels = batch.labels.numpy()
    assert labels.shape == (19, 3)
    assert batch.labels.dtype == torch.float32
    assert labels[:, 0].tolist() == plain.labels.tolist()
    assert labels[:18, 1].tolist() == plain.labels[:18].reshape(-1, 2).flip(1).flatten().tolist()
    assert torch.equal(batch.images[18], plain.images[18])
    for row in range(18):
        is_own = (batch.images[row] == plain.images[row]).all(dim=0)
        is_others = (batch.images[row] == plain.images[row ^ 1]).all(dim=0)
        assert (is_own | is_others).all()
        assert is_own.float().mean() >= labels[row, 2] - 1e-6  # more where both have the same colour
        assert is_others.float().mean() >= 1 - labels[row, 2] - 1e-6


def test_images_of_an_early_size_are_changed_by_their_own_measure() -> None:
    options = {"augmentation": EVERY, "global_batch": 20, "image_sizes": ((1, 8),), "image_size": 12}
    batches = take(2, train_pipeline(photos(20), **options))
    assert [batch.images.shape[-1] for batch in batches] == [8, 12]


def test_evaluation_knows_nothing_of_it() -> None:
    with pytest.raises(TypeError, match="augmentation"):
        eval_pipeline(photos(4), augmentation=EVERY)


def test_batches_that_are_held_stay_as_they_are() -> None:
    """A rank drops the other halves of cut pairs, and the memory they lie in is still the batch's."""
    held, copies = [], []
    options = {"augmentation": EVERY, "global_batch": 9, "image_size": 12, "rank": 1, "world_size": 3}
    with train_pipeline(photos(27), prefetch_batches=1, **options) as pipeline:
        for batch in islice(pipeline, 10):
            held.append(batch.images)
            copies.append(batch.images.clone())
            del batch
    assert all(map(torch.equal, held, copies))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batches_of_a_gpu_equal_those_of_the_host_under_load(dtype: torch.dtype) -> None:
    options = {"augmentation": EVERY, "global_batch": 128, "dtype": dtype, **WHOLE | {"image_size": 64}}
    source = squares(300, 64)
    host = take(6, train_pipeline(source, **options))
    load = torch.randn(4096, 4096, device="cuda")
    copies = []
    with train_pipeline(source, device=torch.device("cuda"), decoder="cpu", threads=8, **options) as pipeline:
        for batch in islice(pipeline, 6):
            load = (load @ load).clamp(-1, 1)
            copies.append((batch.images.clone(), batch.labels.clone()))
    for expected, (images, labels) in zip(host, copies, strict=True):
        assert torch.equal(labels.cpu(), expected.labels)
        assert (images.float().cpu() - expected.images.float()).abs().max() <= 4 * torch.finfo(dtype).eps
        assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_never_waits_for_a_gpu() -> None:
    from lockstep.data.order import Cursor, plan_step
    from lockstep.data.retouch import draw_retouch

    plan = plan_step(Cursor(), 256, 64, 0, 1, 0, paired=True)
    drawn = draw_retouch(0, plan, 32, EVERY)
    assert drawn is not None
    images = torch.empty(64, 3, 32, 32, device="cuda", memory_format=torch.channels_last)

    def crop(table: torch.Tensor, out: torch.Tensor, *_: object) -> None:
        out.fill_(100)

    def send(array: torch.Tensor) -> torch.Tensor:
        return array.pin_memory().to("cuda", non_blocking=True)

    for _ in range(2):  # the first allocates
        with refuse_waits():
            drawn.make_batch(torch.zeros(64, 10), images, crop, MEAN, STD, send)
