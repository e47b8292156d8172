"""Checkpoints on disk: whole or not there, and a damaged one costs only itself."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.engine import checkpoint
from lockstep.engine.checkpoint import clear_aside, list_checkpoints, load_checkpoint, save_checkpoint
from lockstep.errors import LockstepError


def tensors(step: int) -> dict[str, dict[str, Tensor]]:
    return {
        "model": {"weight": torch.arange(6.0).view(2, 3) + step, "count": torch.tensor(step)},
        "optimizer": {"momentum/weight": torch.full((2, 3), -float(step))},
    }


def write(folder: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        save_checkpoint(folder, step, tensors(step), {"step": step, "note": f"of {step}"}, keep=keep)


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


def be_silent(text: str) -> None:
    raise AssertionError(f"nothing is damaged, yet: {text}")


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "new" / "folder", 7, tensors(7), {"step": 7, "deep": {"x": [1, "a"]}}, keep=1)
    found = load_checkpoint(tmp_path / "new" / "folder", be_silent)
    assert found.path == saved.path
    assert found.state == {"step": 7, "deep": {"x": [1, "a"]}}
    expected = tensors(7)
    assert found.files.keys() == expected.keys()
    for file, content in expected.items():
        assert found.files[file].keys() == content.keys()
        for name, value in content.items():
            assert found.files[file][name].dtype == value.dtype
            assert torch.equal(found.files[file][name], value)


def test_the_reported_size_is_that_of_the_tensor_files(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 1, tensors(1), {}, keep=1)
    assert saved.num_bytes == sum(file.stat().st_size for file in saved.path.glob("*.safetensors"))


def test_the_newest_is_taken(tmp_path: Path) -> None:
    write(tmp_path, 9, 100, 20)
    assert steps_in(tmp_path) == [100, 20, 9]
    assert load_checkpoint(tmp_path, be_silent).state["step"] == 100


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_last_ones_are_kept(tmp_path: Path, keep: int) -> None:
    write(tmp_path, 1, 2, 3, 4, keep=keep)
    assert steps_in(tmp_path) == [4, 3, 2, 1][:keep]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, 3)
    save_checkpoint(tmp_path, 3, tensors(8), {"step": 8}, keep=2)
    assert load_checkpoint(tmp_path, be_silent).state == {"step": 8}
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_crash_left_half_written_is_ignored_and_then_removed(tmp_path: Path) -> None:
    write(tmp_path, 3)
    leftover = tmp_path / ".aside-step-00000007"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert load_checkpoint(tmp_path, be_silent).state["step"] == 3
    write(tmp_path, 6)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", "step-00000006"}


class Killed(BaseException):
    """Nothing is done after it."""


@pytest.mark.parametrize("last", [Killed, OSError])
@pytest.mark.parametrize("moment", [0, 1])
def test_a_step_that_is_saved_again_and_cut_off_between_the_renames_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, last: type[BaseException]
) -> None:
    write(tmp_path, 3, keep=1)
    with monkeypatch.context() as patch:
        left, rename = iter([*[False] * moment, True, False]), Path.rename

        def rename_or_end(path: Path, target: Path) -> Path:
            if next(left, False):
                raise last
            return rename(path, target)

        patch.setattr(Path, "rename", rename_or_end)
        with pytest.raises(last):
            save_checkpoint(tmp_path, 3, tensors(8), {"step": 8}, keep=1)
    if last is Killed:
        clear_aside(tmp_path)  # by the next run
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert load_checkpoint(tmp_path, be_silent).state["step"] == 3


def test_a_later_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    write(tmp_path, 5, 10)
    damage_byte(tmp_path / "step-00000010")
    heard: list[str] = []
    assert load_checkpoint(tmp_path, heard.append).state["step"] == 5
    write(tmp_path, 6, 7, keep=1)
    assert load_checkpoint(tmp_path, heard.append).state["step"] == 7
    assert steps_in(tmp_path) == [10, 7]
    write(tmp_path, 10, keep=1)
    assert load_checkpoint(tmp_path, be_silent).state["step"] == 10


def damage_byte(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-3] ^= 16
    (path / "model.safetensors").write_bytes(content)


def truncate(path: Path) -> None:
    file = path / "optimizer.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def change_manifest(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def change_counter(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"note": "of 2"', '"note": "of 6"'))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (damage_byte, "model.safetensors does not match its hash"),
    "a truncated file": (truncate, "optimizer.safetensors does not match its hash"),
    "an emptied file": (lambda path: os.truncate(path / "model.safetensors", 0), "does not match its hash"),
    "a missing file": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors: No such file"),
    "a missing manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
    "an empty manifest": (lambda path: os.truncate(path / "manifest.json", 0), "cannot be read"),
    "a manifest that is no JSON": (lambda path: (path / "manifest.json").write_text("{nonsense"), "cannot be read"),
    "a manifest that is no text": (
        lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        "cannot be read",
    ),
    "a manifest that is no table": (lambda path: (path / "manifest.json").write_text("[1, 2]"), "cannot be read"),
    "a later format": (lambda path: change_manifest(path, lambda m: m.update(format=9)), "its format is 9"),
    "no format": (lambda path: change_manifest(path, lambda m: m.pop("format")), "cannot be read"),
    "no hashes": (lambda path: change_manifest(path, lambda m: m.pop("sha256")), "does not match its seal"),
    "no state": (lambda path: change_manifest(path, lambda m: m.pop("state")), "does not match its seal"),
    "no seal": (lambda path: change_manifest(path, lambda m: m.pop("seal")), "cannot be read"),
    "a changed counter": (change_counter, "does not match its seal"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    write(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    heard: list[str] = []
    found = load_checkpoint(tmp_path, heard.append)
    assert found.state == {"step": 1, "note": "of 1"}
    assert torch.equal(found.files["model"]["weight"], tensors(1)["model"]["weight"])
    (sentence,) = heard
    assert str(tmp_path / "step-00000002") in sentence
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_numbers_that_are_not_finite_are_passed_over_for_the_older_finite_ones(
    tmp_path: Path, file: str, value: float
) -> None:
    write(tmp_path, 1)
    spoiled = tensors(2)
    next(iter(spoiled[file].values()))[1, 1] = value
    save_checkpoint(tmp_path, 2, spoiled, {"step": 2}, keep=2)
    heard: list[str] = []
    assert load_checkpoint(tmp_path, heard.append).state["step"] == 1
    (sentence,) = heard
    assert f"{file}.safetensors holds numbers that are not finite" in sentence


def test_tensors_that_do_not_parse_are_damage_even_under_the_right_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda content: b"not safetensors")
        write(tmp_path, 2)
    heard: list[str] = []
    assert load_checkpoint(tmp_path, heard.append).state["step"] == 1
    assert len(heard) == 1


def test_when_every_checkpoint_is_damaged_there_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for path in list_checkpoints(tmp_path):
        damage_byte(path)
    heard: list[str] = []
    with pytest.raises(LockstepError, match=r"Every checkpoint under .* is damaged"):
        load_checkpoint(tmp_path, heard.append)
    assert len(heard) == 2


@pytest.mark.parametrize("name", ["", "missing"])
def test_where_there_is_no_checkpoint_there_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(LockstepError, match="There is no checkpoint under"):
        load_checkpoint(tmp_path / name, be_silent)


def test_a_file_too_large_for_the_disk_leaves_the_older_ones_and_no_debris(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk; Python ignores the signal and sees a real EFBIG."""
    write(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(tmp_path, 2, {"model": {"weight": torch.zeros(1000)}}, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_checkpoint(tmp_path, be_silent).state["step"] == 1


def test_a_manifest_that_cannot_be_written_leaves_the_older_ones_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    honest = checkpoint.write_flushed

    def fail_at_the_manifest(path: Path, data: bytes) -> None:
        if path.name == "manifest.json":
            raise OSError(28, "No space left on device")
        honest(path, data)

    monkeypatch.setattr(checkpoint, "write_flushed", fail_at_the_manifest)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 1, keep=1)  # not even the same step's older self is lost
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_checkpoint(tmp_path, be_silent).state["step"] == 1


def test_a_folder_that_is_a_file_is_an_error_and_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(OSError, match="checkpoints"):
        write(tmp_path / "checkpoints", 1)
    assert (tmp_path / "checkpoints").read_text() == "mine"
