"""What WebP, BMP, TIFF and GIF files say of themselves: sides, before anything is decoded (step 3 on the walk).

Pillow decodes them, one frame of each. Its readers believe what a file says, some as soon as they open it: a canvas
that is allocated, tables of tags that are read one by one, a million comments before the picture. Here a header is
walked first, within limits of its own, and what would take long is refused. Torch-free.
"""

import struct
from typing import NamedTuple

from lockstep.data.jpeg_frame import Encoded

MAX_WEBP_BYTES = 1 << 26  # chunks of any kind are copied
MAX_BLOCKS = 1 << 12  # before a GIF's first picture
MAX_TAGS, MAX_TAG_BYTES, MAX_STRIPS = 256, 1 << 20, 1 << 16
# Of a TIFF: none, LZW, deflate (two numbers), PackBits. The others are formats within a format, or need libraries.
COMPRESSIONS = (1, 5, 8, 32946, 32773)
# The tags that say how pixels lie; a copy of the directory keeps these alone.
PIXEL_TAGS = (
    256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284, 317, 320, 322, 323, 324, 325, 338, 339,
)  # fmt: skip
WIDTH, HEIGHT, COMPRESSION, STRIPS, TILES = 256, 257, 259, 273, 324
TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
TYPE_FORMATS = {1: "B", 3: "H", 4: "I"}


class Sides(NamedTuple):
    """An image by its header."""

    kind: str  # as Pillow calls it
    height: int
    width: int


def read_sides(data: Encoded) -> Sides | None:
    """Kind and sides of an image of these formats, None for any other; ValueError says what is wrong."""
    start = bytes(data[:12])
    try:
        if start[:4] == b"RIFF" and start[8:] == b"WEBP":
            return _check_sides("WEBP", *_read_webp(bytes(data[:30]), len(data)))
        if start[:2] == b"BM":
            return _check_sides("BMP", *_read_bmp(bytes(data[:64]), len(data)))
        if start[:6] in (b"GIF87a", b"GIF89a"):
            return _check_sides("GIF", *_read_gif(data))
        if start[:4] in (b"II*\0", b"MM\0*"):
            tags = _read_tags(data)
            return _check_sides("TIFF", tags.read(HEIGHT), tags.read(WIDTH))
    except (struct.error, IndexError) as error:
        raise ValueError("its header is cut short") from error
    if start[:4] in (b"II+\0", b"MM\0+"):
        raise ValueError("a BigTIFF is not read; save it as a plain TIFF or as PNG")
    return None


def _check_sides(kind: str, height: int, width: int) -> Sides:
    if not height or not width:
        raise ValueError("it has no pixels")
    return Sides(kind, height, width)


def is_whole(data: Encoded, kind: str) -> bool:
    """Whether a file ends as its kind does; False where only decoding tells."""
    if kind == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    if kind == "GIF":
        return bytes(data[-1:]) == b";"
    return False


