"""An index as large as ImageNet's, over shards that hold one picture each, and the memory of this process."""

import zlib
from pathlib import Path

import numpy as np
import simplejpeg

from lockstep.data.index import Index, write_index
from lockstep.data.index_check import ShardInfo
from lockstep.data.record import BLOCK, END, build_record

NUM_SAMPLES = 1_281_167
NUM_CLASSES = 1000
PER_SHARD = 2200


def write_large(root: Path) -> None:
    """Both splits; every sample of a shard is the same picture, so that the index is large and the shards are not."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 48, 3), np.uint8)
    jpeg = simplejpeg.encode_jpeg(pixels, colorsubsampling="420")
    shard = build_record("00000000-one.jpg", jpeg, 0) + END
    for split, num_samples in (("train", NUM_SAMPLES), ("val", 50_000)):
        names = [f"{split}-{number:06d}.tar" for number in range(-(-num_samples // PER_SHARD))]
        for name in names:
            (root / name).write_bytes(shard)
        write_index(
            root / f"{split}.index",
            Index(
                tuple(f"n{label:08d}" for label in range(NUM_CLASSES)),
                tuple(
                    ShardInfo(name, min(PER_SHARD, num_samples - number * PER_SHARD), len(shard))
                    for number, name in enumerate(names)
                ),
                (),
                {"shard_mb": 256.0, "short_side": 0, "quality": 0, "source": "none"},
                offsets=np.full(num_samples, BLOCK, np.int64),
                labels=np.arange(num_samples, dtype=np.int64) * NUM_CLASSES // num_samples,
                lengths=np.full(num_samples, len(jpeg), np.uint32),
                checksums=np.full(num_samples, zlib.crc32(jpeg), np.uint32),
            ),
        )


def resident_mb() -> float:
    """Memory that this process holds now, in MB."""
    return _read_status("VmRSS")


def peak_mb() -> float:
    """The most that this process ever held; `getrusage` would begin with what its parent held."""
    return _read_status("VmHWM")


def _read_status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError(f"no {name}")
