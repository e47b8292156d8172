"""Image sets in Parquet, as Hugging Face has them: read in order to be packed, for which `pyarrow` must be installed.

A file's rows come in groups that are compressed as a whole, so that no sample can be read by itself: a set is packed
into shards, once (`pack.py`). What the files hold are bytes and numbers; nothing in them is unpickled.
"""

import json
from bisect import bisect_right
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.order import choose_held_out
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.sources import describe_share, hash_name
from lockstep.data.split_files import find_large, list_files, split_files
from lockstep.data.threads import Steps, look
from lockstep.errors import LockstepError

LABELS = ("label", "labels", "fine_label", "class", "category")  # columns that hold one, the first that is there
MAX_GROUP_BYTES = 1 << 32  # of a group of rows, which is read as a whole
MAX_CLASSES = 1 << 24
LONGEST = 200  # characters of a label


class ParquetImages:
    """Rows of Parquet files, read group by group: quick in order only."""

    def __init__(
        self,
        files: list[Path],
        groups: list[tuple[int, int]],  # of each: its file and its number there
        firsts: list[int],  # row with which each begins, and the end
        column: str,
        classes: tuple[str, ...],
        labels: NDArray[np.int64],
        sizes: NDArray[np.int64],  # about how many bytes each image has
        rows: NDArray[np.int64],
        notes: tuple[str, ...] = (),
    ) -> None:
        self._files, self._groups, self._firsts, self._column = files, groups, firsts, column
        self.classes, self.labels, self.sizes, self._rows, self.notes = classes, labels, sizes, rows, notes
        self._held: tuple[int, list[Any]] = (-1, [])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_held": (-1, [])}

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def _place(self, index: int) -> tuple[int, int]:
        """The group of a row, and its place there."""
        row = int(self._rows[index])
        group = bisect_right(self._firsts, row) - 1
        return group, row - self._firsts[group]

    def read(self, index: int) -> bytes:
        """The encoded image; OSError when there is none."""
        group, place = self._place(index)
        if self._held[0] != group:
            self._held = group, self._read_group(group)
        data = self._held[1][place]
        data = data.get("bytes") if isinstance(data, dict) else data
        if not isinstance(data, bytes):
            raise OSError(5, "its row holds no bytes of an image")
        return data

    def _read_group(self, group: int) -> list[Any]:
        parquet = import_parquet(self._files[0])
        file, number = self._groups[group]
        try:
            with parquet.ParquetFile(self._files[file]) as opened:
                values: list[Any] = opened.read_row_group(number, columns=[self._column]).column(0).to_pylist()
        except OSError:
            raise
        except Exception as error:  # whatever pyarrow says of a damaged file
            raise OSError(5, f"its rows cannot be read ({str(error)[:80]})") from error
        return values

    def name(self, index: int) -> str:
        """The file and the row, for messages."""
        group, place = self._place(index)
        file = self._groups[group][0]
        start = next(first for first, (other, _) in zip(self._firsts, self._groups, strict=False) if other == file)
        return f"{self._files[file]}/row-{self._firsts[group] - start + place}"

    def size(self, index: int) -> int:
        """About how many bytes an image has: its share of its group."""
        return int(self.sizes[index])

    def hash_names(self) -> NDArray[np.uint64]:
        """A hash of each row's place, which is all that a row is called."""
        names = ("/".join(self.name(index).rsplit("/", 2)[-2:]) for index in range(self.num_samples))
        return np.fromiter((hash_name(name.encode(errors="surrogateescape")) for name in names), np.uint64)

    def describe(self) -> bytes:
        """The files' names and rows, for telling one set from another."""
        return repr([(path.name, path.stat().st_size) for path in self._files]).encode() + self._rows.tobytes()

    def select(self, numbers: NDArray[np.int64]) -> "ParquetImages":
        """These rows, in this order."""
        return ParquetImages(
            self._files, self._groups, self._firsts, self._column, self.classes, self.labels[numbers],
            self.sizes[numbers], self._rows[numbers], self.notes,
        )  # fmt: skip


def holds_parquet(root: Path, limit_s: float = READ_TIMEOUT_S) -> bool:
    """Whether a folder holds files of this kind and no folders of images."""
    return bool(look(partial(find_large, root, ".parquet"), limit_s))


