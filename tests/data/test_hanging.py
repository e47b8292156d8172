"""Reads that do not come: named as bad samples, their rows done by others, and no obstacle to the end of a process."""

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from lockstep.data import prefetch, threads, workshop
from lockstep.data.decode import read_header
from lockstep.data.device_batch import DevicePath
from lockstep.data.generated import build_generated
from lockstep.data.order import Cursor
from lockstep.data.pack import pack_folder
from lockstep.data.read_process import ReadPool, ReadProcess
from lockstep.data.resident import estimate_bytes
from lockstep.data.shards import OpenShard, open_shards
from lockstep.data.sources import open_folder
from lockstep.errors import LockstepError
from tests.data.pictures import Hanging, icons, photos
from tests.data.test_device_batch import CpuNvjpeg, wait_for_processes
from tests.data.test_pipeline import eval_pipeline, train_pipeline
from tests.data.test_read_process import is_running, open_process, wait_until

LIMIT_S = 1.0
ROOT = Path(__file__).parents[2]


def hanging(count: int, *hangs: int, names_hang: bool = False) -> Hanging:
    return Hanging(photos(count).encoded, set(hangs), names_hang)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CLOSE_S", 0.5)
    monkeypatch.setattr(prefetch, "LOOK_S", 0.05)
    monkeypatch.setattr(threads, "LOOK_S", 0.05)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_sample_that_does_not_come_is_bad_and_holds_up_nobody(num_threads: int) -> None:
    source = hanging(24, 5, 17)
    options = {"global_batch": 24, "bad_share": 0.1, "threads": num_threads}
    with train_pipeline(source, read_timeout_s=LIMIT_S, **options) as pipeline:
        batches = list(islice(pipeline, 2))
        assert pipeline.bad == {sample: f"picture-{sample}.jpg (not read within 1 s)" for sample in (5, 17)}
    expected = [{5: 6, 17: 18}.get(sample, sample) for sample in batches[0].samples.tolist()]
    assert batches[0].labels.tolist() == expected
    source.released = True


def test_what_comes_too_late_is_dropped() -> None:
    source = hanging(24, 5)
    with train_pipeline(source, read_timeout_s=LIMIT_S, global_batch=24, bad_share=0.1, threads=2) as pipeline:
        held = next(pipeline)
        copy = held.images.clone()
        source.released = True
        later = list(islice(pipeline, 5))
        wait_until(lambda: sum(name.startswith("lockstep-decode") for name in thread_names()) == 2)
        assert list(pipeline.bad) == [5]
    assert torch.equal(held.images, copy)
    for batch in later:
        assert batch.labels.tolist() == [6 if sample == 5 else sample for sample in batch.samples.tolist()]


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_slow_reads_within_the_limit_are_good() -> None:
    source = hanging(8, 3)
    threading.Timer(0.5, lambda: setattr(source, "released", True)).start()
    with train_pipeline(source, read_timeout_s=60.0, global_batch=8) as pipeline:
        next(pipeline)
        assert not pipeline.bad


def test_evaluation_leaves_out_what_does_not_come() -> None:
    source = hanging(16, 3)
    with eval_pipeline(source, read_timeout_s=LIMIT_S, bad_share=0.1) as pipeline:
        labels = torch.cat([batch.labels for batch in pipeline]).tolist()
    assert labels == [sample for sample in range(16) if sample != 3]
    source.released = True


def test_a_name_that_does_not_come_is_done_without() -> None:
    source = hanging(8, 3, names_hang=True)
    source.encoded[3] = b"no image"
    source.read = lambda index: source.encoded[index]  # type: ignore[method-assign]
    with train_pipeline(source, read_timeout_s=LIMIT_S, global_batch=8, bad_share=0.2) as pipeline:
        next(pipeline)
        assert pipeline.bad == {3: "picture-3.jpg (not read within 1 s)"}
    source.released = True


def test_one_bad_sample_more_than_allowed_stops_the_run() -> None:
    source = hanging(24, 5)
    with (
        train_pipeline(source, read_timeout_s=LIMIT_S, global_batch=24) as pipeline,
        pytest.raises(LockstepError, match=r"1 of 24 samples .* allows 0: picture-5\.jpg \(not read within 1 s\)"),
    ):
        next(pipeline)
    source.released = True


def test_a_disk_that_hangs_is_one_sentence() -> None:
    source = hanging(64, *range(64))
    with (
        train_pipeline(source, read_timeout_s=0.05, global_batch=64, bad_share=1.0, threads=8) as pipeline,
        pytest.raises(LockstepError, match=r"16 reads did not come within 0\.05 s, the last of picture-\d+\.jpg; see"),
    ):
        next(pipeline)
    source.released = True


def test_closing_waits_only_so_long_for_a_thread_that_hangs() -> None:
    source = hanging(24, *range(24))
    pipeline = train_pipeline(source, global_batch=24)
    pipeline._start(Cursor())
    start = time.monotonic()
    pipeline.close()
    assert time.monotonic() - start < 5
    source.released = True


