"""A run's state on disk: safetensors files and a manifest with their hashes, written aside and renamed (step 10).

A folder `step-00001234/` is either whole or not there. Reading verifies every hash and that all numbers are finite; a
damaged checkpoint is passed over with a sentence and the one before it is taken.
"""

import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.files import ASIDE, clear_leftovers, flush_folder, read_small, write_flushed

FORMAT = 1
MANIFEST = "manifest.json"
OLD = f"{ASIDE}old-"  # how the name of one begins that another of its step is about to replace
NAME = re.compile(r"step-\d{8}")
FILE_NAME = re.compile(r"[a-z]+\.safetensors")  # in the checkpoint's own folder
MAX_MANIFEST_BYTES = 1 << 26  # with the names of very many classes
MAX_TENSOR_BYTES = 1 << 36  # no forged file shall take all the memory

Files = Mapping[str, Mapping[str, Tensor]]


class DamagedCheckpoint(Exception):
    """Why a checkpoint cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: tensors by file and name, and the run's counters."""

    path: Path
    files: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """What `save_checkpoint` wrote."""

    path: Path
    num_bytes: int
    seconds: float


def save_checkpoint(
    folder: Path, step: int, files: Files, state: Mapping[str, Any], *, keep: int, drop_later: bool = False
) -> Saved:
    """Write one checkpoint and drop all but the newest `keep`; raises OSError and leaves the older ones alone.

    `drop_later`: those with a greater number too, because the run counts its steps anew and would take them for newer.
    """
    start = time.perf_counter()
    path = folder / f"step-{step:08d}"
    aside = folder / f"{ASIDE}{path.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_aside(folder)
        num_bytes = _write_aside(aside, step, files, state)
        if path.exists():  # set aside and not removed: a kill in between must not leave half of it under its name
            path.rename(folder / f"{OLD}{path.name}")
        aside.rename(path)
        flush_folder(folder)
        clear_leftovers(folder)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        _put_back(folder)
        raise
    # A later step's checkpoint is one that resuming passed over: it must not push out the good ones.
    for old in [other for other in list_checkpoints(folder) if other.name <= path.name][keep:]:
        shutil.rmtree(old, ignore_errors=True)
    for later in [other for other in list_checkpoints(folder) if other.name > path.name and drop_later]:
        shutil.rmtree(later, ignore_errors=True)
    return Saved(path, num_bytes, time.perf_counter() - start)


def clear_aside(folder: Path) -> None:
    """Remove what a killed process left aside, but not a checkpoint that was to be replaced and was not yet."""
    _put_back(folder)
    clear_leftovers(folder)


def _put_back(folder: Path) -> None:
    for old in folder.glob(f"{OLD}*"):
        path = folder / old.name.removeprefix(OLD)
        if not path.exists():
            with contextlib.suppress(OSError):
                old.rename(path)


def _write_aside(aside: Path, step: int, files: Files, state: Mapping[str, Any]) -> int:
    """Write the files and their manifest into a new folder; returns the bytes of the tensors."""
    aside.mkdir()
    hashes: dict[str, str] = {}
    num_bytes = 0
    for name, tensors in files.items():
        data = save(dict(tensors))
        write_flushed(aside / f"{name}.safetensors", data)
        hashes[f"{name}.safetensors"] = hashlib.sha256(data).hexdigest()
        num_bytes += len(data)
    manifest = {"format": FORMAT, "step": step, "state": state, "sha256": hashes}
    manifest["seal"] = _seal(manifest)
    write_flushed(aside / MANIFEST, json.dumps(manifest, indent=2).encode())
    flush_folder(aside)
    return num_bytes


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints under `folder`, newest first; what has another name is none."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), reverse=True)


def load_checkpoint(
    folder: Path,
    warn: Callable[[str], None],
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    only: Sequence[str] = (),
) -> Checkpoint:
    """The newest undamaged checkpoint under `folder`; `warn` hears of each one passed over.

    `check` raises DamagedCheckpoint for one that says what cannot be, though its hashes are right. `only` the first of
    these files that it has is read, if any are named.
    """
    paths = list_checkpoints(folder)
    for path in paths:
        try:
            checkpoint = read_checkpoint(path, only)
            check(checkpoint)
            return checkpoint
        except DamagedCheckpoint as damage:
            warn(f"The checkpoint {path} is damaged ({damage}); taking the one before it.")
    if paths:
        raise LockstepError(f"Every checkpoint under {folder} is damaged; start the run again in another folder.")
    raise LockstepError(f"There is no checkpoint under {folder} to resume from; check the path.")


def read_checkpoint(path: Path, only: Sequence[str] = ()) -> Checkpoint:
    """Read one checkpoint, or `only` the first of these files that it has, and verify the hashes of what is read."""
    try:
        manifest = _read_manifest(path)
        files: dict[str, dict[str, Tensor]] = {}
        wanted = next((name for name in only if f"{name}.safetensors" in manifest["sha256"]), "")
        for name, expected in manifest["sha256"].items():
            if not FILE_NAME.fullmatch(name):
                raise DamagedCheckpoint(f"its manifest names a file {name[:40]!r}")
            if only and name != f"{wanted}.safetensors":
                continue
            data = read_small(path / name, MAX_TENSOR_BYTES)
            if hashlib.sha256(data).hexdigest() != expected:
                raise DamagedCheckpoint(f"{name} does not match its hash")
            files[name.removesuffix(".safetensors")] = _refuse_infinite(name, load(data))
        return Checkpoint(path, files, manifest["state"])
    except OSError as error:
        raise DamagedCheckpoint(f"{error.filename or path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError, SafetensorError) as error:
        raise DamagedCheckpoint("its manifest cannot be read") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint, of this format, sealed, and of the step that the folder is named for."""
    manifest: dict[str, Any] = json.loads(read_small(path / MANIFEST, MAX_MANIFEST_BYTES))
    if manifest["format"] != FORMAT:
        raise DamagedCheckpoint(f"its format is {str(manifest['format'])[:40]}, this version reads {FORMAT}")
    if manifest["seal"] != _seal(manifest):
        raise DamagedCheckpoint("its manifest does not match its seal")
    if path.name != f"step-{manifest['step']:08d}":
        raise DamagedCheckpoint("its manifest is that of another step")
    return manifest


def _refuse_infinite(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an earlier version wrote after training had run away is whole, and still of no use."""
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DamagedCheckpoint(f"{name} holds numbers that are not finite, in {key}")
    return tensors


def _seal(manifest: Mapping[str, Any]) -> str:
    """A hash over the rest of the manifest, so that a flipped bit in the counters is noticed too."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
