"""Scanned image folders from rank 0 to all ranks (step 0 on the walk): class names, file names, samples of each class.

What travels is of a fixed format and says nothing of where the folder lies: each rank puts its own path before the
names, and refuses what does not add up.
"""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.comm.world import World
from lockstep.data.sources import TRAIN, VAL_NAMES, ImageFolder
from lockstep.engine.build import Sources
from lockstep.errors import LockstepError

SPLITS = ("train", "val")
FOLDERS = (TRAIN, *VAL_NAMES)  # that a split may lie in, below the root; or it is the root itself
LENGTH = np.dtype("<u2")  # of a file's name; no system allows one of 64 KiB
MAX_NAMES_BYTES = 64 << 30  # of all names of a split: more than a file system holds


def share_scanned(world: World, sources: Sources | None, root: Path) -> Sources | None:
    """Rank 0's image folders on every rank; None where rank 0 has something else. Every rank calls it."""
    folders = [sources.train, sources.val] if sources is not None else []
    mine = [folder for folder in folders if isinstance(folder, ImageFolder)]
    header = [_describe(folder, root) for folder in mine] if len(mine) == len(SPLITS) else None
    header = world.broadcast_value(header)
    if header is None:
        return None
    received = []
    for index in range(len(SPLITS)):
        own = mine[index] if world.is_first else None
        paths = world.broadcast_bytes(own.paths if own else b"", most=MAX_NAMES_BYTES)
        lengths = world.broadcast_bytes(
            np.diff(own.ends).astype(LENGTH).tobytes() if own else b"", most=MAX_NAMES_BYTES
        )
        received.append(own or rebuild_folder(root, header[index], paths, lengths))
    return Sources(*received)


def _describe(folder: ImageFolder, root: Path) -> dict[str, Any]:
    counts = np.bincount(folder.labels, minlength=len(folder.classes))
    return {"folder": folder.split_below(root), "classes": list(folder.classes), "counts": counts.tolist()}


def rebuild_folder(root: Path, table: dict[str, Any], paths: bytes, lengths: bytes) -> ImageFolder:
    """A split under this rank's own root; samples lie class after class, as a scan finds them."""
    root = root / table["folder"] if table.get("folder") in FOLDERS else root
    classes, counts = tuple(map(str, table["classes"])), [int(count) for count in table["counts"]]
    sizes = np.frombuffer(lengths, LENGTH).astype(np.int64) if len(lengths) % LENGTH.itemsize == 0 else np.zeros(0)
    fits = len(classes) == len(counts) and min(counts, default=-1) >= 0 and sum(counts) == len(sizes)
    if not fits or int(sizes.sum()) != len(paths):
        raise LockstepError(f"Rank 0 sent names for {root} that do not add up; start all ranks of one release.")
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return ImageFolder(bytes(root) + b"/", classes, paths, ends, labels)
