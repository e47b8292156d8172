"""Where samples lie: sample number → encoded bytes and label (step 2 on the walk).

A source is anything with the members of `Source`; the order before it gives the numbers, the decoder after it takes
the bytes. Here are image folders, and a generated data set is one too (`generated.py`); packed ones: `shards.py`.
"""

import hashlib
import os
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.data.plain_files import READ_TIMEOUT_S, measure_plain, read_plain
from lockstep.data.threads import Steps, look
from lockstep.errors import LockstepError

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")


class Source(Protocol):
    """Numbered samples of named classes, each with encoded bytes, a label and a name for messages."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def labels(self) -> NDArray[np.integer[Any]]: ...
    def read(self, index: int) -> bytes: ...
    def name(self, index: int) -> str: ...


class DataSet(Source, Protocol):
    """A source that can be told from others when a run goes on."""

    def fingerprint(self) -> dict[str, str]: ...


def hash_arrays(*arrays: bytes | NDArray[Any]) -> str:
    """A short hash over arrays, each with its length, so that what moves from one to the next is noticed."""
    total = hashlib.blake2b(digest_size=16)
    for array in arrays:
        data = array if isinstance(array, bytes) else np.ascontiguousarray(array).data.cast("B")
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def hash_labels(classes: tuple[str, ...], labels: NDArray[np.integer[Any]]) -> str:
    """What two forms of one data set have in common: the classes, and which sample is of which."""
    return hash_arrays("\0".join(classes).encode(errors="surrogateescape"), labels.astype(np.int64))


class ImageFolder:
    """One split of an image folder: `<root>/<class>/**/*.jpeg`, in sorted order, so the same on every rank."""

    def __init__(
        self, root: bytes, classes: tuple[str, ...], paths: bytes, ends: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> None:
        # One joined string and an array of ends: millions of paths without millions of objects.
        self._root, self.paths, self.ends = root, paths, ends
        self.classes = classes
        self.labels = labels

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def _path(self, index: int) -> bytes:
        return self._root + self.paths[self.ends[index] : self.ends[index + 1]]

    def read(self, index: int) -> bytes:
        """The encoded image; OSError when the file cannot be read."""
        return read_plain(self._path(index))

    def name(self, index: int) -> str:
        """The file's path, for messages."""
        return os.fsdecode(self._path(index))

    def size(self, index: int) -> int:
        """Bytes of the file; OSError when there is none."""
        return measure_plain(self._path(index))

    def fingerprint(self) -> dict[str, str]:
        """What tells this data from other: names and labels. Not sizes: a million files would have to be asked."""
        names = hash_arrays(self.paths, self.ends)
        return {"labels": hash_labels(self.classes, self.labels), "names": names}

    def part(self, first: int, last: int) -> "ImageFolder":
        """The samples from `first` to before `last`, numbered from 0."""
        ends = self.ends[first : last + 1]
        return ImageFolder(
            self._root, self.classes, self.paths[ends[0] : ends[-1]], ends - ends[0], self.labels[first:last]
        )


def scan_folder(root: Path, classes: tuple[str, ...], limit_s: float = READ_TIMEOUT_S) -> ImageFolder:
    """Find every image of one split."""
    return look(lambda steps: _scan_folder(root, classes, steps), limit_s)


def _scan_folder(root: Path, classes: tuple[str, ...], steps: Steps) -> ImageFolder:
    paths: list[bytes] = []
    counts: list[int] = []
    for name in classes:
        found: list[bytes] = []
        _find_images(root, name, found, steps)
        found.sort()
        if not found:
            raise LockstepError(f"The class folder {root / name} holds no images; add some or remove the folder.")
        paths += found
        counts.append(len(found))
    ends = np.fromiter(accumulate(map(len, paths), initial=0), np.int64)
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return ImageFolder(os.fsencode(root) + b"/", classes, b"".join(paths), ends, labels)


def _find_images(root: Path, folder: str, found: list[bytes], steps: Steps) -> None:
    """Add the paths, relative to the root, of all images in a folder and the folders below it."""
    steps.ask(root / folder)
    with os.scandir(root / folder) as entries:
        for entry in entries:
            steps.count += 1  # a folder may hold a million files, on a disk far away
            name = entry.name
            if name.startswith("."):
                continue
            if name.lower().endswith(IMAGE_SUFFIXES):
                found.append(os.fsencode(f"{folder}/{name}"))
            elif entry.is_dir():
                _find_images(root, f"{folder}/{name}", found, steps)


def _list_classes(root: Path, steps: Steps) -> tuple[str, ...]:
    """The class folders of one split, sorted."""
    steps.ask(root)
    if not root.is_dir():
        raise LockstepError(f"There is no folder {root}; data.path must name a folder that holds train/ and val/.")
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise LockstepError(f"{root} holds no class folders; expected one folder of images for each class.")
    return tuple(classes)


def _refuse_difference(extra: set[str], there: Path, missing: Path) -> None:
    """Raise when a split has class folders that the other lacks."""
    if extra:
        names = ", ".join(sorted(extra)[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
        raise LockstepError(
            f"{len(extra)} class folder(s) of {there} are missing from {missing}: {names}; "
            "train/ and val/ must hold the same classes."
        )


def check_root(root: Path, limit_s: float = READ_TIMEOUT_S) -> None:
    """Refuse a root that is no folder here."""
    look(lambda steps: _check_root(root, steps), limit_s)


def _check_root(root: Path, steps: Steps) -> None:
    steps.ask(root)
    if not root.is_dir():
        raise LockstepError(f"The data path {root} is not a folder; set data.path to one that holds train/ and val/.")


def open_folder(root: str | Path, limit_s: float = READ_TIMEOUT_S) -> tuple[ImageFolder, ImageFolder]:
    """The training and validation splits under a root; labels number the sorted class names, the same in both."""
    root = Path(root).expanduser()
    return look(lambda steps: _open_folder(root, steps), limit_s)


def _open_folder(root: Path, steps: Steps) -> tuple[ImageFolder, ImageFolder]:
    train, val = root / "train", root / "val"
    try:
        _check_root(root, steps)
        classes, val_classes = _list_classes(train, steps), _list_classes(val, steps)
        _refuse_difference(set(classes) - set(val_classes), train, val)
        _refuse_difference(set(val_classes) - set(classes), val, train)
        return _scan_folder(train, classes, steps), _scan_folder(val, classes, steps)
    except OSError as error:
        raise LockstepError(
            f"The data path {error.filename or root} cannot be read ({error.strerror}); check its permissions and disk."
        ) from error
