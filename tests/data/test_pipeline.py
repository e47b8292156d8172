"""The pipeline: what a batch holds depends on (seed, epoch, position) alone; bad samples and threads are dealt with."""

import io
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.decode import decode
from lockstep.data.generated import build_generated
from lockstep.data.order import Cursor, Ledger, expected_ledger
from lockstep.data.pipeline import MAX_DEPTH, Batch, EvalPipeline, TrainPipeline, limit_depth
from lockstep.data.sources import ImageFolder, open_folder
from lockstep.data.workshop import Means
from lockstep.errors import LockstepError
from tests.data.pictures import BAD_AMONG_ODD, huge_jpeg, huge_png, odd_photos

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
CPU = torch.device("cpu")
NUM_TRAIN, NUM_VAL = 70, 50


class Images:
    """Small pictures in memory, the number of each in its colour; the bad ones are cut short."""

    def __init__(self, num_samples: int, bad: tuple[int, ...] = ()) -> None:
        self.num_samples = num_samples
        self.labels = np.arange(num_samples, dtype=np.int64)
        self.bad = bad

    def read(self, index: int) -> bytes:
        if index in self.bad:
            return b"\xff\xd8 cut short"
        file = io.BytesIO()
        Image.new("RGB", (12, 10), (index, 2 * index % 256, 255 - index)).save(file, "PNG")
        return file.getvalue()

    def name(self, index: int) -> str:
        return f"picture-{index}.png"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageFolder, ImageFolder]:
    return open_folder(build_generated(tmp_path_factory.mktemp("cache"), NUM_TRAIN, NUM_VAL))


def train_pipeline(source: ImageFolder | Images, **changes: object) -> TrainPipeline:
    options = {
        "global_batch": 16,
        "rank": 0,
        "world_size": 1,
        "seed": 3,
        "image_size": 32,
        "crop_area": (0.3, 1.0),
        "crop_ratio": (0.75, 4 / 3),
        "flip": True,
        "mean": MEAN,
        "std": STD,
        "threads": 2,
        "prefetch_batches": 2,
        "device": CPU,
        "start": Cursor(),
        "bad_share": 0.0,
    }
    return TrainPipeline(source, **(options | changes))


def eval_pipeline(source: ImageFolder | Images, **changes: object) -> EvalPipeline:
    options = {
        "batch_size": 8,
        "rank": 0,
        "world_size": 1,
        "image_size": 32,
        "eval_resize": 40,
        "mean": MEAN,
        "std": STD,
        "threads": 2,
        "prefetch_batches": 2,
        "device": CPU,
        "bad_share": 0.0,
    }
    return EvalPipeline(source, **(options | changes))


def take(count: int, pipeline: TrainPipeline) -> list[Batch]:
    with pipeline:
        return list(islice(pipeline, count))


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.images, right.images)
        and torch.equal(left.labels, right.labels)
        and left.samples.tolist() == right.samples.tolist()
        and (left.global_size, left.epoch, left.cursor) == (right.global_size, right.epoch, right.cursor)
    )


def test_a_batch_is_network_input(folder: tuple[ImageFolder, ImageFolder]) -> None:
    (batch,) = take(1, train_pipeline(folder[0]))
    assert batch.images.shape == (16, 3, 32, 32)
    assert batch.images.dtype == torch.float32
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.tolist() == folder[0].labels[batch.samples].tolist()
    assert -2.0 <= batch.images.min() < 0 < batch.images.max() <= 2.0


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_any_number_of_ranks_sees_the_same_pixels(folder: tuple[ImageFolder, ImageFolder], world_size: int) -> None:
    alone = take(7, train_pipeline(folder[0]))
    ranks = [
        take(7, train_pipeline(folder[0], rank=rank, world_size=world_size, threads=1)) for rank in range(world_size)
    ]
    for step, whole in enumerate(alone):
        parts = [batches[step] for batches in ranks]
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        assert {part.global_size for part in parts} == {whole.global_size}
        assert {part.cursor for part in parts} == {whole.cursor}


@pytest.mark.parametrize(("threads", "prefetch_batches"), [(1, 1), (3, 4)])
def test_threads_and_depth_change_nothing(
    folder: tuple[ImageFolder, ImageFolder], threads: int, prefetch_batches: int
) -> None:
    changed = take(6, train_pipeline(folder[0], threads=threads, prefetch_batches=prefetch_batches))
    assert all(map(same, take(6, train_pipeline(folder[0])), changed))


