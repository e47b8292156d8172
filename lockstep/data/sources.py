"""Where samples lie: sample number → encoded bytes and label (step 2 on the walk).

A source is anything with the members of `Source`; the order before it gives the numbers, the decoder after it takes
the bytes. Here are image folders, and a generated data set is one too (`generated.py`); packed ones:
`shards.py`. Nothing in a folder is dropped in silence: what is left out, what serves in the place of something else and
what was not followed are its notes, which a run says first.
"""

import errno
import hashlib
import os
import zlib
from collections import Counter
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.data.metadata import METADATA, find_metadata, read_metadata
from lockstep.data.order import choose_held_out
from lockstep.data.plain_files import READ_TIMEOUT_S, measure_plain, read_plain
from lockstep.data.threads import GivenUp, Steps, look, read_one
from lockstep.errors import LockstepError

# What `decode.py` reads; everything else is left out by name.
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
TRAIN = "train"
VAL_NAMES = ("val", "validation", "valid", "test")  # the first that is there
NAMED = 5  # things that a sentence names
NUM_PROBES = 32  # samples whose bytes stand for all in a fingerprint
IMAGES = "images"  # where a fingerprint has them


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


def choose_probes(num_samples: int) -> list[int]:
    """The samples that stand for all: the same of a folder and of its pack."""
    return sorted({int(number) for number in np.linspace(0, num_samples - 1, NUM_PROBES)})


def read_probes(source: Source, limit_s: float) -> dict[int, bytes]:
    """The bytes of these samples, but for those that cannot be read or do not come while there is time.

    They are left out rather than an error: a run bears a few bad samples, and says itself when a disk hangs.
    """
    found: dict[int, bytes] = {}
    is_wanted = True

    def read() -> None:
        for number in choose_probes(source.num_samples):
            with suppress(OSError):
                data = source.read(number)
                if not is_wanted:  # whoever waited has gone on
                    raise GivenUp
                found[number] = data

    with suppress(TimeoutError):
        read_one(read, limit_s, "the samples that stand for all")
    is_wanted = False
    return dict(found)


def describe_probes(lengths: dict[int, int], checksums: dict[int, int]) -> str:
    """Numbers of samples with their length and CRC-32, which a pack's index knows without reading one."""
    return " ".join(f"{number}={lengths[number]}-{checksums[number]:08x}" for number in lengths)


def describe_bytes(found: dict[int, bytes]) -> str:
    """The same of samples that were read."""
    lengths = {number: len(data) for number, data in found.items()}
    return describe_probes(lengths, {number: zlib.crc32(data) for number, data in found.items()})


def is_same(kind: str, one: str, other: str) -> bool:
    """Whether two fingerprints agree in a kind; of samples those count that could be read both times."""
    if kind != IMAGES:
        return one == other
    ones, others = (dict(part.partition("=")[::2] for part in text.split()) for text in (one, other))
    return all(ones[number] == others[number] for number in ones.keys() & others.keys())


