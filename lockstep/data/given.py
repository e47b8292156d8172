"""Images that somebody names, for a network that is trained: files, folders, bytes in memory (step 2 on the walk).

They are a source like any other, so that what is asked of a network passes through evaluation's own pipeline. Images
with classes, which need not be all that the network knows, are a source with the network's own labels: a folder of
class folders or with a table of labels, or an object of the user's. What is left out is said in notes, as in
`sources.py`.
"""

import errno
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lockstep.data.metadata import find_metadata
from lockstep.data.own_data import MEMBERS, encode_image, open_own
from lockstep.data.plain_files import READ_TIMEOUT_S, read_plain
from lockstep.data.sources import IMAGE_SUFFIXES, VAL_NAMES, Source, build_folder, read_table, scan_folder
from lockstep.data.threads import Steps, look
from lockstep.errors import LockstepError
from lockstep.named import describe

MOST_NAMED = 5  # classes or suffixes in a sentence
FOLDER_WANTED = "name a folder that holds one of images for each class"

GivenImage = str | Path | bytes | bytearray | memoryview | Image.Image
ONE_IMAGE = (str, Path, bytes, bytearray, memoryview, Image.Image)  # the same, to be asked for


def list_given(images: GivenImage | Iterable[GivenImage]) -> list[GivenImage]:
    """Images as a list, also of one that stands alone; what is no image is a sentence."""
    if isinstance(images, ONE_IMAGE):
        return [images]
    wanted = "give paths of files, the bytes of encoded images, or PIL images"
    try:
        listed = list(images)
    except TypeError:
        raise LockstepError(f"The images come as {describe(images)}; {wanted}.") from None
    for place, image in enumerate(listed):
        if not isinstance(image, ONE_IMAGE):
            raise LockstepError(f"Image {place} comes as {describe(image)}; {wanted}.")
    return listed


def open_folders(images: Sequence[GivenImage], limit_s: float = READ_TIMEOUT_S) -> list[GivenImage]:
    """The same with a folder's images, sorted, in the place of each folder; what cannot be read stays, to be told."""

    def find(steps: Steps) -> list[GivenImage]:
        found: list[GivenImage] = []
        for image in images:
            is_folder = isinstance(image, str | Path) and _is_folder(Path(image), steps)
            found += _find(Path(image), steps, []) if is_folder else [image]  # type: ignore[arg-type]
        return found

    return look(find, limit_s)


def _is_folder(place: Path, steps: Steps) -> bool:
    steps.ask(place)
    try:
        return place.is_dir()
    except (OSError, ValueError):  # a name too long, or with a zero byte
        return False


class GivenImages:
    """Files, encoded images and PIL's without a class, numbered as they were given."""

    def __init__(self, images: Sequence[GivenImage]) -> None:
        self._images = images
        self.classes: tuple[str, ...] = ("",)
        self.labels: NDArray[np.integer[Any]] = np.zeros(len(images), np.int64)

    @property
    def num_samples(self) -> int:
        return len(self._images)

    def read(self, index: int) -> bytes:
        """The encoded image; OSError when it cannot be read."""
        image = self._images[index]
        if isinstance(image, Image.Image):
            return encode_image(image)
        try:
            return read_plain(image) if isinstance(image, str | Path) else bytes(image)
        except ValueError as error:  # a name with a zero byte
            raise OSError(errno.EINVAL, str(error)) from error

    def name(self, index: int) -> str:
        """The file as it was given, or the number of what lies in memory."""
        image = self._images[index]
        return os.fspath(image) if isinstance(image, str | Path) else f"image {index}"


def find_images(places: Sequence[Path], limit_s: float = READ_TIMEOUT_S) -> tuple[list[Path], tuple[str, ...]]:
    """Files as they are named, every image below the folders among them, sorted folder by folder; and what to say.

    What lies in the folders and has no image's name is left out, and counted in a sentence.
    """
    left_out: list[Path] = []
    images = look(lambda steps: [image for place in places for image in _find(place, steps, left_out)], limit_s)
    if not left_out:
        return images, ()
    counts = Counter(path.suffix.lower() for path in left_out)
    kinds = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in counts.most_common(MOST_NAMED)]
    more = f" and {len(counts) - MOST_NAMED} other kinds" if len(counts) > MOST_NAMED else ""
    return images, (
        f"{len(left_out):,} of the files there are left out, as their names are not those of images that can be read: "
        f"{', '.join(kinds)}{more}, such as {min(left_out)}; save images among them as JPEG or PNG.",
    )


def _find(place: Path, steps: Steps, left_out: list[Path]) -> list[Path]:
    steps.ask(place)
    try:
        if not place.is_dir():
            os.stat(place)
            return [place]
        images = sorted(_walk(place, steps, left_out))
    except (OSError, ValueError) as error:  # the latter for a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise LockstepError(f"{place} cannot be read ({reason}); name images, or folders that hold some.") from None
    if not images:
        raise LockstepError(f"{place} holds no images ({', '.join(IMAGE_SUFFIXES)}); name another folder.")
    return images


