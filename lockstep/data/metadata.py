"""Labels from a table beside the images, as image folders of Hugging Face have them: metadata.jsonl or metadata.csv.

Each row names a file, relative to the table's folder, and its label. The table is somebody else's: a row that leads out
of the folder is refused. Torch-free.
"""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

from lockstep.data.plain_files import read_plain
from lockstep.errors import LockstepError

METADATA = ("metadata.jsonl", "metadata.csv")
LABELS = ("label", "class", "category", "label_name")  # columns that hold one, the first that is there
MAX_TABLE_BYTES = 1 << 30
MAX_WORD = 200  # characters of a label


def find_metadata(root: Path) -> Path | None:
    """The table of a folder, if it has one."""
    return next((root / name for name in METADATA if (root / name).is_file()), None)


def read_metadata(path: Path) -> tuple[list[bytes], list[str], tuple[str, ...]]:
    """File names, the label of each, and what should be said of the table."""
    try:
        text = read_plain(path, MAX_TABLE_BYTES).decode("utf-8-sig")
        rows = _parse_csv(text) if path.suffix == ".csv" else _parse_lines(text)
    except OSError as error:
        raise LockstepError(f"{path} cannot be read ({error.strerror}); check its permissions and disk.") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise LockstepError(f"{path} cannot be read ({str(error)[:MAX_WORD]}); correct it.") from error
    if not rows:
        raise LockstepError(f"{path} names no file; correct it, or sort the images into class folders.")
    column = next((name for name in LABELS if name in rows[0]), None)
    if column is None:
        raise LockstepError(
            f"{path} has no column named {' or '.join(LABELS)}; add one, or remove it and sort the images into class "
            "folders."
        )
    names, labels = [], []
    for number, row in enumerate(rows, start=1):
        name, label = row.get("file_name"), row.get(column)
        if not isinstance(name, str) or not _is_inside(name):
            raise LockstepError(f"Row {number} of {path} names no file in its folder (file_name); correct it.")
        if isinstance(label, bool) or not isinstance(label, int | str) or not 0 < len(str(label)) <= MAX_WORD:
            raise LockstepError(f"Row {number} of {path} has no {column}, a word or a whole number; correct it.")
        names.append(os.fsencode(name))
        labels.append(str(label))
    if len(set(names)) < len(names):
        raise LockstepError(f"{path} names a file twice; correct it.")
    return names, _pad_numbers(labels), (f"Labels come from the column {column} of {path}.",)


def _parse_csv(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def _parse_lines(text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error.msg}") from None
            if not isinstance(rows[-1], dict):
                raise ValueError(f"line {number} is no table")
    return rows


def _is_inside(name: str) -> bool:
    """Whether a relative path stays below the folder it starts from."""
    parts = name.split("/")
    return bool(name) and "\0" not in name and not name.startswith("/") and not {"", ".", ".."} & set(parts)


def _pad_numbers(labels: list[str]) -> list[str]:
    """Labels that are all numbers, as words that sort as the numbers do."""
    if not all(label.isascii() and label.isdigit() for label in labels):
        return labels
    width = max(map(len, labels))
    return [label.zfill(width) for label in labels]