def hash_name(name: bytes) -> int:
    """What a sample is called, as 64 bits: the same wherever its folder lies and whatever lies beside it."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


class ImageFolder:
    """One split of an image folder: `<root>/<class>/**/*.jpeg`, in sorted order, so the same on every rank."""

    def __init__(
        self,
        root: bytes,
        classes: tuple[str, ...],
        paths: bytes,
        ends: NDArray[np.int64],
        labels: NDArray[np.int64],
        notes: tuple[str, ...] = (),
    ) -> None:
        # One joined string and an array of ends: millions of paths without millions of objects.
        self._root, self.paths, self.ends = root, paths, ends
        self.classes = classes
        self.labels = labels
        self.notes = notes  # what its reader should know of it, in sentences
        self.read_timeout_s = READ_TIMEOUT_S  # for the samples of its fingerprint

    def split_below(self, root: Path) -> str:
        """The name of the folder in `root` that the paths start from; nothing where they start from there."""
        return "" if self._root == os.fsencode(root) + b"/" else os.path.basename(os.fsdecode(self._root).rstrip("/"))

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
        """What tells this data from other: names, labels and the bytes of a few: of all it would take an epoch."""
        names = hash_arrays(self.paths, self.ends)
        images = describe_bytes(read_probes(self, self.read_timeout_s))
        return {"labels": hash_labels(self.classes, self.labels), "names": names, IMAGES: images}

    def hash_names(self) -> NDArray[np.uint64]:
        """A hash of each file's name, from the split's folder on."""
        ends = self.ends.tolist()
        hashes = (hash_name(self.paths[start:end]) for start, end in pairwise(ends))
        return np.fromiter(hashes, np.uint64, self.num_samples)

    def describe(self) -> bytes:
        """All names, for telling one folder from another."""
        return self.paths + self.ends.tobytes()

    def select(self, numbers: NDArray[np.int64]) -> "ImageFolder":
        """These samples, in this order, numbered from 0."""
        starts, stops = self.ends[numbers].tolist(), self.ends[numbers + 1].tolist()
        paths = [self.paths[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return build_folder(self._root, self.classes, paths, self.labels[numbers], self.notes)


def build_folder(
    root: bytes,
    classes: tuple[str, ...],
    paths: list[bytes],
    labels: NDArray[np.int64],
    notes: tuple[str, ...] = (),
) -> ImageFolder:
    """A folder of these paths, relative to the root."""
    ends = np.fromiter(accumulate(map(len, paths), initial=0), np.int64)
    return ImageFolder(root, classes, b"".join(paths), ends, labels, notes)


class Walk:
    """What was found on the way through a split."""

    def __init__(self, root: Path, steps: Steps) -> None:
        self.root, self.steps = root, steps
        self.found: list[bytes] = []
        self.left_out: Counter[str] = Counter()  # by suffix
        self.example = ""
        self.loops: list[str] = []

    def enter(self, folder: str, above: tuple[str, ...]) -> None:
        """Take all images of a folder, relative to the root, and below it; `above` are the real paths on the way."""
        self.steps.ask(self.root / folder)
        with os.scandir(self.root / folder) as entries:
            for entry in entries:
                self.steps.count += 1  # a folder may hold a million files, on a disk far away
                name = entry.name
                if name.startswith("."):
                    continue
                path = f"{folder}/{name}"
                if name.lower().endswith(IMAGE_SUFFIXES):
                    self.found.append(os.fsencode(path))
                elif not _is_folder(entry):
                    self.left_out[os.path.splitext(name)[1].lower()] += 1
                    self.example = min(self.example or path, path)
                elif not entry.is_symlink():
                    self.enter(path, (*above, f"{above[-1]}/{name}"))
                elif _leads_back(real := os.path.realpath(entry.path), above):
                    self.loops.append(path)
                else:
                    self.enter(path, (*above, real))

    def notes(self) -> tuple[str, ...]:
        """What was not taken, in sentences."""
        said = []
        if self.left_out:
            kinds = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in self.left_out.most_common(NAMED)]
            more = f" and {len(self.left_out) - NAMED} other kinds" if len(self.left_out) > NAMED else ""
            said.append(
                f"{self.left_out.total():,} files in {self.root} are left out, as their names are not those of images "
                f"that can be read: {', '.join(kinds)}{more}, such as {self.example}; save images among them as JPEG "
                "or PNG."
            )
        if self.loops:
            names = ", ".join(sorted(self.loops)[:NAMED]) + (", …" if len(self.loops) > NAMED else "")
            links, are = ("link", "leads back to a folder above and is")
            if len(self.loops) > 1:
                links, are = ("links", "lead back to a folder above and are")
            said.append(f"{len(self.loops)} {links} in {self.root} {are} not followed: {names}.")
        return tuple(said)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return False
        raise


def _leads_back(real: str, above: tuple[str, ...]) -> bool:
    """Whether a folder holds one of those on the way to it, or is one of them."""
    return any(f"{folder}/".startswith(f"{real.rstrip('/')}/") for folder in above)


def scan_folder(root: Path, classes: tuple[str, ...], limit_s: float = READ_TIMEOUT_S) -> ImageFolder:
    """Find every image of one split."""
    return look(lambda steps: _scan_folder(root, classes, steps), limit_s)


def _scan_folder(root: Path, classes: tuple[str, ...], steps: Steps) -> ImageFolder:
    walk = Walk(root, steps)
    paths: list[bytes] = []
    counts: list[int] = []
    above = os.path.realpath(root)
    for name in classes:
        walk.found = []
        walk.enter(name, (above, os.path.realpath(root / name)))
        if not walk.found:
            others = f", only {walk.left_out.total():,} other files" if walk.left_out else ""
            raise LockstepError(
                f"The class folder {root / name} holds no images{others}; add some or remove the folder."
            )
        paths += sorted(walk.found)
        counts.append(len(walk.found))
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    notes = (*walk.notes(), *_describe_loose(root, steps))
    return build_folder(os.fsencode(root) + b"/", classes, paths, labels, notes)


def _describe_loose(root: Path, steps: Steps) -> tuple[str, ...]:
    """The sentence on images that lie beside the class folders; none where there are none."""
    steps.ask(root)
    with os.scandir(root) as entries:
        names = (entry.name for entry in entries if not _is_folder(entry))
        loose = sorted(name for name in names if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."))
    if not loose:
        return ()
    images, are = ("image", "is") if len(loose) == 1 else ("images", "are")
    return (
        f"{len(loose):,} {images} in {root} {are} left out, being in no class folder, such as {loose[0]}; move what is "
        "wanted into one.",
    )


def _list_classes(root: Path, steps: Steps) -> tuple[str, ...]:
    """The class folders of one split, sorted."""
    steps.ask(root)
    if not root.is_dir():
        raise LockstepError(f"There is no folder {root}; data.path must name a folder that holds train/ and val/.")
    classes = _list_folders(root, steps)
    if not classes:
        raise LockstepError(
            f"{root} holds no class folders; expected one folder of images for each class, or {METADATA[0]} with "
            "file_name and label."
        )
    return tuple(classes)


def _refuse_difference(extra: set[str], there: Path, missing: Path) -> None:
    """Raise when a split has class folders that the other lacks."""
    if extra:
        names = ", ".join(sorted(extra)[:NAMED]) + (f" and {len(extra) - NAMED} more" if len(extra) > NAMED else "")
        raise LockstepError(
            f"{len(extra)} class folder(s) of {there} are missing from {missing}: {names}; "
            f"{there.name}/ and {missing.name}/ must hold the same classes."
        )


def check_root(root: Path, limit_s: float = READ_TIMEOUT_S) -> None:
    """Refuse a root that is no folder here."""
    look(lambda steps: _check_root(root, steps), limit_s)


def _check_root(root: Path, steps: Steps) -> None:
    steps.ask(root)
    if not root.is_dir():
        raise LockstepError(f"The data path {root} is not a folder; set data.path to one that holds train/ and val/.")


def open_folder(
    root: str | Path, limit_s: float = READ_TIMEOUT_S, val_share: float = 0.0
) -> tuple[ImageFolder, ImageFolder]:
    """The training and validation splits under a root; labels number the sorted class names, the same in both.

    With a `val_share` that part of train/ is the validation split, chosen by the files' names.
    """
    root = Path(root).expanduser()
    splits = look(lambda steps: _open_folder(root, val_share, steps), limit_s)
    for split in splits:
        split.read_timeout_s = limit_s
    return splits


def _open_folder(root: Path, val_share: float, steps: Steps) -> tuple[ImageFolder, ImageFolder]:
    try:
        _check_root(root, steps)
        vals = [name for name in VAL_NAMES if (root / name).is_dir()]
        if val_share:
            # A folder of nothing but classes will do where a part of it becomes the validation split.
            is_bare = not vals and not (root / TRAIN).is_dir()
            if is_bare and (hint := _find_train(root, steps)):
                raise LockstepError(hint)  # its splits would be taken for classes
            return split_folder(_scan_split(root if is_bare else root / TRAIN, steps), val_share, vals)
        if not vals and (root / TRAIN).is_dir():
            raise LockstepError(
                f"There is no folder {root / VAL_NAMES[0]}; data.path must name a folder that holds train/ and val/, "
                "or set data.val_share = 0.1 to keep a tenth of train/ for validation."
            )
        if not (root / TRAIN).is_dir() and (hint := _find_train(root, steps) or _find_classes(root, vals, steps)):
            raise LockstepError(hint)
        train = _scan_split(root / TRAIN, steps)
        val_root = root / (vals or VAL_NAMES)[0]
        val = _scan_split(val_root, steps, train)
        if val_root.name != VAL_NAMES[0]:
            val.notes += (f"There is no {VAL_NAMES[0]}/ in {root}; {val_root.name}/ serves as the validation split.",)
        return train, val
    except OSError as error:
        raise LockstepError(
            f"The data path {error.filename or root} cannot be read ({error.strerror}); check its permissions and disk."
        ) from error


def _list_folders(root: Path, steps: Steps) -> list[str]:
    steps.ask(root)
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))


def _find_train(root: Path, steps: Steps) -> str:
    """The sentence on a training split that is called otherwise or lies one folder down; empty where none is seen."""
    folders = _list_folders(root, steps)
    if spelt := [name for name in folders if name.lower() in (TRAIN, "training")]:
        return (
            f"There is no folder {root / TRAIN}, but {spelt[0]}/ is there; call it {TRAIN}/, and the validation split "
            f"{VAL_NAMES[0]}/."
        )
    if below := [name for name in folders if (root / name / TRAIN).is_dir()]:
        return f"There is no folder {root / TRAIN}, but {root / below[0] / TRAIN}; set data.path to {root / below[0]}."
    return ""


def _find_classes(root: Path, vals: list[str], steps: Steps) -> str:
    """The sentence on a folder that seems to hold nothing but classes; empty for any other."""
    folders = [] if vals else _list_folders(root, steps)
    if not any(_holds_image(root / name, steps) for name in folders[:NAMED]):
        return ""
    names = ", ".join(folders[:NAMED]) + (", …" if len(folders) > NAMED else "")
    return (
        f"{root} has no {TRAIN}/ and no {VAL_NAMES[0]}/ but {len(folders):,} folders that look like classes ({names}); "
        "set data.val_share = 0.1 to keep a tenth of their images for validation, or --val-share 0.1 for "
        "`lockstep data pack`."
    )


def _holds_image(folder: Path, steps: Steps) -> bool:
    steps.ask(folder)
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in entries)


def _scan_split(root: Path, steps: Steps, other: ImageFolder | None = None) -> ImageFolder:
    """One split: by class folders, or by a table of file names and labels; of the same classes as the other one."""
    table = find_metadata(root)
    if table:
        paths, names, notes = read_table(table, steps)
        classes = tuple(sorted(set(names))) if other is None else other.classes
        numbers = {name: number for number, name in enumerate(classes)}
        if unknown := sorted(set(names) - set(numbers)):
            raise LockstepError(f"{table} has labels that train/ has not: {', '.join(unknown[:NAMED])}; correct it.")
        rows = sorted((numbers[name], path) for name, path in zip(names, paths, strict=True))
        labels = np.array([label for label, _ in rows], np.int64)
        return build_folder(os.fsencode(root) + b"/", classes, [path for _, path in rows], labels, notes)
    classes = _list_classes(root, steps)
    if other is not None:
        train = root.parent / TRAIN
        _refuse_difference(set(other.classes) - set(classes), train, root)
        _refuse_difference(set(classes) - set(other.classes), root, train)
    return _scan_folder(root, classes, steps)


def read_table(table: Path, steps: Steps) -> tuple[list[bytes], list[str], tuple[str, ...]]:
    """File names, the label of each, and what should be said: of the table, and of images beside it that it lacks."""
    steps.ask(table)
    names, labels, notes = read_metadata(table)
    root = table.parent
    walk = Walk(root, steps)
    walk.enter(".", (os.path.realpath(root),))
    unnamed = sorted({path.removeprefix(b"./") for path in walk.found} - set(names))
    if unnamed:
        images, are = ("image", "is") if len(unnamed) == 1 else ("images", "are")
        notes += (
            f"{len(unnamed):,} {images} in {root} {are} left out, having no row in {table.name}, such as "
            f"{os.fsdecode(unnamed[0])}; add what is wanted.",
        )
    return names, labels, notes


def split_folder(folder: ImageFolder, val_share: float, unused: list[str]) -> tuple[ImageFolder, ImageFolder]:
    """Two parts of one folder, the second with about this share of the samples."""
    is_held_out = choose_held_out(folder.hash_names(), val_share)
    train, val = folder.select(np.flatnonzero(~is_held_out)), folder.select(np.flatnonzero(is_held_out))
    train.notes += (describe_share(val_share, train, val, f"{unused[0]}/" if unused else ""),)
    val.notes = ()
    return train, val


def describe_share(val_share: float, train: Source, val: Source, unused: str = "") -> str:
    """The sentence on a part that was split off, and on the validation split that it stands in for."""
    ignored = f"; {unused} is not used" if unused else ""
    return (
        f"data.val_share = {val_share:g} keeps {val.num_samples:,} of {train.num_samples + val.num_samples:,} samples "
        f"for validation, by a hash of their names{ignored}."
    )