@pytest.mark.parametrize("after", [1, 4, 5, 8])
def test_resuming_continues_with_the_same_batches(folder: tuple[ImageFolder, ImageFolder], after: int) -> None:
    unbroken = take(11, train_pipeline(folder[0]))
    resumed = take(11 - after, train_pipeline(folder[0], start=unbroken[after - 1].cursor))
    assert all(map(same, unbroken[after:], resumed))


def test_an_epoch_ends_with_a_smaller_batch_and_the_next_differs(folder: tuple[ImageFolder, ImageFolder]) -> None:
    batches = take(6, train_pipeline(folder[0]))
    assert [len(batch.labels) for batch in batches] == [16, 16, 16, 16, 6, 16]
    assert [batch.epoch for batch in batches] == [0, 0, 0, 0, 0, 1]
    assert batches[0].samples.tolist() != batches[5].samples.tolist()


def test_a_sample_is_cropped_anew_each_epoch(folder: tuple[ImageFolder, ImageFolder]) -> None:
    first, second = take(2, train_pipeline(folder[0], global_batch=NUM_TRAIN))
    images = first.images[first.samples.argsort()], second.images[second.samples.argsort()]
    assert (images[0] != images[1]).flatten(1).any(1).all()


def test_it_tells_when_batches_were_made(folder: tuple[ImageFolder, ImageFolder]) -> None:
    begun = time.perf_counter()
    with train_pipeline(folder[0]) as pipeline:
        assert pipeline.list_made() == []
        list(islice(pipeline, 3))
        made = pipeline.list_made()
    now = time.perf_counter()
    assert [one.ahead for one in made][:3] == [-2, -1, 0]
    assert all(begun < one.begun_s < (one.done_s or now) <= now for one in made)
    assert [one.done_s is not None for one in made][:3] == [True] * 3
    assert sorted(one.begun_s for one in made) == [one.begun_s for one in made]


def test_the_ledger_counts_what_was_handed_out(folder: tuple[ImageFolder, ImageFolder]) -> None:
    ledger = Ledger()
    for batch in take(5, train_pipeline(folder[0])):
        ledger.add(batch.epoch, batch.samples)
    assert ledger == expected_ledger(NUM_TRAIN, 0)


def test_a_rank_without_samples_gets_an_empty_batch() -> None:
    batches = take(1, train_pipeline(Images(2), rank=0, world_size=3, global_batch=2))
    assert batches[0].images.shape == (0, 3, 32, 32)
    assert batches[0].labels.shape == (0,)
    assert batches[0].global_size == 2


def test_a_bad_sample_is_replaced_by_its_next_readable_neighbour() -> None:
    source = Images(20, bad=(4, 5, 19))
    with train_pipeline(source, global_batch=20, bad_share=0.15) as pipeline:
        batches = [next(pipeline) for _ in range(2)]
        assert sorted(pipeline.bad) == [4, 5, 19]
        assert pipeline.bad[4] == "picture-4.png (no image of a kind that is read)"
    for batch in batches:
        assert sorted(batch.samples.tolist()) == list(range(20))
        replaced = {4: 6, 5: 6, 19: 0}
        assert batch.labels.tolist() == [replaced.get(sample, sample) for sample in batch.samples.tolist()]
        levels = torch.round((batch.images[:, 0].mean((1, 2)) * STD[0] + MEAN[0]) * 255)
        assert levels.tolist() == batch.labels.tolist()


def test_too_many_bad_samples_stop_the_run_with_their_names() -> None:
    source = Images(40, bad=tuple(range(10, 20)))
    sentence = r"3 of 40 samples .* allows 2: picture-1\d\.png .* raise data\.bad_share\."
    with pytest.raises(LockstepError, match=sentence):
        take(3, train_pipeline(source, bad_share=0.05, threads=1))


def test_a_set_without_any_readable_sample_stops() -> None:
    with pytest.raises(LockstepError, match="None of the 3 samples can be read"):
        take(1, train_pipeline(Images(3, bad=(0, 1, 2)), bad_share=1.0))


def test_a_file_that_vanished_is_a_bad_sample(tmp_path: Path) -> None:
    source, _ = open_folder(build_generated(tmp_path, 20, 10))
    Path(source.name(7)).unlink()
    with train_pipeline(source, global_batch=20, bad_share=0.05) as pipeline:
        next(pipeline)
        assert pipeline.bad == {7: f"{source.name(7)} (No such file or directory)"}


