"""A user's samples as a source: what is asked of them, and what each mistake in them becomes."""

import io
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lockstep.data.decode import decode, read_header
from lockstep.data.own_data import OwnData, encode_image, open_own
from lockstep.data.reader import SampleReader
from lockstep.data.sources import is_same
from lockstep.errors import LockstepError
from tests.own import Broken, Pictures

Pairs = list[tuple[Any, Any]]


class Listed:
    """Samples from a list, with whatever members a test wants."""

    def __init__(self, samples: Pairs, **members: Any) -> None:
        self.samples = samples
        vars(self).update(members)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]


def open_first(samples: Any) -> OwnData:
    train, _ = open_own(samples, [(b"x", 0)])
    assert isinstance(train, OwnData)
    return train


@given(st.lists(st.tuples(st.binary(max_size=9), st.integers(0, 4)), min_size=1, max_size=20))
def test_bytes_and_labels_are_those_of_the_object(samples: Pairs) -> None:
    source = open_first(Listed(samples, classes=list("abcde")))
    assert source.num_samples == len(samples)
    assert [(source.read(number), int(source.labels[number])) for number in range(len(samples))] == samples
    assert source.classes == tuple("abcde")


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("member", ["labels", "targets"])
def test_listed_labels_spare_the_pass_over_all_samples(member: str, kind: Any) -> None:
    asked: list[int] = []

    class Watched(Listed):
        def __getitem__(self, number: int) -> Any:
            asked.append(number)
            return super().__getitem__(number)

    source = open_first(Watched([(b"a", 0), (b"b", 1)], **{member: kind([0, 1])}))
    assert asked == []
    assert source.labels.tolist() == [0, 1]
    assert source.classes == ("0", "1")


@pytest.mark.parametrize("label", [np.int32(1), torch.tensor(1), np.array(1)])
@pytest.mark.parametrize("data", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_other_forms_of_bytes_and_whole_numbers_will_do(data: Any, label: Any) -> None:
    source = open_first([(b"", 0), (data, label)])
    assert source.read(1) == b"abc"
    assert source.labels.tolist() == [0, 1]


def test_a_16_bit_pil_image_is_what_its_file_is(tmp_path: Path) -> None:
    levels = np.linspace(0, 65535, 20 * 30).reshape(20, 30)
    for kind in ("<u2", ">u2"):
        image = Image.fromarray(levels.astype(kind))
        image.save(tmp_path / "grey.tiff")
        expected = decode((tmp_path / "grey.tiff").read_bytes())
        assert np.array_equal(decode(encode_image(image)), expected)
        assert np.array_equal(expected[..., 0], levels.astype(np.uint16) >> 8)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pil_pixels_without_colours_are_a_sample_that_cannot_be_read(mode: str) -> None:
    with pytest.raises(OSError, match=f"mode {mode} have no colours; convert it"):
        open_first(Listed([(Image.new(mode, (4, 4)), 0)], labels=[0])).read(0)


def test_a_pil_image_that_breaks_when_it_is_loaded_says_why() -> None:
    written = io.BytesIO()
    Image.effect_noise((50, 50), 40).save(written, "PNG")
    image = Image.open(io.BytesIO(written.getvalue()[:900]))
    with pytest.raises(OSError, match="truncated") as caught:
        open_first(Listed([(image, 0)], labels=[0])).read(0)
    assert "truncated" in caught.value.strerror


def test_a_pil_image_comes_through_without_loss() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    data = open_first([(Image.fromarray(pixels), 0)]).read(0)
    assert np.array_equal(decode(data, read_header(data), 1), pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ([], r"The training data \(list\) is empty"),
        (3, "The training data .int. cannot be used: TypeError"),
        ({1, 2}, "cannot be indexed"),
        ([b"a"], "Sample 0 of the training data .list. is a bytes, and must be two things"),
        (
            [(np.zeros((3, 3)), 0)],
            "comes as ndarray, and must come as the bytes of a JPEG or PNG file, or as a PIL image: leave out ToTensor",
        ),
        ([("a.jpg", 0)], "comes as str, and must come as the bytes"),
        ([(b"a", "cat")], "Sample 0 .* has a str as its label"),
        ([(b"a", 1.0)], "has a float as its label"),
        ([(b"a", True)], "has a bool as its label"),
        ([(b"a", 0), (b"b", -1)], r"Sample 1 .* has label -1; labels number the 1 classes from 0"),
        ([(b"a", 1), (b"b", 2)], "No training sample has label 0, though labels reach 2"),
        ([(b"a", 10**30)], "Labels reach beyond 1,048,576"),
        (Listed([(b"a", 3)], classes=["x", "y"]), "Sample 0 .*Listed. has label 3; labels number the 2 classes"),
        (Listed([(b"a", 0)], classes="xy"), "`classes` of the training data .* must be a list of names"),
        (
            Listed([(b"a", 0)], labels=[0, 0]),
            r"must be 1 whole numbers, one for each sample, and are int64 of shape \[2\]",
        ),
        (Listed([(b"a", 0)], labels=[0.5]), "must be 1 whole numbers"),
        (Broken(9), ""),
    ],
)
def test_a_mistake_is_one_sentence(train: Any, words: str) -> None:
    if not words:  # known only when its turn comes
        with pytest.raises(
            LockstepError, match=r"^Sample 5 of the training data \(Broken\) cannot be had: KeyError: 'no"
        ):
            open_own(train, [(b"x", 0)])[0].read(5)
        return
    with pytest.raises(LockstepError, match=words) as caught:
        open_own(train, [(b"x", 0)])
    assert "\n" not in str(caught.value)


