"""What a folder of images or of packed shards holds: samples, classes, bytes, and how it was packed."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lockstep.data.index import Index
from lockstep.data.pack import measure_sizes
from lockstep.data.parquet import holds_parquet, open_parquet
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.shards import SPLITS, is_packed, read_indexes
from lockstep.data.sources import open_folder
from lockstep.data.webdataset import find_tars, read_or_build, refuse_compressed, split_tars
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
    if not is_packed(root, limit_s) and (tars := find_tars(root, limit_s)):
        train, val, notes = split_tars(root, tars, limit_s)
        indexes = read_or_build(root, [train, val], progress("Looking through tar files"), 0, limit_s)
        sentences = ["WebDataset's tar files without checksums; `lockstep data index` adds them.", *notes]
        return _count(indexes), " ".join(sentences)
    if not is_packed(root, limit_s) and holds_parquet(root, limit_s):
        parts = open_parquet(root, limit_s)
        splits = [
            SplitInventory(name, part.num_samples, len(part.classes), 0, int(part.sizes.sum()))
            for name, part in zip(SPLITS, parts, strict=True)
        ]
        what = "A set in Parquet, its bytes about so many; a run packs it on first use, `lockstep data pack` to a place"
        return splits, " ".join([f"{what} of your own.", *(note for part in parts for note in part.notes)])
    if not is_packed(root, limit_s):
        refuse_compressed(root, limit_s)
        folders = open_folder(root, limit_s)
        splits = [
            SplitInventory(
                name,
                folder.num_samples,
                len(folder.classes),
                0,
                int(measure_sizes(folder, progress(f"Looking at {name}"), limit_s).sum()),
            )
            for name, folder in zip(SPLITS, folders, strict=True)
        ]
        sentences = ["A folder of images; `lockstep data pack` makes shards of it."]
        return splits, " ".join([*sentences, *(note for folder in folders for note in folder.notes)])
    indexes = read_indexes(root, limit_s)
    splits = _count(indexes)
    settings = indexes[0].settings
    if "webdataset" in settings:
        return splits, "WebDataset's tar files with an index of every byte."
    smaller = f"short sides at most {settings['short_side']} pixels, quality {settings['quality']}"
    bytes_kept = smaller if settings["short_side"] else "every file's bytes as they were"
    num_skipped = sum(len(index.skipped) for index in indexes)
    files = "file" if num_skipped == 1 else "files"
    return splits, f"Packed by {settings['shard_mb']:g} MB: {bytes_kept}; {num_skipped} unreadable {files} left out."


def _count(indexes: list[Index]) -> list[SplitInventory]:
    return [
        SplitInventory(name, index.num_samples, len(index.classes), len(index.shards), int(index.lengths.sum()))
        for name, index in zip(SPLITS, indexes, strict=True)
    ]
