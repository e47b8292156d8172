"""The device's path, run on the CPU's memory: the same batches as the host's path, whoever decodes."""

import signal
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.data import block, device_batch, workshop
from lockstep.data.balance import Balance
from lockstep.data.decode import decode
from lockstep.data.jpeg_frame import Encoded
from lockstep.data.nvjpeg import NUM_THREADS, Nvjpeg
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch, Pipeline, TrainPipeline
from lockstep.data.sources import open_folder
from lockstep.kernels.crop import crop_resize
from tests.data.pictures import BAD_AMONG_ODD, BAD_ICONS, Pictures, encode, icons, odd_photos, photos, picture
from tests.data.test_pipeline import STD, eval_pipeline, same, take, train_pipeline
from tests.data.test_read_process import wait_until

# The host's path rounds to whole levels twice, the kernel never does; a level is 1 / 255 / std.
TOLERANCE = 1.51 / 255 / STD[0]


def on_device(source: Pictures, **changes: object) -> TrainPipeline:
    return train_pipeline(source, on_device=True, **changes)


def assert_alike(left: list[Batch], right: list[Batch], tolerance: float = TOLERANCE) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.samples.tolist() == other.samples.tolist()
        assert one.labels.tolist() == other.labels.tolist()
        assert (one.images - other.images).abs().max() <= tolerance
        assert one.images.is_contiguous(memory_format=torch.channels_last)


def test_training_batches_equal_those_of_the_host() -> None:
    source = photos(20)
    assert_alike(take(4, on_device(source)), take(4, train_pipeline(source)))


def test_images_decoded_at_a_reduced_scale_equal_those_of_the_host() -> None:
    source = photos(12, low=100, high=300)
    options = {"image_size": 16, "global_batch": 12, "crop_area": (0.5, 1.0)}
    assert_alike(take(2, on_device(source, **options)), take(2, train_pipeline(source, **options)))


def test_evaluation_batches_equal_those_of_the_host() -> None:
    source = photos(20, low=30, high=300)
    with eval_pipeline(source, on_device=True) as device, eval_pipeline(source) as host:
        assert_alike(list(device), list(host))


