"""The account of samples that cannot be used."""

import numpy as np
import pytest

from lockstep.data.decode import DecodeError
from lockstep.data.reader import SampleReader
from lockstep.errors import LockstepError
from tests.data.pictures import Pictures, encode, picture

GOOD = encode(picture(20, 30))


def test_a_sample_comes_with_its_header() -> None:
    loaded = SampleReader(Pictures([GOOD]), 0.0).load(0)
    assert loaded is not None
    assert loaded.data == GOOD
    assert (loaded.header.height, loaded.header.width) == (20, 30)


def test_a_bad_sample_is_read_only_once() -> None:
    source = Pictures([b"", GOOD])
    reader = SampleReader(source, 1.0)
    assert [reader.load_or_next(0).sample for _ in range(3)] == [1, 1, 1]
    assert source.num_reads == 4
    assert reader.bad == {0: "picture-0.jpg (the file is empty)"}


def test_the_neighbour_of_the_last_sample_is_the_first() -> None:
    assert SampleReader(Pictures([GOOD, GOOD, b""]), 1.0).load_or_next(2).sample == 0


def test_known_bad_samples_are_replaced_without_reading() -> None:
    source = Pictures([GOOD, b"", b"", GOOD])
    reader = SampleReader(source, 1.0)
    assert reader.replace_known_bad(np.array([0, 1, 2, 3])).tolist() == [0, 1, 2, 3]
    reader.load_or_next(1)
    source.num_reads = 0
    assert reader.replace_known_bad(np.array([0, 1, 2, 3])).tolist() == [0, 3, 3, 3]
    assert source.num_reads == 0


def test_one_bad_sample_more_than_allowed_stops_the_run() -> None:
    reader = SampleReader(Pictures([GOOD] * 10), bad_share=0.15)
    reader.count_bad(3, DecodeError("torn"))
    reader.count_bad(4, OSError(5, "Input/output error"))
    with pytest.raises(LockstepError, match=r"3 of 10 samples .* allows 2: picture-3\.jpg \(torn\), .*output error\)"):
        reader.count_bad(5, DecodeError("torn"))
