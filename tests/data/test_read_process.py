"""Processes that read: the same bytes as reading here; what they cannot do is done here; they never outlive anybody."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data.decode import Header, decode
from lockstep.data.pack import pack_folder
from lockstep.data.read_process import FAR_S, FAR_THREADS, MEMORY_BYTES, Reading, ReadPool, ReadProcess
from lockstep.data.reader import SampleReader
from lockstep.data.shards import open_shards
from lockstep.data.sources import ImageFolder, Source, open_folder
from tests.data.pictures import BAD_AMONG_ODD, Pictures, cut_png, encode, odd_photos, photos, picture, pillow_kinds

WAIT_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_process(source: Source, **options: int) -> ReadProcess:
    process = ReadProcess(source, **options)
    wait_until(lambda: process.is_ready)
    return process


@pytest.fixture(scope="module")
def odd() -> Iterator[tuple[Pictures, ReadProcess]]:
    source = odd_photos(64)
    process = open_process(source)
    yield source, process
    process.close()
    assert process.process.returncode is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for name in ("ants", "bees"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number, data in enumerate(photos(5).encoded):
                (tmp_path / "images" / split / name / f"{number}.jpg").write_bytes(data)
    return tmp_path / "images"


def test_samples_come_as_if_they_were_read_here(odd: tuple[Pictures, ReadProcess]) -> None:
    source, process = odd
    reader = SampleReader(source, 1.0)
    for samples in ([3], [5, 4, 4, 63], list(range(64))):
        fetched = process.load(samples)
        for image, expected in zip(fetched, map(reader.load, samples), strict=True):
            if image is not None:
                assert expected is not None
                assert (image.sample, image.header) == (expected.sample, expected.header)
                assert bytes(image.data) == expected.data
    assert sum(image is not None for image in fetched) > 40


def test_what_is_bad_is_counted_and_replaced_as_without_processes(odd: tuple[Pictures, ReadProcess]) -> None:
    source, process = odd
    samples = list(range(64))
    for replaces in (True, False):
        with_process, without = SampleReader(source, 1.0), SampleReader(source, 1.0)
        for _ in range(2):  # once more when the bad ones are known
            fetched = with_process.load_all(samples, replaces, process.load)
            expected = without.load_all(samples, replaces)
            assert [image and image.sample for image in fetched] == [image and image.sample for image in expected]
        assert with_process.bad == without.bad
        assert set(with_process.bad) <= set(BAD_AMONG_ODD)


def test_a_sample_found_bad_by_a_decoder_is_not_taken_again(odd: tuple[Pictures, ReadProcess]) -> None:
    source, process = odd
    reader = SampleReader(source, 1.0)
    good = next(sample for sample in range(64) if process.load([sample, sample + 1]).count(None) == 0)
    reader.bad[good] = "damaged further on"
    (image,) = reader.load_all([good], True, process.load)
    assert image is not None
    assert image.sample == good + 1
    assert reader.load_all([good], False, process.load) == [None]


def test_what_has_no_room_is_left_to_the_caller() -> None:
    source = photos(8)
    sizes = [len(data) for data in source.encoded]
    process = open_process(source, num_bytes=sizes[0] + sizes[1] + 1)
    fetched = process.load([0, 1, 2, 3])
    assert [image is not None for image in fetched] == [True, True, False, False]
    images = SampleReader(source, 0.0).load_all([2, 0, 3], True, process.load)
    assert [bytes(image.data) for image in images if image] == [source.encoded[sample] for sample in (2, 0, 3)]
    process.close()


def test_a_folder_and_shards_are_read_by_another_process(folder: Path, tmp_path: Path) -> None:
    train, _ = open_folder(folder)
    pack_folder(folder, tmp_path / "shards", shard_mb=0.01)
    shards, _ = open_shards(tmp_path / "shards")
    assert isinstance(train, ImageFolder)
    for source in (train, shards):
        process = open_process(source)
        fetched = process.load(list(range(source.num_samples)))
        assert [image and bytes(image.data) for image in fetched] == [source.read(n) for n in range(source.num_samples)]
        process.close()


def test_a_process_that_was_killed_costs_nothing_but_speed() -> None:
    source = photos(8)
    pool = ReadPool(source, 2)
    with pool.lend() as process:
        assert process is not None
        wait_until(lambda: process.is_ready)
        process.process.kill()
        process.process.wait()
        for _ in range(2):
            images = SampleReader(source, 0.0).load_all([1, 2], True, process.load)
            assert [bytes(image.data) for image in images if image] == source.encoded[1:3]
    assert pool.describe() == "1 process reading (1 died)"
    pool.close()


def test_nothing_is_read_behind_what_has_no_room() -> None:
    source = photos(8)
    reading = Reading(source, memoryview(bytearray(len(source.encoded[0]))))
    assert [item is not None for item in reading.read([0, 1, 2, 3])] == [True, False, False, False]
    assert source.num_reads == 2


class Far(Pictures):
    """Storage that takes its time, and counts who waits for it."""

    def __init__(self, encoded: list[bytes], seconds: float) -> None:
        super().__init__(encoded)
        self.seconds = seconds
        self.num_waiting = self.most_waiting = 0
        self.lock = threading.Lock()

    def read(self, index: int) -> bytes:
        with self.lock:
            self.num_waiting += 1
            self.most_waiting = max(self.most_waiting, self.num_waiting)
        time.sleep(self.seconds)
        with self.lock:
            self.num_waiting -= 1
        return super().read(index)


def test_files_that_are_far_away_are_read_several_at_a_time() -> None:
    source = Far(odd_photos(64).encoded, 0.01)
    memory = memoryview(bytearray(MEMORY_BYTES))
    reading = Reading(source, memory)
    samples = list(range(64))
    expected = [item and bytes(memory[item[0] : item[1]]) for item in reading.read(samples)]
    assert source.most_waiting == 1
    assert reading.is_far
    again = [item and bytes(memory[item[0] : item[1]]) for item in reading.read(samples)]
    assert source.most_waiting > FAR_THREADS // 2
    assert again == expected
    assert reading.is_far
    source.seconds = 0.0  # now they are in the system's cache
    reading.read(samples)
    source.most_waiting = 0
    reading.read(samples)
    assert source.most_waiting == 1


class Unsendable(Pictures):
    """A source that only this process can have."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent")