def test_the_kernel_itself_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_batch, "crop_resize_plain", crop_resize)
    source = photos(3, low=12, high=20)
    options = {"image_size": 8, "global_batch": 3}
    assert_alike(take(1, on_device(source, **options)), take(1, train_pipeline(source, **options)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device_crops", [False, True])
def test_images_come_in_the_precision_asked_for(dtype: torch.dtype, device_crops: bool) -> None:
    (batch,) = take(1, train_pipeline(photos(16), dtype=dtype, on_device=device_crops))
    (exact,) = take(1, train_pipeline(photos(16)))
    assert batch.images.dtype == dtype
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert (batch.images.float() - exact.images).abs().max() < TOLERANCE + 2**-7


def test_blocks_too_large_for_one_piece_of_memory_go_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    source = photos(16)
    whole = take(1, on_device(source))
    monkeypatch.setattr(device_batch, "MAX_SLAB_BYTES", 20_000)
    assert_alike(take(1, on_device(source)), whole, tolerance=0)


def test_bad_samples_are_replaced_as_on_the_host() -> None:
    source = odd_photos(24)
    batches = []
    for device_crops in (True, False):
        with train_pipeline(source, on_device=device_crops, bad_share=0.2, global_batch=24) as pipeline:
            batches.append(list(islice(pipeline, 2)))
            assert sorted(pipeline.bad) == BAD_AMONG_ODD
    assert_alike(*batches)


def test_bad_samples_are_left_out_of_evaluation_as_on_the_host() -> None:
    source = odd_photos(24)
    batches = []
    for device_crops in (True, False):
        with eval_pipeline(source, on_device=device_crops, bad_share=0.2) as pipeline:
            batches.append(list(pipeline))
            assert sorted(pipeline.bad) == BAD_AMONG_ODD
    assert_alike(*batches)


def test_a_batch_of_bad_samples_only_is_an_empty_one() -> None:
    source = Pictures([b"bad"] * 8 + [encode(picture(40, 40))] * 8)
    with eval_pipeline(source, on_device=True, bad_share=1.0) as pipeline:
        assert [len(batch.labels) for batch in pipeline] == [0, 8]


class CpuNvjpeg:
    """What nvJPEG does, on the CPU: planar images of plain JPEGs; it refuses some, as nvJPEG may."""

    can_decode = staticmethod(Nvjpeg.can_decode)

    def __init__(self, refused: tuple[bytes, ...] = ()) -> None:
        self.refused = refused
        self.num_decoded = 0

    def decode(self, encoded: list[Encoded], reader: object) -> list[Tensor] | None:
        if any(item in self.refused for item in encoded):
            return None
        self.num_decoded += len(encoded)
        return [torch.from_numpy(decode(item)).permute(2, 0, 1).contiguous() for item in encoded]

    def hold(self, images: list[Tensor], until: object) -> None:
        pass


@pytest.mark.parametrize("read_processes", [0, 2])
@pytest.mark.parametrize("decoder", ["nvjpeg", "both"])
def test_nvjpeg_takes_what_it_can_and_leaves_the_rest(
    decoder: str, read_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = odd_photos(64)
    nvjpeg = CpuNvjpeg(refused=(source.encoded[0],))
    monkeypatch.setattr(workshop, "choose_decoder", lambda wanted, device: wanted)
    monkeypatch.setattr(workshop, "Nvjpeg", lambda device: nvjpeg)
    options = {"bad_share": 0.2, "global_batch": 64}
    with on_device(source, decoder=decoder, read_processes=read_processes, **options) as pipeline:
        wait_for_processes(pipeline)
        batches = list(islice(pipeline, 6))
        assert sorted(pipeline.bad) == BAD_AMONG_ODD
    assert_alike(batches, take(6, train_pipeline(source, **options)))
    assert nvjpeg.num_decoded > 0  # in the sixth, for which the refused image is made smaller and so is not nvJPEG's


def wait_for_processes(pipeline: Pipeline) -> None:
    """Until all are ready: they might only be when all is over."""
    path = pipeline._workshop._path
    assert isinstance(path, device_batch.DevicePath)
    for process in path.read_pool._all:
        wait_until(lambda process=process: process.is_ready)  # type: ignore[misc]


@pytest.mark.parametrize("read_processes", [1, 2])
def test_what_a_process_has_read_stays_until_nvjpeg_has_decoded_it(
    read_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowNvjpeg(CpuNvjpeg):
        def decode(self, encoded: list[Encoded], reader: object) -> list[Tensor] | None:
            time.sleep(0.05)
            return super().decode(encoded, reader)

    source = photos(256, low=20, high=40)
    monkeypatch.setattr(workshop, "choose_decoder", lambda wanted, device: wanted)
    monkeypatch.setattr(workshop, "Nvjpeg", lambda device: SlowNvjpeg())
    options = {"image_size": 20, "global_batch": 256, "crop_area": (0.2, 0.3)}
    with on_device(source, decoder="both", read_processes=read_processes, **options) as pipeline:
        wait_for_processes(pipeline)
        before = source.num_reads
        batches = list(islice(pipeline, 2))
        # One process for each thread reads everything, and this one nothing.
        assert source.num_reads == before or read_processes < NUM_THREADS
    assert_alike(batches, take(2, train_pipeline(source, **options)))


def test_processes_that_do_not_answer_do_not_keep_a_run_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workshop, "choose_decoder", lambda wanted, device: wanted)
    monkeypatch.setattr(workshop, "Nvjpeg", lambda device: CpuNvjpeg())
    pipeline = on_device(photos(64), decoder="both", read_processes=2, global_batch=64)
    wait_for_processes(pipeline)
    for process in pipeline._workshop._path.read_pool._all:  # type: ignore[union-attr]
        process.process.send_signal(signal.SIGSTOP)
    pipeline._start(Cursor())
    closing = threading.Thread(target=pipeline.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workshop, "free_device_bytes", lambda device: 1 << 30)


@pytest.mark.parametrize("resident", ["on", "off"])
def test_batches_are_the_same_to_the_last_bit_whether_processes_decode(
    resident: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy(monkeypatch)
    source, options = icons(64), {"bad_share": 0.1, "global_batch": 40, "resident": resident}
    found = []
    for read_processes in (0, 2):
        with on_device(source, read_processes=read_processes, **options) as pipeline:
            wait_for_processes(pipeline)
            found.append((list(islice(pipeline, 5)), pipeline.bad))
        assert sorted(pipeline.bad) == BAD_ICONS
    (without, bad), (with_processes, also_bad) = found
    assert all(map(same, without, with_processes))
    assert also_bad == bad  # word for word
    assert "picture-7.jpg (image file is truncated" in bad[7]


def test_evaluation_is_the_same_to_the_last_bit_whether_processes_decode() -> None:
    source, options = icons(64), {"bad_share": 0.1, "on_device": True}
    with (
        eval_pipeline(source, read_processes=2, **options) as by_processes,
        eval_pipeline(source, **options) as by_threads,
    ):
        wait_for_processes(by_processes)
        assert all(map(same, by_processes, by_threads))
        assert by_processes.bad == by_threads.bad


def write_folder(folder: Path) -> None:
    """Pictures of two kinds as PNG files."""
    for split in ("train", "val"):
        for name in ("ants", "bees"):
            (folder / split / name).mkdir(parents=True)
            for number in range(12):
                data = encode(picture(32, 32, number + len(name)), "PNG")
                (folder / split / name / f"{number}.png").write_bytes(data)


def test_a_folder_of_png_files_is_decoded_by_processes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    train, val = open_folder(tmp_path)
    options = {"read_processes": 2, "on_device": True, "threads": 4}
    expected = take(6, train_pipeline(train, on_device=True)), list(eval_pipeline(val, on_device=True))
    with train_pipeline(train, **options) as training, eval_pipeline(val, **options) as evaluation:
        for pipeline in (training, evaluation):
            wait_for_processes(pipeline)
            assert "2 processes reading and decoding" in pipeline.describe()
            assert pipeline.crew().read_processes == 2
        monkeypatch.setattr(block, "decode", forbidden)
        monkeypatch.setattr(type(train), "read", forbidden)
        assert all(map(same, islice(training, 6), expected[0]))
        assert all(map(same, evaluation, expected[1]))


def forbidden(*_: object) -> None:
    raise AssertionError("done in this process")


@pytest.mark.parametrize("num_killed", [1, 2])
def test_processes_killed_in_the_middle_of_an_epoch_are_done_without(num_killed: int) -> None:
    source, options = icons(64), {"bad_share": 0.1, "global_batch": 16}
    expected = take(8, on_device(source, **options))
    with on_device(source, read_processes=2, **options) as pipeline:
        wait_for_processes(pipeline)
        batches = [next(pipeline)]
        path = pipeline._workshop._path
        assert isinstance(path, device_batch.DevicePath)
        for process in path.read_pool._all[:num_killed]:
            process.process.kill()
        batches += islice(pipeline, 7)
        assert f"({num_killed} died)" in pipeline.describe()
    assert all(map(same, batches, expected))
    assert sorted(pipeline.bad) == BAD_ICONS


def test_processes_end_when_every_image_is_on_the_device_or_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy(monkeypatch)
    source, options = icons(64), {"bad_share": 0.1, "global_batch": 16, "resident": "on"}
    expected = take(12, on_device(source, **options))
    with on_device(source, read_processes=2, **options) as pipeline:
        wait_for_processes(pipeline)
        path = pipeline._workshop._path
        assert isinstance(path, device_batch.DevicePath)
        processes = [process.process for process in path.read_pool._all]
        batches = [next(pipeline)]
        assert "processes" in pipeline.describe()
        batches += islice(pipeline, 11)
        wait_until(lambda: all(process.returncode is not None for process in processes))
        assert "process" not in pipeline.describe()
        assert pipeline.crew().read_processes == 0
    assert all(map(same, batches, expected))


@pytest.mark.parametrize("is_begun", [False, True])
def test_processes_that_decode_and_do_not_answer_do_not_keep_a_run_from_ending(is_begun: bool) -> None:
    pipeline = on_device(icons(64), read_processes=2, global_batch=64, threads=6)
    if is_begun:
        wait_for_processes(pipeline)
    processes = [process.process for process in pipeline._workshop._path.read_pool._all]  # type: ignore[union-attr]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    pipeline._start(Cursor())
    closing = threading.Thread(target=pipeline.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert all(process.returncode is not None for process in processes)


def test_the_balance_is_told_of_every_batch_and_of_those_the_device_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(Balance, "note", lambda self, ran_dry: told.append(ran_dry))
    with on_device(photos(16), global_batch=4) as pipeline:
        for number in range(6):
            if number == 3:
                monkeypatch.setattr(Pictures, "read", slowly(Pictures.read))
            next(pipeline)
            if number < 3:
                wait_until(lambda: pipeline._ahead[0][1].is_ready)
    assert len(told) == 6
    assert told[1:3] == [False, False]
    assert told[5]


def slowly(read: Callable[[Pictures, int], bytes]) -> Callable[[Pictures, int], bytes]:
    def read_slowly(source: Pictures, index: int) -> bytes:
        time.sleep(0.2)
        return read(source, index)

    return read_slowly


def test_posters_are_left_to_the_decoder_that_reduces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nvjpeg = CpuNvjpeg()
    monkeypatch.setattr(workshop, "choose_decoder", lambda wanted, device: wanted)
    monkeypatch.setattr(workshop, "Nvjpeg", lambda device: nvjpeg)
    options = {"image_size": 8, "global_batch": 8, "crop_area": (0.9, 1.0)}
    take(1, on_device(photos(8, low=100, high=200), decoder="nvjpeg", prefetch_batches=1, **options))
    assert nvjpeg.num_decoded == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("decoder", ["cpu", "nvjpeg", "both"])
def test_batches_of_a_gpu_equal_those_of_the_host_under_load(decoder: str) -> None:
    if decoder != "cpu":
        pytest.importorskip("torchvision")
    source = photos(600, low=100, high=400)
    source.encoded[7] = encode(picture(80, 90).mean(axis=2).astype(np.uint8), subsampling=-1)
    source.encoded[11] = source.encoded[11][:-200]
    options = {"global_batch": 128, "image_size": 96, "bad_share": 0.01}
    host = take(12, train_pipeline(source, **options))
    load = torch.randn(4096, 4096, device="cuda")
    copies = []
    with train_pipeline(
        source, device=torch.device("cuda"), decoder=decoder, resident="off", threads=8, **options
    ) as pipeline:
        for batch in islice(pipeline, 12):
            # The step's stream is far behind the host, so memory reused or read too early would show.
            load = (load @ load).clamp(-1, 1)
            copies.append((batch.images.clone(), batch.labels.clone()))
    # nvJPEG spreads colour and rounds in its own way: a few levels on smooth pictures.
    tolerance = TOLERANCE if decoder == "cpu" else 6 / 255 / STD[0]
    for expected, (images, labels) in zip(host, copies, strict=True):
        assert torch.equal(labels.cpu(), expected.labels)
        assert (images.cpu() - expected.images).abs().max() <= tolerance
        assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", ["on", "off"])
def test_a_long_run_on_a_gpu_takes_no_more_memory_than_a_short_one(resident: str) -> None:
    source = photos(256, low=100, high=400)
    options = {"global_batch": 64, "image_size": 96, "device": torch.device("cuda"), "threads": 8}
    with train_pipeline(source, resident=resident, dtype=torch.float16, **options) as pipeline:
        for _ in islice(pipeline, 40):
            pass
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        for _ in islice(pipeline, 200):
            pass
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() <= 1.5 * before
