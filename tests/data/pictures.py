"""Encoded pictures of every kind that data sets hold, good and bad, as a source in memory."""

import io
import time
import zlib

import numpy as np
from PIL import Image


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth blobs, which every decoder shows alike."""
    rough = np.random.default_rng(seed).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return np.array(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC))


def encode(image: Image.Image | np.ndarray, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    if kind == "JPEG":
        options = {"quality": 95, "subsampling": 0} | options
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def huge_jpeg(side: int) -> bytes:
    """A white JPEG of side × side pixels, put together from parts: an encoder would take gigabytes."""
    stripe = encode(Image.new("L", (8 * 64, 8), 255), subsampling=-1)
    frame, scan = stripe.index(b"\xff\xc0"), stripe.index(b"\xff\xda")
    start = scan + 2 + int.from_bytes(stripe[scan + 2 : scan + 4], "big")
    head = bytearray(stripe[:start])
    head[frame + 5 : frame + 9] = side.to_bytes(2, "big") * 2
    bits = np.unpackbits(np.frombuffer(stripe[start:-2].replace(b"\xff\x00", b"\xff"), np.uint8))
    # The first block sets the level; each further one is the same six bits, "no difference" and "end of block".
    same = np.array([0, 0, 1, 0, 1, 0], np.uint8)
    first = "".join(map(str, bits)).rindex("001010" * 63)
    num_blocks = (-(-side // 8)) ** 2
    coded = np.packbits(np.concatenate([bits[:first], np.tile(same, num_blocks - 1), np.ones(7, np.uint8)]))
    return bytes(head) + coded.tobytes().replace(b"\xff", b"\xff\x00") + b"\xff\xd9"


def repeat_scan(jpeg: bytes, times: int) -> bytes:
    """The JPEG with its last scan so many times more; each takes a decoder as long as the first time."""
    return jpeg[:-2] + times * jpeg[jpeg.rindex(b"\xff\xda") : -2] + jpeg[-2:]


def planes_jpeg(planes: list[np.ndarray]) -> bytes:
    """A JPEG whose three colours come in scans of their own, each that of a grey image."""
    parts = [encode(Image.fromarray(plane), subsampling=-1) for plane in planes]
    frame, scan = parts[0].index(b"\xff\xc0"), parts[0].index(b"\xff\xda")
    colors = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    head = parts[0][:frame] + b"\xff\xc0\x00\x11" + parts[0][frame + 4 : frame + 9] + b"\x03" + colors
    tables = parts[0][frame + 13 : scan]
    scans = [
        b"\xff\xda\x00\x08\x01" + bytes([number, 0, 0, 63, 0]) + part[scan + 10 : -2]
        for number, part in enumerate(parts, start=1)
    ]
    return head + tables + b"".join(scans) + b"\xff\xd9"


class Pictures:
    """A source of given encoded images; counts how often each is read."""

    def __init__(self, encoded: list[bytes]) -> None:
        self.encoded = encoded
        self.num_samples = len(encoded)
        self.labels = np.arange(self.num_samples, dtype=np.int64)
        self.num_reads = 0

    def read(self, index: int) -> bytes:
        self.num_reads += 1
        return self.encoded[index]

    def name(self, index: int) -> str:
        return f"picture-{index}.jpg"


def photos(count: int, low: int = 40, high: int = 90) -> Pictures:
    """Colour JPEGs of different sizes."""
    sides = np.random.default_rng(7).integers(low, high, (count, 2)).tolist()
    return Pictures([encode(picture(height, width, seed)) for seed, (height, width) in enumerate(sides)])


def odd_photos(count: int) -> Pictures:
    """Photos among which every kind that nvJPEG does not get, or that is no picture at all, occurs."""
    source = photos(count)
    sixteen_bit = np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)
    good = Image.fromarray(picture(50, 60, 99))
    kinds = [
        encode(good.convert("L"), subsampling=-1),
        encode(good.convert("CMYK"), subsampling=-1),
        encode(good, progressive=True),
        encode(Image.fromarray(sixteen_bit), "PNG"),
        encode(good, "PNG"),
        encode(good)[:-300],
        b"",
        b"this is not an image",
    ]
    for turn, kind in enumerate(kinds):
        source.encoded[3 * turn + 1] = kind
    return source


def pillow_kinds() -> list[bytes]:
    """Every kind of picture that Pillow decodes, all of 40 × 56 pixels."""
    image = Image.fromarray(picture(40, 56, 5))
    clear = image.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(image.size))
    sixteen_bit = np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)
    by_mode = [image.convert(mode) for mode in ("1", "L", "LA", "P", "RGB")]
    return [
        *(encode(kind, "PNG") for kind in (*by_mode, clear, Image.fromarray(sixteen_bit))),
        encode(image.convert("P"), "PNG", transparency=3),
        encode(image, "WEBP", lossless=True),
        *(encode(image, kind) for kind in ("BMP", "TIFF", "GIF")),
        encode(image.convert("CMYK"), subsampling=-1),
    ]


def cut_png(height: int, width: int) -> bytes:
    """A PNG whose header is good and whose pixels end too early."""
    return encode(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8), "PNG")[:-900]


def icons(count: int) -> Pictures:
    """What a set of small pictures holds that are no JPEGs, and a few that are; two of them are bad."""
    kinds = pillow_kinds()
    source = Pictures([kinds[number % len(kinds)] for number in range(count)])
    for number in range(0, count, 5):
        source.encoded[number] = encode(picture(30 + number % 7, 40, number), "PNG")
    for number in range(3, count, 11):
        source.encoded[number] = encode(picture(50, 60, number))
    source.encoded[BAD_ICONS[0]] = cut_png(40, 40)
    source.encoded[BAD_ICONS[1]] = b"this is not an image"
    return source


BAD_ICONS = [7, 19]


class Hanging(Pictures):
    """Photos of which some do not come until they are let go."""

    def __init__(self, encoded: list[bytes], hangs: set[int], names_hang: bool = False) -> None:
        super().__init__(encoded)
        self.hangs, self.names_hang = hangs, names_hang
        self.released = False

    def _hang(self) -> None:
        deadline = time.monotonic() + 120
        while not self.released and time.monotonic() < deadline:
            time.sleep(0.01)

    def read(self, index: int) -> bytes:
        if index in self.hangs:
            self._hang()
        return super().read(index)

    def name(self, index: int) -> str:
        if self.names_hang and index in self.hangs:
            self._hang()
        return super().name(index)

    def where(self, index: int) -> str:
        return super().name(index)


BAD_AMONG_ODD = [3 * turn + 1 for turn in (5, 6, 7)]


def build_png(side: int, depth: int, color: int, content: bytes) -> bytes:
    """A PNG of side × side with this compressed content."""
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + bytes([depth, color, 0, 0, 0])
    chunks = [header, b"IDAT" + content, b"IEND"]
    framed = [(len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def huge_png(side: int) -> bytes:
    """A PNG whose header says side × side."""
    return build_png(side, 8, 2, zlib.compress(b"\x00"))


def bomb_png(side: int) -> bytes:
    """A PNG of side × side pixels of four times 16 bits, all nothing."""
    packer = zlib.compressobj(9)
    content = b"".join(packer.compress(bytes(1 + 8 * side)) for _ in range(side)) + packer.flush()
    return build_png(side, 16, 6, content)