def test_evaluation_sees_the_whole_set_in_order(folder: tuple[ImageFolder, ImageFolder]) -> None:
    with eval_pipeline(folder[1]) as pipeline:
        batches = list(pipeline)
    assert [len(batch.labels) for batch in batches] == [8, 8, 8, 8, 8, 8, 2]
    assert torch.cat([batch.labels for batch in batches]).tolist() == folder[1].labels.tolist()
    image = Image.fromarray(decode(folder[1].read(9))).resize((40, 40), Image.Resampling.BILINEAR).crop((4, 4, 36, 36))
    expected = (np.asarray(image) / 255 - 0.5) / 0.25
    assert np.abs(batches[1].images[1].permute(1, 2, 0).numpy() - expected).max() < 2.5 / 255 / 0.25  # two levels


@pytest.mark.parametrize("world_size", [2, 3, 9])
def test_evaluation_batches_are_the_same_for_any_number_of_ranks(
    folder: tuple[ImageFolder, ImageFolder], world_size: int
) -> None:
    with eval_pipeline(folder[1]) as pipeline:
        alone = list(pipeline)
    dealt: dict[int, Batch] = {}
    for rank in range(world_size):
        with eval_pipeline(folder[1], rank=rank, world_size=world_size) as pipeline:
            dealt |= {rank + turn * world_size: batch for turn, batch in enumerate(pipeline)}
    assert sorted(dealt) == list(range(len(alone)))
    assert all(same(dealt[index], batch) for index, batch in enumerate(alone))


def test_evaluation_can_be_repeated(folder: tuple[ImageFolder, ImageFolder]) -> None:
    with eval_pipeline(folder[1]) as pipeline:
        assert all(map(same, pipeline, pipeline))


def test_evaluation_leaves_bad_samples_out() -> None:
    with eval_pipeline(Images(20, bad=(3, 11)), bad_share=0.1) as pipeline:
        batches = list(pipeline)
        assert sorted(pipeline.bad) == [3, 11]
    assert [batch.global_size for batch in batches] == [7, 7, 4]
    labels = torch.cat([batch.labels for batch in batches]).tolist()
    assert labels == [sample for sample in range(20) if sample not in (3, 11)]
    assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in batches)


def decode_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep-decode")]


def test_no_thread_is_left_after_close(folder: tuple[ImageFolder, ImageFolder]) -> None:
    pipeline = train_pipeline(folder[0], threads=4)
    next(pipeline)
    assert decode_threads()
    pipeline.close()
    assert not decode_threads()


def test_an_error_in_the_loop_leaves_no_thread(folder: tuple[ImageFolder, ImageFolder]) -> None:
    def run(pipeline: TrainPipeline) -> None:
        with pipeline:
            next(pipeline)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(train_pipeline(folder[0]))
    assert not decode_threads()


NEVER_CLOSES = """
import sys, torch
from lockstep.data.order import Cursor
from lockstep.data.pipeline import TrainPipeline
from lockstep.data.sources import open_folder
pipeline = TrainPipeline(
    open_folder(sys.argv[1])[0], global_batch=16, rank=0, world_size=1, seed=0, image_size=32, crop_area=(0.5, 1.0),
    crop_ratio=(0.75, 1.33), flip=True, mean=(0.5,) * 3, std=(0.25,) * 3, threads=2, prefetch_batches=4,
    device=torch.device("cpu"), start=Cursor(), bad_share=0.0,
)
next(pipeline)
raise SystemExit("left without closing")
"""


