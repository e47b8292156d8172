"""The reader of CIFAR-10's two forms: pixels and labels where they belong, and nothing trusted."""

import importlib.util
import io
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[1] / "experiments" / "unpack_cifar10.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("unpack_cifar10", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["unpack", str(source), str(target)])
    return int(script.main())


def record(label: int, red: int, green: int, blue: int) -> bytes:
    """A record by the published format: the label, then 1024 bytes each of red, green and blue, row by row."""
    planes = bytearray([red] * 1024 + [green] * 1024 + [blue] * 1024)
    planes[32 + 5] = 255  # red, second row, sixth column
    return bytes([label]) + bytes(planes)


def test_the_binary_version_is_read_from_a_tar_file(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "cifar.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        for name, data in (
            ("data_batch_1.bin", record(0, 10, 20, 30) + record(9, 1, 2, 3)),
            ("data_batch_2.bin", record(3, 7, 8, 9)),
            ("test_batch.bin", record(5, 4, 5, 6)),
        ):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert run(script, source, tmp_path / "out", monkeypatch) == 0
    found = {path.relative_to(tmp_path / "out").as_posix() for path in tmp_path.glob("out/*/*/*.png")}
    assert found == {"train/airplane/00000.png", "train/truck/00001.png", "train/cat/00002.png", "val/dog/00000.png"}
    pixels = np.asarray(Image.open(tmp_path / "out/train/airplane/00000.png"))
    assert pixels.shape == (32, 32, 3)
    assert pixels[0, 0].tolist() == [10, 20, 30]
    assert pixels[1, 5].tolist() == [255, 20, 30]


def test_mosaics_are_cut_row_by_row(script: ModuleType, tmp_path: Path) -> None:
    colors = np.random.default_rng(0).integers(0, 256, (50, 100, 3), dtype=np.uint8)
    mosaic = colors.repeat(32, axis=0).repeat(32, axis=1)
    Image.fromarray(mosaic).save(tmp_path / "train_00.png")
    np.save(tmp_path / "train_y.npy", (np.arange(5000) % 10).astype(np.uint8))
    images, labels = script.read_split(script.read_files(tmp_path), True)
    assert images.shape == (5000, 32, 32, 3)
    assert (images[317] == colors[3, 17]).all()
    assert labels[317] == 7


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("data_batch_1.bin", b"\0" * 3072, "which are no records"),
        ("data_batch_1.bin", record(10, 0, 0, 0), "labels beyond the ten classes"),
        ("train_y.npy", b"\x80\x04K\x01.", "neither the binary version nor"),
    ],
)
def test_what_is_no_cifar10_is_a_sentence(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    data: bytes,
    words: str,
) -> None:
    (tmp_path / name).write_bytes(data)
    assert run(script, tmp_path, tmp_path / "out", monkeypatch) == 1
    assert words in capsys.readouterr().err
