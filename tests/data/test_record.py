"""Records: what Python's own tar reader finds in them, and names that never clash or split a sample in two."""

import io
import tarfile

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.record import BLOCK, END, FRAME_BYTES, build_key, build_record, key_of, padding, parse_name


@given(st.binary(max_size=2000), st.integers(0, 10**6), st.integers(0, 10**9), st.text(min_size=1, max_size=200))
@settings(deadline=None)
def test_a_tar_reader_finds_the_sample_and_its_label(data: bytes, label: int, number: int, stem: str) -> None:
    key = build_key(number, f"/images/{stem}.jpeg")
    record = build_record(f"{key}.jpeg", data, label)
    with tarfile.open(fileobj=io.BytesIO(record + END)) as tar:
        image, text = tar.getmembers()
        contents = [tar.extractfile(member) for member in (image, text)]
        assert [file.read() for file in contents if file] == [data, str(label).encode()]
    assert (image.name, text.name) == (f"{key}.jpeg", f"{key}.cls")
    assert image.offset_data == BLOCK
    assert len(record) == FRAME_BYTES + len(data) + padding(len(data))
    assert parse_name(record[:BLOCK]) == image.name


@given(st.text(max_size=100), st.text(max_size=100))
@settings(deadline=None)
def test_two_samples_never_share_a_key(one: str, other: str) -> None:
    assert build_key(1, f"{one}.jpeg") != build_key(2, f"{other}.jpeg")


def test_a_key_holds_no_dot_and_keeps_the_name() -> None:
    key = build_key(7, "/data/train/ant/photo.of.an ant.JPEG")
    assert key == "00000007-photo_of_an_ant"
    assert key_of(f"{key}.jpeg") == key


def test_a_damaged_header_has_no_name() -> None:
    header = bytearray(build_record("00000000-a.jpeg", b"", 0)[:BLOCK])
    header[3] ^= 1
    assert parse_name(bytes(header)) == ""
    assert parse_name(bytes(BLOCK)) == ""