def test_a_process_that_never_closes_still_ends(tmp_path: Path) -> None:
    root = build_generated(tmp_path, 40, 10)
    ended = subprocess.run([sys.executable, "-c", NEVER_CLOSES, str(root)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.strip()) == (1, "left without closing")


def test_decode_threads_start_no_teams_of_their_own(folder: tuple[ImageFolder, ImageFolder]) -> None:
    tasks = Path("/proc/self/task")
    before = len(list(tasks.iterdir()))
    with train_pipeline(folder[0], image_size=224, threads=2) as pipeline:
        for _ in range(3):
            next(pipeline)
        assert len(list(tasks.iterdir())) <= before + 2


def test_images_have_the_size_of_their_epoch(folder: tuple[ImageFolder, ImageFolder]) -> None:
    options = {"global_batch": 35, "image_sizes": ((1, 16), (3, 24))}
    batches = take(8, train_pipeline(folder[0], **options))
    assert [(batch.epoch, batch.images.shape[-1]) for batch in batches] == [
        (0, 16), (0, 16), (1, 24), (1, 24), (2, 24), (2, 24), (3, 32), (3, 32),
    ]  # fmt: skip
    resumed = take(2, train_pipeline(folder[0], start=batches[4].cursor, **options))
    assert all(map(same, resumed, batches[5:7]))


def test_every_kind_of_file_is_dealt_with() -> None:
    source = odd_photos(30)
    source.encoded[28] = huge_jpeg(20_000)
    source.encoded[29] = huge_png(20_000)
    with train_pipeline(source, global_batch=30, bad_share=0.2) as pipeline:
        (batch,) = islice(pipeline, 1)
        assert sorted(pipeline.bad) == [*BAD_AMONG_ODD, 29]
    white = batch.images[batch.samples.tolist().index(28)]
    assert white.min() > 1.9


def test_memory_of_batches_that_nobody_holds_is_used_again(folder: tuple[ImageFolder, ImageFolder]) -> None:
    with train_pipeline(folder[0], prefetch_batches=1) as pipeline:
        addresses = [next(pipeline).images.data_ptr() for _ in range(20)]
    assert len(set(addresses)) <= 4


def test_batches_that_are_held_stay_as_they_are(folder: tuple[ImageFolder, ImageFolder]) -> None:
    held, copies = [], []
    with train_pipeline(folder[0], prefetch_batches=1) as pipeline:
        for batch in islice(pipeline, 10):
            held.append(batch.images[1:3])
            copies.append(batch.images[1:3].clone())
            del batch
    assert all(map(torch.equal, held, copies))


class SlowImages(Images):
    """Pictures on a disk that takes its time."""

    def read(self, index: int) -> bytes:
        time.sleep(0.005)
        return super().read(index)


def test_the_pipeline_works_further_ahead_when_the_step_waits_for_idle_threads() -> None:
    # A batch of one row is the work of one thread, so that only more batches at once keep eight of them busy.
    with train_pipeline(SlowImages(64), threads=8, global_batch=1, prefetch_batches=0) as pipeline:
        assert "2 batches ahead" in pipeline.describe()
        for _ in islice(pipeline, 60):
            pass
        assert "8 decode threads" in pipeline.describe()
        assert "2 batches ahead" not in pipeline.describe()


def test_a_depth_that_is_set_stays() -> None:
    with train_pipeline(SlowImages(64), threads=8, global_batch=1, prefetch_batches=2) as pipeline:
        for _ in islice(pipeline, 40):
            pass
        assert "2 batches ahead" in pipeline.describe()


def test_an_evaluation_can_be_begun_before_it_is_asked_for(folder: tuple[ImageFolder, ImageFolder]) -> None:
    with eval_pipeline(folder[1]) as pipeline:
        expected = list(pipeline)
        pipeline.prepare()
        pipeline.prepare()
        assert all(map(same, list(pipeline), expected))
        assert len(list(pipeline)) == len(expected)


@pytest.mark.parametrize("decoder", ["nvjpeg", "both"])
def test_nvjpeg_without_a_gpu_is_refused(decoder: str) -> None:
    with pytest.raises(LockstepError, match=rf'data\.decoder = "{decoder}" needs a CUDA device'):
        train_pipeline(Images(4), decoder=decoder)


def test_a_setting_beyond_measure_prepares_no_more_than_a_short_run_takes(
    folder: tuple[ImageFolder, ImageFolder],
) -> None:
    usual, deep = (train_pipeline(folder[0], prefetch_batches=ahead) for ahead in (2, 1 << 20))
    with deep:
        first = next(deep)
        assert len(deep._ahead) <= MAX_DEPTH
        batches = [first, *islice(deep, 5)]
        assert len(deep._ahead) <= MAX_DEPTH + 6
    assert all(map(same, batches, take(6, usual)))


def test_what_is_asked_for_is_reached_by_and_by(folder: tuple[ImageFolder, ImageFolder]) -> None:
    with train_pipeline(folder[0], prefetch_batches=12) as pipeline:
        assert pipeline.depth == 12
        ahead = [len(pipeline._ahead) for _ in islice(pipeline, 6)]
    assert ahead == [8, 9, 10, 11, 12, 12]


def test_batches_ahead_are_limited_by_their_bytes() -> None:
    means = Means(mean=MEAN, std=STD, threads=1, device=CPU)
    photographs = 256 * 224**2
    assert limit_depth(0, photographs, means) == 0
    assert limit_depth(20, photographs, means) == 20
    depth = limit_depth(1 << 20, photographs, means)
    assert depth * 12 * photographs < 2**32 < (depth + 2) * 12 * photographs
    assert limit_depth(1 << 20, photographs, Means(**means, dtype=torch.bfloat16)) in (2 * depth, 2 * depth + 1)
    assert limit_depth(1 << 20, 100 * photographs, means) == MAX_DEPTH
    assert limit_depth(1 << 20, 1, means) < 1 << 16