def import_parquet(path: Path) -> Any:
    """pyarrow's reader, where it is installed."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise LockstepError(
            f"{path} is a Parquet file, which takes pyarrow to read; install it with `pip install pyarrow`."
        ) from None
    return parquet


def open_parquet(
    root: Path, limit_s: float = READ_TIMEOUT_S, val_share: float = 0.0
) -> tuple[ParquetImages, ParquetImages]:
    """Both splits; labels and sizes are read, the images are not."""
    return look(lambda steps: _open_parquet(root, val_share, steps), limit_s)


def _open_parquet(root: Path, val_share: float, steps: Steps) -> tuple[ParquetImages, ParquetImages]:
    train_files, val_files, notes = split_files(root, list_files(root, ".parquet", steps), val_share)
    opened = [_open_files(files, steps) for files in (train_files, val_files) if files]
    names = next((names for _, names, _ in opened if names), None)
    words = sorted({label for *_, labels in opened for label in labels}, key=lambda word: (len(word), word))
    is_numbered = all(word.isascii() and word.isdigit() for word in words)
    if not is_numbered:
        words = sorted(words)
        names, numbers = tuple(words), {word: number for number, word in enumerate(words)}
    else:
        count = max(map(int, words)) + 1
        if count > MAX_CLASSES:
            raise LockstepError(f"{root} has the label {count - 1:,}, beyond the {MAX_CLASSES:,} classes allowed.")
        names = names if names and len(names) >= count else tuple(map(str, range(count)))
        numbers = {word: int(word) for word in words}
    splits = []
    for images, _, labels in opened:
        images.classes, images.labels = names, np.array([numbers[label] for label in labels], np.int64)
        splits.append(images)
    splits[0].notes = notes
    if val_share:
        is_held_out = choose_held_out(splits[0].hash_names(), val_share)
        train, val = (splits[0].select(np.flatnonzero(mask)) for mask in (~is_held_out, is_held_out))
        train.notes += (describe_share(val_share, train, val),)
        val.notes = ()  # the first says them
        return train, val
    return splits[0], splits[1]


def _open_files(files: list[Path], steps: Steps) -> tuple[ParquetImages, tuple[str, ...] | None, list[str]]:
    """The rows of one split, the class names if the files have any, and each row's label as text."""
    parquet = import_parquet(files[0])
    groups: list[tuple[int, int]] = []
    counts: list[int] = []
    sizes: list[NDArray[np.int64]] = []
    labels: list[str] = []
    names: tuple[str, ...] | None = None
    column = ""
    for number, path in enumerate(files):
        steps.ask(path)
        try:
            with parquet.ParquetFile(path) as opened:
                column, label = _choose_columns(opened.schema_arrow, path)
                names = names or _read_names(opened.schema_arrow.metadata, label)
                for group in range(opened.metadata.num_row_groups):
                    steps.count += 1
                    about = opened.metadata.row_group(group)
                    if about.total_byte_size > MAX_GROUP_BYTES:
                        raise LockstepError(
                            f"{path} has a group of {about.total_byte_size:,} bytes, more than is read."
                        )
                    groups.append((number, group))
                    counts.append(about.num_rows)
                    sizes.append(np.full(about.num_rows, about.total_byte_size // max(1, about.num_rows), np.int64))
                    values = opened.read_row_group(group, columns=[label]).column(0).to_pylist()
                    labels += [_name_label(value, path) for value in values]
        except LockstepError:
            raise
        except Exception as error:  # whatever pyarrow says of a damaged file
            raise LockstepError(f"{path} cannot be read ({str(error)[:120]}); copy it again.") from error
    total = sum(counts)
    if not total or total != len(labels):
        raise LockstepError(f"{files[0]} and those beside it hold no samples; copy them again.")
    firsts = list(accumulate(counts, initial=0))
    images = ParquetImages(
        files, groups, firsts, column, (), np.zeros(total, np.int64), np.concatenate(sizes), np.arange(total)
    )
    return images, names, labels


def _choose_columns(schema: Any, path: Path) -> tuple[str, str]:
    """The columns of the images and of their labels."""
    kinds = {item.name: str(item.type) for item in schema}
    image = next((name for name, kind in kinds.items() if "binary" in kind), None)
    label = next((name for name in LABELS if name in kinds), None)
    if image is None or label is None:
        raise LockstepError(
            f"{path} has the columns {', '.join(list(kinds)[:20])}, but none with images' bytes, or none named "
            f"{' or '.join(LABELS)}; give a set of images and labels."
        )
    return image, label


def _name_label(value: Any, path: Path) -> str:
    if value is None or value in (-1, ""):
        raise LockstepError(f"{path} has a row without a label; leave the file out if it is for tests without labels.")
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > LONGEST:
        kind = type(value).__name__
        raise LockstepError(f"{path} has a {kind} as a label where a whole number or a word is wanted; convert it.")
    return str(value)


def _read_names(metadata: dict[bytes, bytes] | None, label: str) -> tuple[str, ...] | None:
    """The class names that Hugging Face leaves in a file's schema."""
    try:
        names = json.loads((metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    is_list = isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)
    return tuple(names) if is_list and len(set(names)) == len(names) else None