def _walk(root: Path, steps: Steps, left_out: list[Path]) -> list[Path]:
    """All images below a folder, and the files left out; one met before, by another name, is not entered again."""
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
                    if entry.is_symlink() and _leads_back(entry.path, (root, folder)):
                        continue
                    status = os.stat(entry.path)
                    if (status.st_dev, status.st_ino) not in met:
                        met.add((status.st_dev, status.st_ino))
                        left.append(folder / entry.name)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    found.append(folder / entry.name)
                else:
                    left_out.append(folder / entry.name)
    return found


def _leads_back(link: str, places: Sequence[Path]) -> bool:
    """Whether a link leads to a folder above one of these, whose other images nobody has named, or to it itself."""
    real = os.path.realpath(link).rstrip("/")
    return any(f"{os.path.realpath(place)}/".startswith(f"{real}/") for place in places)


class Relabeled:
    """A source whose classes are some of a network's, with the network's labels."""

    def __init__(self, source: Source, classes: tuple[str, ...], notes: tuple[str, ...] = ()) -> None:
        """`classes` are the network's, and all of the source's are among them."""
        where = {name: place for place, name in enumerate(classes)}
        places = np.array([where[name] for name in source.classes], np.int64)
        self.classes = classes
        self.labels: NDArray[np.integer[Any]] = places[source.labels]
        self.notes = notes  # what its reader should know of it, in sentences
        self._source = source

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    def read(self, index: int) -> bytes:
        return self._source.read(index)

    def name(self, index: int) -> str:
        return self._source.name(index)


def match_classes(source: Source, classes: tuple[str, ...], where: str, notes: tuple[str, ...] | None = None) -> Source:
    """The source with a network's labels, by the names of its classes; one that it does not know is refused.

    `notes` stand in the place of the source's own.
    """
    own = tuple(getattr(source, "notes", ()))
    notes = own if notes is None else notes
    if source.classes == classes and notes == own:
        return source
    _refuse_unknown(source.classes, classes, where)
    return Relabeled(source, classes, notes)


def _refuse_unknown(names: Sequence[str], known: Sequence[str], where: str) -> None:
    if unknown := sorted(set(names) - set(known)):
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        knows = ", ".join(known[:MOST_NAMED]) + (", …" if len(known) > MOST_NAMED else "")
        raise LockstepError(
            f"The network knows no class of the name {', '.join(unknown[:MOST_NAMED])}{more} ({len(unknown)} of "
            f"{len(names)} in {where}), only {knows}; rename or remove them there."
        )


class _NoTraining:
    """What stands where a data set to train with would: one sample that nobody asks for, and perhaps names."""

    labels = (0,)

    def __init__(self, classes: tuple[str, ...] | None) -> None:
        self.classes = classes

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> Any:
        raise IndexError(number)


def open_object(samples: Any, known: tuple[str, ...], limit_s: float = READ_TIMEOUT_S) -> Source:
    """A user's data set, `x[i] -> (bytes, label)`, with a network's labels; without `classes` its labels are those."""
    if not all(hasattr(samples, member) for member in MEMBERS):
        has_names = getattr(samples, "classes", None) is not None
        samples = open_own(_NoTraining(None if has_names else known), samples, limit_s)[1]
    return match_classes(samples, known, "the data given")


def holds_classes(root: Path, known: tuple[str, ...], limit_s: float = READ_TIMEOUT_S) -> bool:
    """Whether a folder holds images sorted by some of a network's classes: tar files beside those are not the data."""

    def find(steps: Steps) -> bool:
        steps.ask(root)
        split = _find_split(root)
        return find_metadata(split) is not None or any((split / name).is_dir() for name in known if name)

    try:
        return look(find, limit_s)
    except (OSError, ValueError):  # said by whoever opens it
        return False


def open_class_folders(root: Path, known: tuple[str, ...], limit_s: float = READ_TIMEOUT_S) -> Source:
    """The images of a folder of class folders, or of what serves as its `val/`, with a network's labels.

    A table of file names and labels, as image folders of Hugging Face have, will do for the class folders.
    """
    given, (root, table, names) = root, look(lambda steps: _list_class_folders(root, steps), limit_s)
    if table is None:
        _refuse_unknown(names, known, str(root))
        source = scan_folder(root, names, limit_s)
    else:
        paths, labels, said = look(lambda steps: read_table(table, steps), limit_s)
        names = tuple(sorted(set(labels)))
        places = {name: place for place, name in enumerate(names)}
        numbers = np.array([places[label] for label in labels], np.int64)
        source = build_folder(os.fsencode(root) + b"/", names, paths, numbers, said)
    if root != given and root.name != VAL_NAMES[0]:
        source.notes += (f"There is no {VAL_NAMES[0]}/ in {given}; {root.name}/ serves as the validation split.",)
    return match_classes(source, known, str(root))


def _find_split(root: Path) -> Path:
    return next((root / name for name in VAL_NAMES if (root / name).is_dir()), root)


def _list_class_folders(root: Path, steps: Steps) -> tuple[Path, Path | None, tuple[str, ...]]:
    """The folder of the split, its table of labels where it has one, and its class folders."""
    steps.ask(root)
    try:
        root = _find_split(root)
        if table := find_metadata(root):
            return root, table, ()
        with os.scandir(root) as entries:
            classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise LockstepError(f"{root} cannot be read ({error.strerror}); {FOLDER_WANTED}.") from None
    if not classes:
        raise LockstepError(f"{root} holds no class folders; {FOLDER_WANTED}.")
    return root, None, tuple(classes)
