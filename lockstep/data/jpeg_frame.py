"""What a JPEG says of itself before its first scan, found by walking from segment to segment (step 3 on the walk).

It tells how much time and memory decoding would take, which a file of a few bytes may make any number of. Torch-free.
"""

from typing import NamedTuple

Encoded = bytes | memoryview

START_OF_SCAN, END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
TABLES = (0xC4, 0xC8, 0xCC)  # markers among those of frames that are none
ONE_PASS = (0xC0, 0xC1)  # frames that are not progressive, and whose every block takes at least two codes
ALONE = (0x01, *range(0xD0, 0xD8), 0xFF)  # markers without a segment, and bytes that only fill
LEAST_BITS = 2  # of a block: one for its level, one for "no more"


class Frame(NamedTuple):
    """A JPEG's kind."""

    marker: int  # of its frame header; 0 for what cannot be walked
    has_many_scans: bool  # as progressive ones do, and those whose colours come one after the other

    def is_too_short(self, num_pixels: int, num_bytes: int) -> bool:
        """Whether so few bytes cannot be the whole of an image: a decoder would fill in the rest, at its leisure."""
        return self.marker in ONE_PASS and num_pixels // 64 * LEAST_BITS > 8 * num_bytes


def find_end(data: Encoded) -> bool:
    """Whether a JPEG has an end behind the start of its first scan: that of a thumbnail before it does not count."""
    whole = bytes(data)
    return whole.rfind(END_OF_IMAGE) > _walk(data)[1]


def read_frame(data: Encoded) -> Frame:
    """The kind of a JPEG; what cannot be walked is taken for one of many scans, which is the more careful guess."""
    return _walk(data)[0]


def _walk(data: Encoded) -> tuple[Frame, int]:
    """The kind of a JPEG, and how far the walk came."""
    at, marker, num_colors = 2, 0, 0
    while at + 10 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if kind in ALONE:
            at += 1 if kind == 0xFF else 2
            continue
        if kind == 0xDA:  # the first scan, with the number of its colours
            return Frame(marker, marker not in ONE_PASS or data[at + 4] < num_colors), at
        if 0xC0 <= kind <= 0xCF and kind not in TABLES:
            marker, num_colors = kind, data[at + 9]
        length = 256 * data[at + 2] + data[at + 3]
        if length < 2:
            break
        at += 2 + length
    return Frame(marker, True), at
