"""CIFAR-10 as an image folder of PNGs, for the sweeps beside this file: python experiments/unpack_cifar10.py SRC DST

SRC is a folder or a tar file that holds either of two forms, and neither is unpickled:

- the official binary version (cifar-10-binary.tar.gz): data_batch_1.bin to data_batch_5.bin and test_batch.bin, records
  of one label byte and 3072 bytes of red, green and blue planes;
- mosaics: train_00.jpg … and test_00.jpg … of 50 × 100 images each, in order, and train_y.npy and test_y.npy.

DST gets train/<class>/<number>.png and val/<class>/<number>.png.
"""

import argparse
import io
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, PIXELS = 32, 3 * 32 * 32
ROWS, COLUMNS = 50, 100  # of a mosaic
WANTED = re.compile(r"(data_batch_\d|test_batch)\.bin|(train|test)_(\d{1,4}\.jpe?g|\d{1,4}\.png|y\.npy)")
MAX_BYTES = 64 << 20  # of one file; the largest there is has 31 MB
Split = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images N × 32 × 32 × 3, labels


class WrongData(Exception):
    """What is given is not CIFAR-10; the message says why."""


def read_files(source: Path) -> dict[str, bytes]:
    """The files of CIFAR-10 in a folder or a tar file, wherever they lie in it, by their names."""
    found: dict[str, bytes] = {}

    def add(name: str, size: int, data: bytes) -> None:
        if size > MAX_BYTES:
            raise WrongData(f"{name} has {size:,} bytes, more than any file of CIFAR-10.")
        if name in found:
            raise WrongData(f"There are two files {name}; give one of the two forms alone.")
        found[name] = data

    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if WANTED.fullmatch(path.name) and path.is_file():
                size = path.stat().st_size
                add(path.name, size, path.read_bytes() if size <= MAX_BYTES else b"")
        return found
    with tarfile.open(source) as archive:
        for member in archive:
            name = Path(member.name).name
            if WANTED.fullmatch(name) and member.isfile():
                opened = archive.extractfile(member)
                add(name, member.size, opened.read() if opened and member.size <= MAX_BYTES else b"")
    return found


def read_split(files: Mapping[str, bytes], is_train: bool) -> Split:
    """All images of a split and their labels, from whichever form there is."""
    binary = sorted(name for name in files if name.startswith("data_batch" if is_train else "test_batch"))
    if binary:
        parts = [read_binary(name, files[name]) for name in binary]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    start = "train_" if is_train else "test_"
    mosaics = sorted(name for name in files if name.startswith(start) and not name.endswith(".npy"))
    if not mosaics or f"{start}y.npy" not in files:
        raise WrongData(f"There is neither the binary version nor {start}00.jpg with {start}y.npy.")
    try:
        labels = np.load(io.BytesIO(files[f"{start}y.npy"]), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise WrongData(f"{start}y.npy is no array: {error}.") from None
    images = np.concatenate([read_mosaic(name, files[name]) for name in mosaics])
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise WrongData(f"{start}y.npy has {labels.dtype} {labels.shape}, and there are {len(images):,} images.")
    return images, check_labels(f"{start}y.npy", labels)


def read_binary(name: str, data: bytes) -> Split:
    """The records of one file of the binary version."""
    if not data or len(data) % (1 + PIXELS):
        raise WrongData(f"{name} has {len(data):,} bytes, which are no records of {1 + PIXELS:,}.")
    records = np.frombuffer(data, np.uint8).reshape(-1, 1 + PIXELS)
    images = records[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return images, check_labels(name, records[:, 0])


def read_mosaic(name: str, data: bytes) -> NDArray[np.uint8]:
    """The images of one mosaic, row by row."""
    with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as picture:
        if picture.size != (COLUMNS * SIDE, ROWS * SIDE):
            raise WrongData(f"{name} is {picture.size[0]} × {picture.size[1]}, not {COLUMNS * SIDE} × {ROWS * SIDE}.")
        pixels = np.asarray(picture.convert("RGB"))
    tiles = pixels.reshape(ROWS, SIDE, COLUMNS, SIDE, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(ROWS * COLUMNS, SIDE, SIDE, 3)


def check_labels(name: str, labels: NDArray[np.generic]) -> NDArray[np.uint8]:
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(CLASSES):  # type: ignore[attr-defined]
        raise WrongData(f"{name} has labels beyond the ten classes.")
    return labels.astype(np.uint8)


def write_split(folder: Path, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Iterator[int]:
    """Write the images as PNGs under the names of their classes; yields how many are there."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / CLASSES[label] / f"{number:05}.png", compress_level=1)
        yield number + 1


def main() -> int:
    parser = argparse.ArgumentParser(description="CIFAR-10 as an image folder of PNGs.")
    parser.add_argument("source", type=Path, help="a folder or a tar file: the binary version, or mosaics with labels")
    parser.add_argument("target", type=Path, help="the new folder, which gets train/ and val/")
    given = parser.parse_args()
    if any((given.target / split).exists() for split in ("train", "val")):
        print(f"{given.target} holds train/ or val/ already; give a new folder.", file=sys.stderr)
        return 1
    if not given.source.exists():
        print(f"There is no {given.source}; give the folder or tar file that holds CIFAR-10.", file=sys.stderr)
        return 1
    try:
        files = read_files(given.source)
        for split, is_train in (("train", True), ("val", False)):
            images, labels = read_split(files, is_train)
            count = 0
            for count in write_split(given.target / split, images, labels):
                if count % 5000 == 0:
                    print(f"{split}: {count:,} of {len(images):,}", flush=True)
            print(f"Wrote {count:,} images to {given.target / split}")
    except (WrongData, OSError, tarfile.TarError) as error:
        print(f"{given.source}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
