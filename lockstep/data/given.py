"""Images that somebody names, for a network that is trained: files, folders, bytes in memory (step 2 on the walk).

They are a source like any other, so that what is asked of a network passes through evaluation's own pipeline. A folder
of class folders, which need not be all that the network knows, is a source with the network's own labels.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.plain_files import READ_TIMEOUT_S, read_plain
from lockstep.data.sources import IMAGE_SUFFIXES, VAL_NAMES, Source, scan_folder
from lockstep.data.threads import Steps, look
from lockstep.errors import LockstepError

MOST_NAMED = 5  # classes in a sentence


class GivenImages:
    """Files and encoded images without a class, numbered as they were given."""

    def __init__(self, images: Sequence[str | Path | bytes]) -> None:
        self._images = images
        self.classes: tuple[str, ...] = ("",)
        self.labels: NDArray[np.integer[Any]] = np.zeros(len(images), np.int64)

    @property
    def num_samples(self) -> int:
        return len(self._images)

    def read(self, index: int) -> bytes:
        """The encoded image; OSError when the file cannot be read."""
        image = self._images[index]
        return image if isinstance(image, bytes) else read_plain(image)

    def name(self, index: int) -> str:
        """The file as it was given, or the number of what lies in memory."""
        image = self._images[index]
        return f"image {index}" if isinstance(image, bytes) else os.fspath(image)


def find_images(places: Sequence[Path], limit_s: float = READ_TIMEOUT_S) -> list[Path]:
    """Files as they are named, and every image below the folders among them, sorted folder by folder."""
    return look(lambda steps: [image for place in places for image in _find(place, steps)], limit_s)


def _find(place: Path, steps: Steps) -> list[Path]:
    steps.ask(place)
    try:
        if not place.is_dir():
            os.stat(place)
            return [place]
        images = sorted(_walk(place, steps))
    except (OSError, ValueError) as error:  # the latter for a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise LockstepError(f"{place} cannot be read ({reason}); name images, or folders that hold some.") from None
    if not images:
        raise LockstepError(f"{place} holds no images ({', '.join(IMAGE_SUFFIXES)}); name another folder.")
    return images


def _walk(root: Path, steps: Steps) -> list[Path]:
    """All images below a folder; a folder that was met before, by another name, is not entered again."""
    found: list[Path] = []
    status = os.stat(root)
    met = {(status.st_dev, status.st_ino)}
    left = [root]
    while left:
        folder = left.pop()
        steps.ask(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                steps.count += 1
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    status = os.stat(entry.path)
                    if (status.st_dev, status.st_ino) not in met:
                        met.add((status.st_dev, status.st_ino))
                        left.append(folder / entry.name)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    found.append(folder / entry.name)
    return found


class Relabeled:
    """A source whose classes are some of a network's, with the network's labels."""

    def __init__(self, source: Source, classes: tuple[str, ...]) -> None:
        """`classes` are the network's, and all of the source's are among them."""
        where = {name: place for place, name in enumerate(classes)}
        places = np.array([where[name] for name in source.classes], np.int64)
        self.classes = classes
        self.labels: NDArray[np.integer[Any]] = places[source.labels]
        self._source = source

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    def read(self, index: int) -> bytes:
        return self._source.read(index)

    def name(self, index: int) -> str:
        return self._source.name(index)


def match_classes(source: Source, classes: tuple[str, ...], where: str) -> Source:
    """The source with a network's labels, by the names of its classes; one that it does not know is refused."""
    if source.classes == classes:
        return source
    _refuse_unknown(source.classes, classes, where)
    return Relabeled(source, classes)


def _refuse_unknown(names: Sequence[str], known: Sequence[str], where: str) -> None:
    if unknown := sorted(set(names) - set(known)):
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        raise LockstepError(
            f"The network knows no class of the name {', '.join(unknown[:MOST_NAMED])}{more} ({len(unknown)} of "
            f"{len(names)} in {where}); rename or remove them there."
        )


def open_class_folders(root: Path, known: tuple[str, ...], limit_s: float = READ_TIMEOUT_S) -> Source:
    """The images of a folder of class folders, or of what serves as its `val/`, with a network's labels."""
    root, names = look(lambda steps: _list_class_folders(root, steps), limit_s)
    _refuse_unknown(names, known, str(root))
    return match_classes(scan_folder(root, names, limit_s), known, str(root))


def _list_class_folders(root: Path, steps: Steps) -> tuple[Path, tuple[str, ...]]:
    steps.ask(root)
    try:
        root = next((root / name for name in VAL_NAMES if (root / name).is_dir()), root)
        with os.scandir(root) as entries:
            classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise LockstepError(
            f"{root} cannot be read ({error.strerror}); name a folder that holds one of images for each class."
        ) from None
    if not classes:
        raise LockstepError(f"{root} holds no class folders; name a folder that holds one of images for each class.")
    return root, tuple(classes)