def _read_webp(head: bytes, num_bytes: int) -> tuple[int, int]:
    """Height and width by the first chunk: a canvas, or one of the two kinds of pictures."""
    if num_bytes > MAX_WEBP_BYTES:
        raise ValueError(f"a WebP of {num_bytes:,} bytes is not read")
    kind = head[12:16]
    if kind == b"VP8X":
        width, height = int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    elif kind == b"VP8L":
        bits = struct.unpack_from("<I", head, 21)[0]
        width, height = (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", head, 26))
    else:
        raise ValueError("its header is damaged")
    return height, width


def _read_bmp(head: bytes, num_bytes: int) -> tuple[int, int]:
    """Height and width of a BMP that is not compressed: then its bytes are as many as its pixels need."""
    size = struct.unpack_from("<I", head, 14)[0]
    if size == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", head, 18)
        compression = 0
    else:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", head, 18)
    if compression not in (0, 3):  # 3: plain, with masks
        raise ValueError("a compressed BMP is not read; save it as PNG")
    if width < 0 or bits not in (1, 4, 8, 16, 24, 32):
        raise ValueError("its header is damaged")
    if width * abs(height) * bits // 8 > num_bytes:
        raise ValueError(f"{num_bytes:,} bytes cannot hold its {width} × {abs(height)} pixels")
    return abs(height), width


def _read_gif(data: Encoded) -> tuple[int, int]:
    """Height and width of the screen and the first picture on it."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + ((3 << ((flags & 7) + 1)) if flags & 0x80 else 0)
    for _ in range(MAX_BLOCKS):
        if data[at] == 0x2C:
            left, top, across, down = struct.unpack_from("<HHHH", data, at + 1)
            if not across or not down:
                raise ValueError("it has no pixels")
            return max(height, top + down), max(width, left + across)
        if data[at] != 0x21:
            raise ValueError("its blocks are damaged")
        at += 2
        for _ in range(MAX_BLOCKS):
            length = data[at]
            at += 1 + length
            if not length:
                break
        else:
            break
    raise ValueError("too much stands before its first picture")


class Tags(NamedTuple):
    """A TIFF's first directory: each tag as it stands there."""

    data: Encoded
    order: str  # of bytes
    entries: dict[int, bytes]  # by tag: its twelve bytes

    def read(self, tag: int, default: int = 0) -> int:
        """A tag's first value, where it is one whole number."""
        if tag not in self.entries:
            return default
        _, kind, count = struct.unpack_from(f"{self.order}HHI", self.entries[tag])
        if count != 1 or kind not in TYPE_FORMATS:
            raise ValueError("its header is damaged")
        return int(struct.unpack_from(f"{self.order}{TYPE_FORMATS[kind]}", self.entries[tag], 8)[0])

    def count(self, tag: int) -> int:
        """How many values a tag has."""
        return int(struct.unpack_from(f"{self.order}I", self.entries[tag], 4)[0]) if tag in self.entries else 0


def _read_tags(data: Encoded) -> Tags:
    order = "<" if data[0] == 0x49 else ">"
    at = struct.unpack_from(f"{order}I", data, 4)[0]
    num_tags = struct.unpack_from(f"{order}H", data, at)[0]
    if num_tags > MAX_TAGS:
        raise ValueError(f"it has {num_tags} tags, more than the {MAX_TAGS} allowed")
    entries: dict[int, bytes] = {}
    total = 0
    for number in range(num_tags):
        entry = bytes(data[at + 2 + 12 * number : at + 14 + 12 * number])
        tag, kind, count, offset = struct.unpack(f"{order}HHII", entry)
        if tag not in PIXEL_TAGS or tag in entries:
            continue
        num_bytes = TYPE_BYTES.get(kind, 0) * count
        total += num_bytes
        if not num_bytes or total > MAX_TAG_BYTES or (num_bytes > 4 and offset + num_bytes > len(data)):
            raise ValueError("its header is damaged")
        entries[tag] = entry
    tags = Tags(data, order, entries)
    if (compression := tags.read(COMPRESSION, 1)) not in COMPRESSIONS:
        raise ValueError(f"a TIFF of compression {compression} is not read; save it as PNG")
    if max(tags.count(STRIPS), tags.count(TILES)) > MAX_STRIPS:
        raise ValueError(f"it has more than {MAX_STRIPS} strips")
    return tags


def tidy_tiff(data: Encoded) -> bytes:
    """The same TIFF with a directory of pixel tags alone: whatever else it points to is never read.

    The new directory stands behind everything, so that all places in the file stay what they are.
    """
    tags = _read_tags(data)
    at = len(data) + len(data) % 2
    directory = struct.pack(f"{tags.order}H", len(tags.entries)) + b"".join(
        entry for _, entry in sorted(tags.entries.items())
    )
    head = bytes(data[:4]) + struct.pack(f"{tags.order}I", at)
    return head + bytes(data[8:]) + bytes(at - len(data)) + directory + bytes(4)