def test_a_source_that_cannot_be_sent_is_read_here() -> None:
    source = Unsendable(photos(2).encoded)
    pool = ReadPool(source, 1)
    wait_until(lambda: pool.describe() == "0 processes reading (1 died)")
    with pool.lend() as process:
        assert process is not None
        assert process.load([0, 1]) == [None, None]
    with pool.lend() as none:  # nobody gets one that has died
        assert none is None
    pool.close()


def test_modules_of_the_current_folder_are_not_mistaken_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the queue you want')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *(entry for entry in sys.path if entry)])
    process = open_process(photos(2))
    assert None not in process.load([0, 1])
    process.close()


def test_a_process_that_is_not_ready_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadProcess, "_introduce", lambda self, source: None)
    process = ReadProcess(photos(2))
    assert process.load([0, 1]) == [None, None]
    process.close()
    assert process.process.returncode is not None


def test_each_process_is_lent_to_one_at_a_time_and_all_end_with_the_pool() -> None:
    pool = ReadPool(photos(2), 2)
    with pool.lend() as one, pool.lend() as other:
        assert one is not None
        assert other is not None
        assert one is not other
        with pool.lend() as third:
            assert third is None
    with pool.lend() as again:
        assert again in (one, other)
    assert pool.describe() == "2 processes reading"
    pool.close()
    assert all(process.process.returncode is not None for process in (one, other))


