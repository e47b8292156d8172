"""One sample as it lies in a shard: two tar members, `<key>.jpg` and `<key>.cls`, as WebDataset has them.

A record is a pure function of the sample: no times, owners or modes, so that a shard packed twice is the same file, and
verifying is building the record again. Torch-free.
"""

import os
import re
import tarfile

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)  # how a tar file ends
FRAME_BYTES = 3 * BLOCK  # of a record beside the sample's bytes: two headers, and a label that fits a block
MAX_STEM = 60  # characters of a file's name that its key keeps, so that a member's name fits a plain header


def build_key(number: int, name: str) -> str:
    """A sample's name in its shard: its number in the folder, which makes it unique, and what the file was called."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", os.path.splitext(os.path.basename(name))[0])
    return f"{number:08d}-{stem[:MAX_STEM]}"


def build_record(name: str, data: bytes, label: int) -> bytes:
    """The record of a sample whose first member has this name; the sample's bytes start one block in."""
    return _build_member(name, data) + _build_member(f"{key_of(name)}.cls", str(label).encode())


def key_of(name: str) -> str:
    """The key in a member's name: all before the first dot."""
    return name.partition(".")[0]


def _build_member(name: str, data: bytes) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(padding(len(data)))


def padding(length: int) -> int:
    """Bytes that fill a member's last block."""
    return -length % BLOCK


def parse_name(header: bytes) -> str:
    """The member's name in a tar header, or nothing when the header is damaged."""
    try:
        return tarfile.TarInfo.frombuf(header, "ascii", "strict").name
    except (tarfile.HeaderError, UnicodeDecodeError):
        return ""
