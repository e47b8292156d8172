"""The generated data set, for runs without a download: pictures of `render.py`, built once into a cached image folder.

The folder has the layout that `sources.py` reads, so nothing after it knows the difference.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg

from lockstep.data.render import CLASSES, render
from lockstep.errors import LockstepError

QUALITY = 90
SPLITS = ("train", "val")
# Images rendered together: enough to hide NumPy's cost per call, few enough for the processor's cache.
RENDER_BATCH = 32
OLD_S = 86_400.0  # nobody writes for so long


def default_cache() -> Path:
    """Where generated data sets are kept: $LOCKSTEP_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("LOCKSTEP_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def build_generated(
    cache: Path, train_images: int, val_images: int, progress: Callable[[int, int], None] | None = None
) -> Path:
    """The image folder of the generated set, built on first use.

    Image k of a split is a pure function of (split, k), of class k mod 10: a larger set contains a smaller.
    """
    if min(train_images, val_images) < len(CLASSES):
        raise LockstepError(
            f"data.train_images and data.val_images must be at least {len(CLASSES)}, an image for each class."
        )
    counts = (train_images, val_images)
    return build_cached(
        cache, f"generated-v1-{train_images}x{val_images}", lambda root: _write_images(root, counts, progress)
    )


def build_cached(cache: Path, name: str, write: Callable[[Path], None]) -> Path:
    """The folder of this name in the cache, written on first use.

    It is built aside and renamed, so what has the final name is complete, and the first of several processes to finish
    wins.
    """
    final = cache / name
    if final.is_dir():
        return final
    aside: Path | None = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache, name)
        aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        aside.chmod(0o755)
        write(aside)
        aside.rename(final)
    except OSError as error:
        if not final.is_dir():
            raise LockstepError(
                f"The generated images cannot be written to {cache} ({error.strerror}); "
                "free some space or set LOCKSTEP_CACHE to another folder."
            ) from error
    finally:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
    return final


def _sweep(cache: Path, name: str) -> None:
    """Remove what processes that were killed amid their writing have left long ago."""
    for aside in cache.glob(f".{name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - aside.lstat().st_mtime > OLD_S:
                shutil.rmtree(aside, ignore_errors=True)


def _write_images(root: Path, counts: tuple[int, ...], progress: Callable[[int, int], None] | None) -> None:
    """Render and write every image of both splits, class by class."""
    done = 0
    for split, count in enumerate(counts):
        for label, shape in enumerate(CLASSES):
            folder = root / SPLITS[split] / shape
            folder.mkdir(parents=True)
            numbers = np.arange(label, count, len(CLASSES))
            for start in range(0, len(numbers), RENDER_BATCH):
                chunk = numbers[start : start + RENDER_BATCH]
                for number, pixels in zip(chunk, render(split, shape, chunk), strict=True):
                    jpeg = simplejpeg.encode_jpeg(pixels, quality=QUALITY, colorsubsampling="420")
                    (folder / f"{number:07d}.jpeg").write_bytes(jpeg)
                done += len(chunk)
                if progress:
                    progress(done, sum(counts))