LEAVES = """
import os, time
from lockstep.data import threads
from lockstep.data.order import Cursor
from tests.data.pictures import Pictures, photos
from tests.data.test_pipeline import train_pipeline
class Stuck(Pictures):
    def read(self, index):
        return os.read(os.pipe()[0], 1) if index == 5 else super().read(index)  # in the system, as a disk would have it
pipeline = train_pipeline(Stuck(photos(24).encoded), global_batch=24)
pipeline._start(Cursor())
time.sleep(0.5)
threads.CLOSE_S = 0.5
raise SystemExit("left while a read hangs")
"""


def test_a_process_ends_while_a_read_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stderr.strip()) == (1, "left while a read hangs")


@pytest.mark.parametrize("read_processes", [0, 1])
def test_rows_for_nvjpeg_are_done_by_others_where_their_read_hangs(
    read_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hanging(24, 5)
    monkeypatch.setattr(workshop, "choose_decoder", lambda wanted, device: wanted)
    monkeypatch.setattr(workshop, "Nvjpeg", lambda device: CpuNvjpeg())
    options = {"decoder": "both", "on_device": True, "read_processes": read_processes}
    with train_pipeline(source, read_timeout_s=1.0, global_batch=24, bad_share=0.1, **options) as pipeline:
        wait_for_processes(pipeline)
        for batch in islice(pipeline, 3):
            assert batch.labels.tolist() == [6 if sample == 5 else sample for sample in batch.samples.tolist()]
        assert list(pipeline.bad) == [5]
        path = pipeline._workshop._path
        assert isinstance(path, DevicePath)
        assert len(path.read_pool) == read_processes
    source.released = True


class HangsHere(Hanging):
    """Samples that come only to other processes."""

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ = state | {"released": True}


@pytest.mark.parametrize("kind", [Hanging, HangsHere])
def test_rows_that_processes_decode_are_done_by_others_where_their_read_hangs(kind: type[Hanging]) -> None:
    encoded = icons(24).encoded
    encoded[19] = encoded[18]
    source = kind(encoded, {7})  # damaged, so that whoever decodes leaves it to a thread
    options = {"on_device": True, "read_processes": 1, "read_timeout_s": 1.0, "global_batch": 24, "bad_share": 0.1}
    with train_pipeline(source, **options) as pipeline:
        wait_for_processes(pipeline)
        for batch in islice(pipeline, 3):
            assert batch.labels.tolist() == [8 if sample == 7 else sample for sample in batch.samples.tolist()]
        assert pipeline.bad == {7: "picture-7.jpg (not read within 1 s)"}
    source.released = True


def test_a_process_that_hangs_is_replaced() -> None:
    pool = ReadPool(hanging(8, 3), 1, LIMIT_S)
    with pool.lend() as process:
        assert process is not None
        wait_until(lambda: process.is_ready)
        assert process.load([2, 3, 4]) == [None] * 3
    with pool.lend() as other:
        assert other is not None
        assert other is not process
        wait_until(lambda: other.is_ready)
        assert None not in other.load([2, 4])
    assert process.process.returncode == -signal.SIGKILL
    assert pool.describe() == "1 process reading"
    pool.close()


PARENT = """
import threading
from tests.data.pictures import Hanging, photos
from tests.data.test_read_process import open_process
process = open_process(Hanging(photos(4).encoded, {1}))
threading.Thread(target=process.load, args=([0, 1],), daemon=True).start()
print(process.process.pid, flush=True)
threading.Event().wait(600)
"""


def test_a_process_that_hangs_does_not_outlive_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.5)  # for it to hang
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(child))


def test_a_process_that_takes_its_time_is_not_mistaken_for_one_that_hangs() -> None:
    process: ReadProcess = open_process(photos(8))
    assert None not in process.load(list(range(8)))
    assert not process.is_hung
    process.close()


def test_a_shard_that_hangs_is_named_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_folder(build_generated(tmp_path / "cache", 20, 10), tmp_path / "pack")
    train, _ = open_shards(tmp_path / "pack")
    place, read = train._blocks[7] * 512, OpenShard.read
    released = threading.Event()

    def hang(shard: OpenShard, offset: int, length: int) -> bytes:
        if place - 512 <= offset <= place:
            released.wait(120)
        return read(shard, offset, length)

    monkeypatch.setattr(OpenShard, "read", hang)
    with train_pipeline(train, read_timeout_s=LIMIT_S, global_batch=20, bad_share=0.05) as pipeline:
        next(pipeline)
        assert pipeline.bad == {7: f"{tmp_path}/pack/train-000000.tar: sample 7 (not read within 1 s)"}
    released.set()


def test_the_estimate_of_a_sets_size_does_not_wait_for_what_hangs() -> None:
    source = hanging(8, 4)
    sizes = [3 * height * width for height, width in (read_header(data)[:2] for data in source.encoded[:4])]
    assert estimate_bytes(source, LIMIT_S) == pytest.approx(8 * sum(sizes) / 4)
    source.released = True


def test_a_pipe_in_a_folder_is_a_bad_sample(tmp_path: Path) -> None:
    source, _ = open_folder(build_generated(tmp_path, 20, 10))
    path = Path(source.name(7))
    path.unlink()
    os.mkfifo(path)
    with train_pipeline(source, global_batch=20, bad_share=0.05) as pipeline:
        next(pipeline)
        assert pipeline.bad == {7: f"{path} (it is a pipe and not a file)"}