def test_splits_with_other_classes_are_refused() -> None:
    with pytest.raises(LockstepError, match="have other `classes`"):
        open_own(Listed([(b"", 0)], classes=["a"]), Listed([(b"", 0)], classes=["b"]))


def test_a_label_that_changes_is_refused() -> None:
    source = open_first(Listed([(b"a", 0), (b"b", 0)], labels=[0, 1]))
    with pytest.raises(LockstepError, match=r"Sample 1 .* has label 0, but the object's labels say 1"):
        source.read(1)


def test_an_os_error_is_a_sample_that_cannot_be_read() -> None:
    class Lost(Pictures):
        labels = (0, 1, 0, 1)

        def __getitem__(self, number: int) -> tuple[bytes, int]:
            if number == 2:
                raise OSError("the tape is torn")
            return super().__getitem__(number)

    reader = SampleReader(open_first(Lost(4)), bad_share=0.25)
    assert reader.load(2) is None
    assert reader.bad == {2: "sample 2 of the training data (Lost) (the tape is torn)"}
    assert reader.load(1) is not None


@pytest.mark.parametrize("is_safe", [False, True])
def test_one_thread_at_a_time_reads_unless_told_otherwise(is_safe: bool) -> None:
    inside, most = 0, 0
    lock, both = threading.Lock(), threading.Barrier(2)

    class Shared(Pictures):
        labels = (0, 1)
        is_thread_safe = is_safe

        def __getitem__(self, number: int) -> tuple[bytes, int]:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            if is_safe:
                both.wait(60)  # which nobody passes alone
            else:
                time.sleep(0.02)
            with lock:
                inside -= 1
            return b"", number

    source = open_first(Shared(2))
    threads = [threading.Thread(target=source.read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == (2 if is_safe else 1)


def test_other_data_has_another_fingerprint() -> None:
    same = open_first(Pictures(40)).fingerprint()
    assert same == open_first(Pictures(40)).fingerprint()
    assert same["labels"] == open_first(Pictures(40, seed=9)).fingerprint()["labels"]
    assert same["bytes"] != open_first(Pictures(40, seed=9)).fingerprint()["bytes"]
    assert same["images"] != open_first(Pictures(40, seed=9)).fingerprint()["images"]
    assert same["labels"] != open_first(Pictures(41)).fingerprint()["labels"]


def test_a_sample_that_cannot_be_read_now_is_no_other_data() -> None:
    class Torn(Pictures):
        labels = property(lambda self: [number % 2 for number in range(len(self))])

        def __getitem__(self, number: int) -> tuple[bytes, int]:
            if number == 0:
                raise OSError("no answer")
            return super().__getitem__(number)

    whole, part = open_first(Pictures(40)).fingerprint(), open_first(Torn(40)).fingerprint()
    assert whole.keys() - part.keys() == {"bytes"}
    assert len(part["images"].split()) == len(whole["images"].split()) - 1
    assert all(is_same(kind, whole[kind], text) for kind, text in part.items())


def test_an_object_that_does_not_answer_is_given_up() -> None:
    class Hung(Pictures):
        def __getitem__(self, number: int) -> tuple[bytes, int]:
            if number == 3:
                time.sleep(2)
            return super().__getitem__(number)

    with pytest.raises(LockstepError, match=r"sample 3 of the training data \(Hung\) does not answer within 0\.2 s"):
        open_own(Hung(6), Pictures(6), limit_s=0.2)


def test_a_source_of_lockstep_stays_as_it_is() -> None:
    pair = open_own(Pictures(4), Pictures(4))
    assert open_own(*pair) == pair
