"""Decoding: every kind of JPEG in the wild against Pillow or the picture it was made from; damage is a DecodeError."""

import io
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.data import decode as module
from lockstep.data.decode import FACTORS, MAX_SCANS, DecodeError, decode, read_header
from lockstep.data.jpeg_frame import read_frame
from tests.data.pictures import huge_jpeg, huge_png, planes_jpeg, repeat_scan

ROOT = Path(__file__).parents[2]


def smooth_picture(height: int = 40, width: int = 56) -> np.ndarray:
    """A picture without fine detail, which JPEG keeps within a few levels."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return (np.stack([x, y, 1 - x * y], axis=-1) * 200 + 25).astype(np.uint8)


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def difference(left: np.ndarray, right: np.ndarray) -> int:
    return int(np.abs(left.astype(int) - right.astype(int)).max())


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_color_jpeg_agrees_with_pillow(subsampling: int, progressive: bool) -> None:
    data = encode(Image.fromarray(smooth_picture()), subsampling=subsampling, progressive=progressive, quality=90)
    assert difference(decode(data), np.asarray(Image.open(io.BytesIO(data)))) <= 1


def test_greyscale_becomes_three_equal_channels() -> None:
    grey = smooth_picture()[..., 0]
    pixels = decode(encode(Image.fromarray(grey), quality=95))
    assert pixels.shape == (*grey.shape, 3)
    assert difference(pixels, np.repeat(grey[..., None], 3, axis=2)) <= 4


def test_cmyk_gives_the_colors_it_was_made_from() -> None:
    picture = smooth_picture()
    data = encode(Image.fromarray(picture).convert("CMYK"), quality=95)
    assert difference(decode(data), picture) <= 8


def test_ycck_gives_the_colors_it_was_made_from() -> None:
    picture = smooth_picture()
    # Adobe's YCCK holds C, M, Y as the YCbCr of an RGB picture of the inks, and K inverted. Pillow inverts the planes
    # it is given, so they go in inverted; the marker's last byte then says that they are YCCK.
    ycc = np.asarray(Image.fromarray(255 - picture).convert("YCbCr"))
    planes = np.concatenate([255 - ycc, np.zeros_like(ycc[..., :1])], axis=-1)
    data = encode(Image.frombytes("CMYK", (picture.shape[1], picture.shape[0]), planes.tobytes()), quality=95)
    marker = data.index(b"Adobe")
    assert data[marker + 11] == 0
    patched = data[: marker + 11] + b"\x02" + data[marker + 12 :]
    assert difference(decode(patched), picture) <= 8


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1"])
def test_png_under_any_name_is_read(mode: str) -> None:
    image = Image.fromarray(smooth_picture()).convert(mode)
    assert difference(decode(encode(image, "PNG")), np.asarray(image.convert("RGB"))) == 0


def test_sixteen_bit_png_keeps_its_range() -> None:
    levels = np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)
    pixels = decode(encode(Image.fromarray(levels), "PNG"))
    assert np.array_equal(pixels, np.repeat((levels // 256).astype(np.uint8)[..., None], 3, axis=2))


def test_bytes_after_the_end_of_a_jpeg_do_no_harm() -> None:
    data = encode(Image.fromarray(smooth_picture()))
    assert np.array_equal(decode(data + b"trailing bytes"), decode(data))


def test_pixels_can_be_written() -> None:
    assert decode(encode(Image.fromarray(smooth_picture()), "PNG")).flags.writeable
    assert decode(encode(Image.fromarray(smooth_picture()))).flags.writeable


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_truncated_jpeg_is_refused(share: float) -> None:
    data = encode(Image.fromarray(smooth_picture()))
    with pytest.raises(DecodeError):
        decode(data[: int(share * len(data))])


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"not an image", bytes(2000)])
def test_what_is_no_image_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"\w{3}"):
        decode(data)


@pytest.mark.parametrize(("options", "limit"), [({"kind": "PNG"}, 2 * 2239), ({"progressive": True}, 2239)])
def test_an_image_beyond_the_pixel_limit_is_refused(
    options: dict[str, object], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PIXELS", limit)
    with pytest.raises(DecodeError, match="56 × 40 is more than 2239 pixels"):
        decode(encode(Image.fromarray(smooth_picture()), **options))


def test_a_jpeg_beyond_the_pixel_limit_may_be_decoded_at_a_reduced_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Image.fromarray(smooth_picture()))
    for limit, factor in ((40 * 56, 1), (40 * 56 - 1, 2), (20 * 28 - 1, 4), (10 * 14 - 1, 8)):
        monkeypatch.setattr(module, "MAX_PIXELS", limit)
        assert read_header(data).min_factor == factor
    monkeypatch.setattr(module, "MAX_PIXELS", 5 * 7 - 1)
    with pytest.raises(DecodeError, match="is more than 34 pixels"):
        read_header(data)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("height", "width"), [(40, 56), (41, 57), (47, 63), (3, 5), (1, 1)])
def test_a_reduced_scale_is_the_picture_made_smaller(height: int, width: int, factor: int) -> None:
    picture = smooth_picture(height, width)
    data = encode(Image.fromarray(picture), quality=95, subsampling=0)
    small = decode(data, factor=factor)
    expected = np.asarray(Image.fromarray(picture).reduce(factor))
    assert small.shape == expected.shape == (-(-height // factor), -(-width // factor), 3)
    inside = np.s_[: height // factor, : width // factor]  # beyond it, blocks are filled up in different ways
    assert small[inside].size == 0 or difference(small[inside], expected[inside]) <= 12


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_is_decoded_into_the_buffer_given(kind: str) -> None:
    data = encode(Image.fromarray(smooth_picture()), kind)
    buffer = np.zeros(3 * 40 * 56 + 10, np.uint8)
    pixels = decode(data, buffer=buffer)
    assert np.shares_memory(pixels, buffer)
    assert np.array_equal(pixels, decode(data))
    assert not buffer[3 * 40 * 56 :].any()


def test_views_of_bytes_are_as_good_as_bytes() -> None:
    for data in (encode(Image.fromarray(smooth_picture())), encode(Image.fromarray(smooth_picture()), "PNG")):
        assert np.array_equal(decode(memoryview(data)), decode(data))


def has_many_scans(data: bytes) -> bool:
    return read_frame(data).has_many_scans


def test_a_header_tells_many_scans_from_one() -> None:
    image = Image.fromarray(smooth_picture())
    assert not has_many_scans(encode(image))
    assert not has_many_scans(encode(image.convert("L")))
    assert has_many_scans(encode(image, progressive=True))
    # A thumbnail in the metadata has a frame header too, which is not that of the image.
    thumbnail = encode(image, progressive=True)
    assert not has_many_scans(encode(image, exif=b"Exif\0\0" + thumbnail))
    assert has_many_scans(encode(image, exif=b"Exif\0\0" + encode(image), progressive=True))
    assert has_many_scans(b"\xff\xd8 nothing to walk along")


@pytest.mark.parametrize("filling", [b"\xff", b"\xff\x01"])
def test_bytes_that_only_fill_hide_no_header(filling: bytes) -> None:
    for options in ({}, {"progressive": True}):
        data = encode(Image.fromarray(smooth_picture()), **options)
        assert has_many_scans(data[:2] + filling + data[2:]) == bool(options)


def test_colors_in_scans_of_their_own_are_decoded() -> None:
    planes = [plane.copy() for plane in np.moveaxis(smooth_picture(40, 64), 2, 0)]
    data = planes_jpeg(planes)
    assert has_many_scans(data)
    expected = Image.merge("YCbCr", [Image.fromarray(plane) for plane in planes]).convert("RGB")
    assert difference(decode(data), np.asarray(expected)) <= 8


@pytest.mark.parametrize("kind", ["progressive", "planes", "cmyk"])
def test_a_jpeg_of_thousands_of_scans_is_refused_at_once(kind: str) -> None:
    pixels = np.full((800, 800, 3), 90, np.uint8)
    whole = {
        "progressive": lambda: encode(Image.fromarray(pixels), progressive=True),
        "planes": lambda: planes_jpeg(list(np.ascontiguousarray(np.moveaxis(pixels, 2, 0)))),
        "cmyk": lambda: encode(Image.fromarray(pixels).convert("CMYK"), progressive=True),
    }[kind]()
    assert decode(repeat_scan(whole, 1)).shape == (800, 800, 3)
    data, start = repeat_scan(whole, 3000), time.process_time()
    with pytest.raises(DecodeError, match=f"more than {MAX_SCANS} scans"):
        decode(data)
    assert time.process_time() - start < 1


def test_a_few_bytes_that_promise_billions_of_pixels_are_refused_at_once() -> None:
    """A decoder would fill in what is missing."""
    data = bytearray(encode(Image.fromarray(smooth_picture())))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = (65_500).to_bytes(2, "big") * 2
    with pytest.raises(DecodeError, match="bytes cannot hold its 65500 × 65500 pixels"):
        read_header(bytes(data))


def test_the_least_bytes_an_image_can_have_are_enough() -> None:
    data = encode(Image.new("L", (4096, 4096)), optimize=True)  # a bit for each level, a bit for each end
    assert not decode(data).any()


MEASURE = """
from lockstep.data.decode import decode
from tests.data.large_index import peak_mb
from tests.data.pictures import bomb_png
data = bomb_png(5790)
assert len(data) < 300_000
before = peak_mb()
assert decode(data).shape == (5790, 5790, 3)
print(peak_mb() - before)
"""


def test_the_largest_png_takes_little_more_memory_than_its_pixels() -> None:
    out = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert 6 < 1e6 * float(out) / 5790**2 < 8  # four bytes a pixel in Pillow, three in the result, and a little
    with pytest.raises(DecodeError, match="5800 × 5800 is more than 33554432 pixels"):
        read_header(huge_png(5800))


@pytest.mark.parametrize("kind", ["EPS", "GIF", "BMP", "TIFF", "WEBP", "PPM", "PDF", "ICO"])
def test_other_formats_never_reach_their_readers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them starts another program."""
    data = encode(Image.fromarray(smooth_picture()), kind)
    monkeypatch.setattr("subprocess.Popen", None)
    for reader in Image.OPEN:
        if reader not in ("JPEG", "PNG"):
            monkeypatch.setitem(Image.OPEN, reader, None)
    with pytest.raises(DecodeError, match="no image of a kind that is read"):
        decode(data)


def test_a_header_tells_colors() -> None:
    image = Image.fromarray(smooth_picture())
    assert read_header(encode(image)).colors == "YCbCr"
    assert read_header(encode(image.convert("L"))).colors == "Gray"
    assert read_header(encode(image.convert("CMYK"))).colors == ""
    assert read_header(encode(image, "PNG")).max_factor == 1


def test_a_poster_of_20000_by_20000_is_decoded_at_a_quarter_of_its_size() -> None:
    data = huge_jpeg(20_000)
    header = read_header(data)
    assert (header.height, header.width, header.min_factor) == (20_000, 20_000, 4)
    pixels = decode(data)
    assert pixels.shape == (5000, 5000, 3)
    assert pixels.min() == 255


def test_a_png_of_20000_by_20000_is_refused() -> None:
    with pytest.raises(DecodeError, match="pixels"):
        read_header(huge_png(20_000))