def test_pixels_are_those_that_this_process_would_decode() -> None:
    source = Pictures([*pillow_kinds(), photos(1).encoded[0]])
    process = open_process(source, decodes=True)
    *images, photo = process.load(list(range(source.num_samples)))
    for image, encoded in zip(images, source.encoded[:-1], strict=True):
        assert image is not None
        assert image.is_decoded
        expected = decode(encoded)
        assert (image.header.height, image.header.width, 3) == expected.shape
        assert bytes(image.data) == expected.tobytes()
    assert photo is not None
    assert not photo.is_decoded
    assert bytes(photo.data) == source.encoded[-1]
    process.close()


def test_what_cannot_be_decoded_or_has_no_room_as_pixels_is_left_to_the_caller() -> None:
    small, large = encode(picture(8, 8), "PNG"), encode(picture(90, 90), "PNG")
    source = Pictures([small, cut_png(40, 40), small, large, small])
    process = open_process(source, num_bytes=3 * 90 * 90, decodes=True)
    fetched = process.load([0, 1, 2, 3, 4])
    assert [image is not None for image in fetched] == [True, False, True, False, False]
    assert process.load([3]) != [None]
    process.close()


def test_pixels_that_are_not_as_many_as_their_header_says_are_not_taken() -> None:
    process = ReadProcess(photos(1), num_bytes=1000, decodes=True)
    header = Header(10, 10, "", 1, 1)
    assert process._take(0, (0, 300, header)) is not None
    assert process._take(0, (0, 299, header)) is None
    assert process._take(0, (900, 1200, header)) is None  # beyond the memory
    process.close()


def test_nothing_is_decoded_that_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    monkeypatch.setattr("lockstep.data.read_process.decode", lambda data, *_, buffer: decoded.append(len(buffer)))
    source = Pictures([encode(picture(8, 8), "PNG"), encode(picture(9, 9), "PNG")])
    Reading(source, memoryview(bytearray(3 * 64)), decodes=True).read([0, 1])
    assert decoded == [3 * 64]


def test_decoding_does_not_make_files_seem_far_away() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    reading = Reading(Pictures([encode(noise, "PNG")]), memoryview(bytearray(3 * 600 * 600)), decodes=True)
    begun = time.perf_counter()
    assert reading.read([0]) != [None]
    assert time.perf_counter() - begun > FAR_S
    assert not reading.is_far


def test_a_process_that_decodes_is_waited_for_but_not_in_vain() -> None:
    pool = ReadPool(photos(2), 1, read_timeout_s=2.0, decodes=True)
    taken: list[ReadProcess | None] = []

    def take() -> None:
        with pool.lend() as process:
            taken.append(process)

    with pool.lend() as held:
        waiting = threading.Thread(target=take)
        waiting.start()
        time.sleep(0.3)
        assert not taken
    waiting.join(WAIT_S)
    assert taken == [held]
    with pool.lend():  # by a thread that hangs
        take()
        assert taken == [held, None]
    with pool.lend() as again:
        assert again is held
        again.process.kill()
        again.process.wait()
        begun = time.monotonic()
        take()
        assert time.monotonic() - begun < 1
    take()
    assert taken[2:] == [None, None]
    pool.close()


@pytest.mark.parametrize("decodes", [False, True])
def test_processes_that_nobody_needs_end_as_soon_as_nobody_uses_them(decodes: bool) -> None:
    pool = ReadPool(photos(2), 2, decodes=decodes)
    with pool.lend() as used:
        assert used is not None
        wait_until(lambda: used.is_ready)
        (free,) = [process for process in pool._all if process is not used]
        pool.retire()
        assert free.process.returncode is not None
        assert None not in used.load([0, 1])
        assert len(pool) == 0
    assert used.process.returncode is not None
    with pool.lend() as none:
        assert none is None
    pool.close()


PARENT = """
import sys, time
from lockstep.data.read_process import ReadProcess
from tests.data.pictures import photos
process = ReadProcess(photos(4))
while not process.is_ready:
    time.sleep(0.01)
print(process.process.pid, flush=True)
time.sleep(600)
"""


def test_no_process_outlives_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    """Whether there is such a process that does more than wait to be buried."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"
