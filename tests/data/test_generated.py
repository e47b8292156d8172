"""The generated data set: deterministic, nested, safe to build twice, and beyond a linear classifier."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from lockstep.data.decode import decode
from lockstep.data.generated import build_generated, default_cache
from lockstep.data.render import CLASSES
from lockstep.data.sources import ImageFolder, open_folder
from lockstep.errors import LockstepError


@pytest.fixture(scope="module")
def full_set(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageFolder, ImageFolder]:
    return open_folder(build_generated(tmp_path_factory.mktemp("cache"), 4096, 1024))


@pytest.fixture(scope="module")
def pixels(full_set: tuple[ImageFolder, ImageFolder]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standardised pixels and labels of both splits."""
    (train, train_labels), (val, val_labels) = (
        (np.stack([decode(split.read(index)) for index in range(split.num_samples)]), split.labels)
        for split in full_set
    )
    train, val = train.reshape(len(train), -1).astype(np.float32), val.reshape(len(val), -1).astype(np.float32)
    mean, std = train.mean(0), train.std(0)
    return (
        torch.from_numpy((train - mean) / std),
        torch.from_numpy(train_labels),
        torch.from_numpy((val - mean) / std),
        torch.from_numpy(val_labels),
    )


def test_a_linear_classifier_on_the_pixels_fails(pixels: tuple[torch.Tensor, ...]) -> None:
    train, train_labels, val, val_labels = pixels
    best = 0.0
    for penalty in (0.3, 3.0):  # about where held-out accuracy peaks, so that overfitting is no excuse
        weight, bias = torch.zeros(train.shape[1], 10, requires_grad=True), torch.zeros(10, requires_grad=True)
        solver = torch.optim.LBFGS([weight, bias], max_iter=15, line_search_fn="strong_wolfe")

        def loss(weight: torch.Tensor = weight, bias: torch.Tensor = bias, penalty: float = penalty) -> torch.Tensor:
            weight.grad = bias.grad = None
            value = cross_entropy(train @ weight + bias, train_labels) + penalty * weight.square().sum() / 2
            value.backward()
            return value

        solver.step(loss)
        fitted = ((train @ weight + bias).argmax(1) == train_labels).float().mean().item()
        held_out = ((val @ weight + bias).argmax(1) == val_labels).float().mean().item()
        assert fitted > 2 * 0.1, "the classifier was not trained"
        best = max(best, held_out)
    assert 0.15 < best < 0.60  # above guessing: it was given a fair chance


def test_the_nearest_class_mean_is_a_poor_guess(pixels: tuple[torch.Tensor, ...]) -> None:
    train, train_labels, val, val_labels = pixels
    means = torch.stack([train[train_labels == label].mean(0) for label in range(len(CLASSES))])
    assert (torch.cdist(val, means).argmin(1) == val_labels).float().mean() < 0.40


def test_all_classes_are_there_in_equal_numbers(full_set: tuple[ImageFolder, ImageFolder]) -> None:
    train, val = full_set
    assert train.classes == val.classes == tuple(sorted(CLASSES))
    assert np.ptp(np.bincount(train.labels)) <= 1
    assert np.ptp(np.bincount(val.labels)) <= 1


def test_a_larger_set_contains_a_smaller_one(tmp_path: Path) -> None:
    small, large = build_generated(tmp_path, 20, 10), build_generated(tmp_path, 60, 30)
    files = [path.relative_to(small) for path in small.rglob("*.jpeg")]
    assert len(files) == 30
    assert all((large / file).read_bytes() == (small / file).read_bytes() for file in files)


def test_a_built_set_is_not_built_again(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = build_generated(tmp_path, 20, 10, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (30, 30)
    calls.clear()
    assert build_generated(tmp_path, 20, 10, lambda done, total: calls.append((done, total))) == first
    assert not calls


def test_two_builders_at_once_both_get_the_complete_set(tmp_path: Path) -> None:
    built: list[Path] = []
    barrier = threading.Barrier(2)

    def wait_for_other(done: int, total: int) -> None:
        if done == total:
            barrier.wait(60)  # both have written everything before either renames

    builders = [
        threading.Thread(target=lambda: built.append(build_generated(tmp_path, 20, 10, wait_for_other)))
        for _ in range(2)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert built == [tmp_path / "generated-v1-20x10"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["generated-v1-20x10"]
    assert len(list(built[0].rglob("*.jpeg"))) == 30


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(LockstepError, match=r"cannot be written to .* \(No space left on device\); free some space"):
        build_generated(tmp_path, 20, 10)
    assert not list(tmp_path.iterdir())


def test_what_a_kill_has_left_is_swept_but_not_what_another_writes(tmp_path: Path) -> None:
    left, written = tmp_path / ".generated-v1-20x10-left", tmp_path / ".generated-v1-20x10-written"
    for folder in (left, written):
        (folder / "train").mkdir(parents=True)
    os.utime(left, (0, 0))
    build_generated(tmp_path, 20, 10)
    assert (left.exists(), written.exists()) == (False, True)


def test_a_cache_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(LockstepError, match="set LOCKSTEP_CACHE to another folder"):
        build_generated(tmp_path / "cache", 20, 10)


def test_fewer_images_than_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"data\.train_images and data\.val_images must be at least 10"):
        build_generated(tmp_path, 100, 9)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)
    assert default_cache() == Path("/home/someone/.cache/lockstep")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_cache() == Path("/cache/lockstep")
    monkeypatch.setenv("LOCKSTEP_CACHE", "/elsewhere")
    assert default_cache() == Path("/elsewhere")
