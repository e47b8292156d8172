"""What a folder of images or of packed shards holds: samples, classes, bytes, and how it was packed."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lockstep.data.pack import measure_sizes
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.shards import SPLITS, is_packed, read_indexes
from lockstep.data.sources import open_folder
from lockstep.data.workers import Progress


class SplitInventory(NamedTuple):
    """One split in numbers."""

    name: str
    num_samples: int
    num_classes: int
    num_shards: int  # 0 for a folder of images
    num_bytes: int  # of the samples alone


def take_inventory(
    root: Path, progress: Callable[[str], Progress], limit_s: float = READ_TIMEOUT_S
) -> tuple[list[SplitInventory], str]:
    """Each split in numbers, and a sentence on how they lie on disk."""
    if not is_packed(root, limit_s):
        splits = [
            SplitInventory(
                name,
                folder.num_samples,
                len(folder.classes),
                0,
                int(measure_sizes(folder, progress(f"Looking at {name}"), limit_s).sum()),
            )
            for name, folder in zip(SPLITS, open_folder(root, limit_s), strict=True)
        ]
        return splits, "A folder of images; `lockstep data pack` makes shards of it."
    indexes = read_indexes(root, limit_s)
    splits = [
        SplitInventory(name, index.num_samples, len(index.classes), len(index.shards), int(index.lengths.sum()))
        for name, index in zip(SPLITS, indexes, strict=True)
    ]
    settings = indexes[0].settings
    smaller = f"short sides at most {settings['short_side']} pixels, quality {settings['quality']}"
    bytes_kept = smaller if settings["short_side"] else "every file's bytes as they were"
    num_skipped = sum(len(index.skipped) for index in indexes)
    return splits, f"Packed by {settings['shard_mb']:g} MB: {bytes_kept}; {num_skipped} unreadable files left out."
