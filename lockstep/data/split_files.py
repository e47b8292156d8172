"""Which of a folder's files belong to which split, by their names: sets of a few large files. Torch-free."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.data.metadata import find_metadata
from lockstep.data.threads import Steps
from lockstep.errors import LockstepError

WORDS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "eval"),
    "test": ("test", "testing"),
}
FOLDERS = {"data", *(word for words in WORDS.values() for word in words)}  # that may hold such files
MAX_FILES = 1 << 20


def list_files(root: Path, suffix: str, steps: Steps) -> list[Path]:
    """The files with a suffix in a folder and in the folders of it, sorted by name."""
    steps.ask(root)
    if not root.is_dir():
        return []
    found: list[Path] = []
    for entry in sorted(_list(root, steps)):
        if entry.name.lower().endswith(suffix):
            found.append(entry)
        elif entry.name.lower() in FOLDERS and entry.is_dir():
            found += sorted(path for path in _list(entry, steps) if path.name.lower().endswith(suffix))
    if len(found) > MAX_FILES:
        raise LockstepError(f"{root} holds {len(found):,} {suffix} files, more than the {MAX_FILES:,} allowed.")
    return found


def find_large(root: Path, suffix: str, steps: Steps) -> list[Path]:
    """The same where they are the data set: none beside a train/ of images, which they may have been unpacked to."""
    found = list_files(root, suffix, steps)
    train = root / "train"
    if found and train.is_dir() and (find_metadata(train) or any(path.is_dir() for path in _list(train, steps))):
        return []
    return found


def _list(folder: Path, steps: Steps) -> Iterator[Path]:
    """What lies in a folder and is not hidden; it may be a million files, on a disk far away."""
    steps.ask(folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            steps.count += 1
            if not entry.name.startswith("."):
                yield folder / entry.name


def split_files(root: Path, files: list[Path], val_share: float) -> tuple[list[Path], list[Path], tuple[str, ...]]:
    """The files of the training and of the validation split, and what should be said of it.

    A word of a file's name, or of its folder's, decides. With a `val_share` the second list is empty.
    """
    by_split: dict[str, list[Path]] = {"train": [], "val": [], "test": [], "": []}
    for path in files:
        words = set(re.findall(r"[a-z]+", str(path.relative_to(root)).lower()))
        split = next((split for split, names in WORDS.items() if words & set(names)), "")
        by_split[split].append(path)
    train, val = by_split["train"], by_split["val"] or by_split["test"]
    notes: list[str] = []
    if val_share:
        train, ignored = (train or by_split[""]), (val if train or not by_split[""] else [])
        val = []
        if ignored:
            more = f" and {len(ignored) - 1} other{'s' if len(ignored) > 2 else ''} are" if len(ignored) > 1 else " is"
            notes.append(f"data.val_share = {val_share:g} splits the training files; {ignored[0].name}{more} not used.")
    elif val and not by_split["val"]:
        notes.append(
            f"{root} has no validation files; its test files ({val[0].name}, …) serve as the validation split."
        )
    unused = [path for path in by_split[""] if path not in train]
    if unused and train:
        notes.append(f"{len(unused)} files in {root} belong to no split by their names: {unused[0].name}, ….")
    if not train or (not val and not val_share):
        raise LockstepError(
            f"{root} holds {len(files)} files such as {files[0].name}, but none for "
            f"{'validation' if train else 'training'} by its name; call them train-… and val-…, or set "
            "data.val_share = 0.1 to split off a tenth."
        )
    return train, val, tuple(notes)
