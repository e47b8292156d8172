"""Scanned folders between ranks: rebuilt exactly, and refused where names and numbers do not add up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data.sources import ImageFolder, scan_folder
from lockstep.engine.scanned import LENGTH, _describe, rebuild_folder
from lockstep.errors import LockstepError


@pytest.fixture
def folder(tmp_path: Path) -> ImageFolder:
    for name in ("a/1.png", "a/2\n.png", "b/deep/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "a" / "odd-\udcff.png").write_bytes(b"odd")  # a name that is no text
    return scan_folder(tmp_path, ("a", "b"))


def pack(folder: ImageFolder) -> tuple[dict[str, Any], bytes, bytes]:
    root = Path(folder.name(0)).parents[1]
    return _describe(folder, root), folder.paths, np.diff(folder.ends).astype(LENGTH).tobytes()


def test_a_folder_is_rebuilt_as_it_was(folder: ImageFolder, tmp_path: Path) -> None:
    rebuilt = rebuild_folder(tmp_path, *pack(folder))
    assert rebuilt.classes == folder.classes
    assert rebuilt.labels.tolist() == folder.labels.tolist() == [0, 0, 0, 1]
    for sample in range(4):
        assert rebuilt.name(sample) == folder.name(sample)
        assert rebuilt.read(sample) == folder.read(sample)


@pytest.mark.parametrize("fault", ["names", "lengths", "half a length", "counts", "classes", "below zero"])
def test_what_does_not_add_up_is_a_sentence(folder: ImageFolder, tmp_path: Path, fault: str) -> None:
    table, paths, lengths = pack(folder)
    if fault == "names":
        paths += b"x"
    elif fault in ("lengths", "half a length"):
        lengths = lengths[: -2 if fault == "lengths" else -1]
    elif fault == "classes":
        table["classes"].append("c")
    else:
        table["counts"] = [3, 2] if fault == "counts" else [5, -1]
    with pytest.raises(LockstepError, match="do not add up"):
        rebuild_folder(tmp_path, table, paths, lengths)
