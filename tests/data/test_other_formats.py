"""WebP, BMP, TIFF and GIF: the pixels that were saved, and a refusal in little time for what would take long."""

import io
import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.data.decode import DecodeError, decode, is_ended, read_header
from lockstep.data.other_formats import read_sides, tidy_tiff
from tests.data.pictures import encode, picture

PHOTO = picture(41, 57)
LOSSLESS = [
    ("WEBP", {"lossless": True}),
    ("BMP", {}),
    ("TIFF", {}),
    *(("TIFF", {"compression": kind}) for kind in ("tiff_lzw", "tiff_adobe_deflate", "packbits")),
]


@pytest.mark.parametrize(("kind", "options"), LOSSLESS)
def test_what_was_saved_is_read_to_the_last_bit(kind: str, options: dict[str, object]) -> None:
    data = encode(PHOTO, kind, **options)
    header = read_header(data)
    assert (header.height, header.width) == (41, 57)
    assert np.array_equal(decode(data), PHOTO)
    assert np.array_equal(decode(memoryview(data), header), PHOTO)


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(["WEBP", "BMP", "TIFF", "GIF"]))
@settings(deadline=None, max_examples=60)
def test_sides_are_known_before_decoding(height: int, width: int, kind: str) -> None:
    data = encode(Image.new("P", (width, height)) if kind == "GIF" else Image.new("RGB", (width, height)), kind)
    found = read_sides(data)
    assert found is not None
    assert (found.kind, found.height, found.width) == (kind, height, width)
    assert decode(data).shape == (height, width, 3)


def test_the_first_picture_of_a_gif_is_read() -> None:
    frames = [Image.new("RGB", (20, 10), color) for color in ("red", "lime", "blue")]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data).reshape(-1, 3).tolist() == [[255, 0, 0]] * 200


def test_the_first_picture_of_a_moving_webp_is_read() -> None:
    frames = [Image.new("RGB", (20, 10), color) for color in ("red", "lime", "blue")]
    data = encode(frames[0], "WEBP", lossless=True, save_all=True, append_images=frames[1:])
    assert decode(data).reshape(-1, 3).tolist() == [[255, 0, 0]] * 200


def test_greys_of_16_bits_keep_their_upper_byte() -> None:
    grey = np.linspace(0, 65535, 600).reshape(20, 30).astype(np.uint16)
    assert np.array_equal(decode(encode(Image.fromarray(grey), "TIFF"))[..., 0], (grey >> 8).astype(np.uint8))


def test_a_turned_tiff_is_read_as_it_lies() -> None:
    """As JPEGs are: what a camera says of the way it was held is for viewers."""
    data = encode(Image.fromarray(PHOTO), "TIFF", tiffinfo={274: 6})
    assert np.array_equal(decode(data), PHOTO)


def claim(data: bytes, places: list[tuple[int, str, int]]) -> bytes:
    changed = bytearray(data)
    for at, form, value in places:
        struct.pack_into(form, changed, at, value)
    return bytes(changed)


def grow_tiff(data: bytes) -> bytes:
    """A TIFF that says it is 60,000 × 60,000."""
    changed = bytearray(data)
    at = struct.unpack_from("<I", data, 4)[0]
    for number in range(struct.unpack_from("<H", data, at)[0]):
        entry = at + 2 + 12 * number
        if struct.unpack_from("<H", data, entry)[0] in (256, 257):
            struct.pack_into("<HII", changed, entry + 2, 4, 1, 60_000)
    return bytes(changed)


def canvas_webp(side: int) -> bytes:
    data = bytearray(
        encode(Image.new("RGBA", (8, 8)), "WEBP", save_all=True, append_images=[Image.new("RGBA", (8, 8))])
    )
    assert data[12:16] == b"VP8X"
    data[24:30] = (side - 1).to_bytes(3, "little") * 2
    return bytes(data)


def exif_tiff() -> bytes:
    """A TIFF whose directory points to others of 60,000 entries, each of them as large as the file."""
    data = bytearray(encode(PHOTO, "TIFF"))
    many = len(data)
    entry = struct.pack("<HHII", 700, 1, 4_000_000, 8)
    data += struct.pack("<H", 60_000) + entry * 60_000 + bytes(4) + bytes(4_000_000)
    at = struct.unpack_from("<I", data, 4)[0]
    num_tags = struct.unpack_from("<H", data, at)[0]
    old = bytes(data[at + 2 : at + 2 + 12 * num_tags])
    new = len(data)
    data += struct.pack("<H", num_tags + 1) + old + struct.pack("<HHII", 34665, 4, 1, many) + bytes(4)
    struct.pack_into("<I", data, 4, new)
    return bytes(data)


BMP, GIF = encode(PHOTO, "BMP"), encode(Image.fromarray(PHOTO).convert("P"), "GIF")
COMMENTS = GIF[:13] + GIF[13 : 13 + 768] + b"!\xfe" + (b"\xff" + bytes(255)) * 200_000 + b"\0" + GIF[13 + 768 :]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (canvas_webp(16_000), "is more than"),
        (claim(encode(PHOTO, "WEBP"), [(26, "<H", 16_383), (28, "<H", 16_383)]), "is more than"),
        (claim(BMP, [(18, "<i", 30_000), (22, "<i", 30_000)]), "cannot hold its 30000 × 30000 pixels"),
        (claim(BMP, [(30, "<I", 1)]), "a compressed BMP is not read; save it as PNG"),
        (claim(GIF, [(6, "<H", 65_535), (8, "<H", 65_535)]), "is more than"),
        (COMMENTS, "too much stands before its first picture"),
        (GIF[:20], "cut short|damaged"),
        (grow_tiff(encode(PHOTO, "TIFF", compression="tiff_lzw")), "is more than"),
        (encode(PHOTO, "TIFF", compression="jpeg"), "a TIFF of compression 7 is not read; save it as PNG"),
        (encode(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF"), "pixels of mode F are not read"),
        (b"II+\0" + bytes(60), "a BigTIFF is not read"),
        (BMP[:30], "cut short"),
        (b"RIFF\x10\0\0\0WEBP", "damaged"),
        (claim(BMP, [(18, "<i", 0)]), "it has no pixels"),
    ],
)
def test_what_would_take_long_or_is_not_read_is_refused_at_once(data: bytes, reason: str) -> None:
    start = time.process_time()
    with pytest.raises(DecodeError, match=reason):
        decode(data)
    assert time.process_time() - start < 0.5


def test_nothing_but_pixels_of_a_tiff_is_read() -> None:
    data = exif_tiff()
    start = time.process_time()
    assert np.array_equal(decode(data), PHOTO)
    assert time.process_time() - start < 1
    with Image.open(io.BytesIO(tidy_tiff(encode(PHOTO, "TIFF", dpi=(300, 300), tiffinfo={305: "made"})))) as image:
        assert 305 not in image.tag_v2  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_a_file_cut_short_has_no_end(kind: str) -> None:
    data = encode(Image.fromarray(PHOTO).convert("P") if kind == "GIF" else PHOTO, kind)
    assert is_ended(data)
    assert not is_ended(data[:-20])


def test_the_end_of_a_thumbnail_is_not_that_of_a_jpeg() -> None:
    data = encode(PHOTO, exif=b"Exif\0\0" + encode(PHOTO))
    assert is_ended(data)
    assert not is_ended(data[:-200])
