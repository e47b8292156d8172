"""Images that stay on the device: decoded once, cropped anew each epoch, never beyond the limit."""

from itertools import islice

import numpy as np
import pytest
import torch

from lockstep.data import workshop
from lockstep.data.reader import SampleReader
from lockstep.data.resident import Resident, Shelf, estimate_bytes
from lockstep.data.workshop import build_resident
from lockstep.errors import LockstepError
from tests.data.pictures import Pictures, encode, odd_photos, photos, picture
from tests.data.test_pipeline import eval_pipeline, same, take, train_pipeline

CPU = torch.device("cpu")
# Crops too small to be decoded at a reduced scale, which kept images never are.
WHOLE = {"image_size": 48, "global_batch": 10, "on_device": True}


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workshop, "free_device_bytes", lambda device: 1 << 30)


@pytest.mark.usefixtures("roomy")
def test_each_image_is_read_once_and_batches_stay_the_same() -> None:
    source = photos(20)
    expected = take(8, train_pipeline(source, resident="off", **WHOLE))
    with train_pipeline(source, prefetch_batches=1, **WHOLE) as pipeline:
        batches = list(islice(pipeline, 3))  # the fourth is under way
        source.num_reads = 0
        batches += list(islice(pipeline, 5))
        assert source.num_reads <= 4
        assert "stay on the device" in pipeline.describe()
    assert all(map(same, batches, expected))


@pytest.mark.usefixtures("roomy")
def test_evaluation_reads_a_kept_set_once() -> None:
    source = photos(20)
    with eval_pipeline(source, on_device=True, resident="on") as pipeline:
        first = list(pipeline)
        source.num_reads = 0
        assert all(map(same, pipeline, first))
        assert source.num_reads == 0


@pytest.mark.usefixtures("roomy")
def test_a_bad_sample_is_replaced_by_its_kept_neighbour() -> None:
    source = odd_photos(24)
    options = WHOLE | {"global_batch": 24, "bad_share": 0.2}
    kept = take(4, train_pipeline(source, resident="on", **options))
    assert all(map(same, kept, take(4, train_pipeline(source, resident="off", **options))))


def test_nothing_is_kept_beyond_the_limit() -> None:
    resident = Resident(10, max_bytes=100)
    for sample in range(10):
        memory = torch.zeros(30, dtype=torch.uint8)
        resident.keep(np.array([sample]), np.array([memory.data_ptr()]), np.ones((1, 3)), np.array([[2, 5]]), [memory])
    assert resident.num_images == 3
    assert resident.holds(np.arange(10)).tolist() == [True] * 3 + [False] * 7


def test_a_set_larger_than_its_limit_is_kept_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    source = photos(40)
    resident = Resident(40, estimate_bytes(source) / 2)
    monkeypatch.setattr(workshop, "build_resident", lambda *given: resident)
    kept = take(9, train_pipeline(source, **WHOLE))
    assert 0 < resident.num_images < 40
    monkeypatch.setattr(workshop, "build_resident", lambda *given: None)
    assert all(map(same, kept, take(9, train_pipeline(source, **WHOLE))))


def test_a_set_stays_by_itself_only_when_it_takes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SampleReader(photos(30), 0.0)
    needed = estimate_bytes(reader.source)
    for free, stays in ((4.1 * needed, True), (3.9 * needed, False), (0, False)):
        monkeypatch.setattr(workshop, "free_device_bytes", lambda device, free=free: free)
        assert (build_resident("auto", reader, CPU, 0.25) is not None) == stays
        assert build_resident("off", reader, CPU, 0.25) is None


def test_a_set_that_cannot_stay_is_refused_when_asked_to() -> None:
    with pytest.raises(LockstepError, match=r'GiB free; set data\.resident to "auto" or "off"'):
        build_resident("on", SampleReader(photos(3), 0.0), CPU, 0.25)


def test_the_estimate_is_the_decoded_size_and_bad_files_do_no_harm() -> None:
    images = [encode(picture(40, 50)), b"", encode(picture(40, 50)), encode(picture(40, 50))]
    assert estimate_bytes(Pictures(images)) == 4 * 3 * 40 * 50
    assert estimate_bytes(Pictures([b""])) == 0


@pytest.mark.usefixtures("roomy")
def test_images_on_a_shelf_serve_the_pipelines_of_later_runs() -> None:
    source, shelf = photos(20), Shelf()
    options = WHOLE | {"shelf": shelf, "resident": "on", "threads": 1, "prefetch_batches": 1}
    first = take(4, train_pipeline(source, **options))
    source.num_reads = 0
    again = take(4, train_pipeline(source, **options))
    assert source.num_reads == 0
    assert all(map(same, first, again))


@pytest.mark.usefixtures("roomy")
def test_a_shelf_keeps_what_is_asked_for_and_by_whom_it_was_decoded() -> None:
    one, other, shelf = photos(3), photos(3), Shelf()
    kept = {
        (source, way): shelf.take(source, way, lambda: Resident(3, 100))
        for source in (one, other)
        for way in ("cpu", "both")
    }
    assert len(set(map(id, kept.values()))) == 4
    assert shelf.take(one, "cpu", lambda: None) is kept[one, "cpu"]
    shelf.keep_only(other)
    assert shelf.take(one, "cpu", lambda: None) is None
    assert shelf.take(one, "cpu", lambda: Resident(3, 100)) is None  # a decision against it stays, too
    assert shelf.take(other, "both", lambda: None) is kept[other, "both"]
