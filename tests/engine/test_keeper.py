"""Checkpoints are written beside the steps: of their own moment, one at a time, and never forgotten."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine import state
from lockstep.engine.build import build_parts, open_sources
from lockstep.engine.checkpoint import MANIFEST, Saved, list_checkpoints, save_checkpoint
from lockstep.engine.trainer import StopRequest, Trainer
from lockstep.errors import SharedError
from lockstep.events import CheckpointSaved, Event, Notice, RunEnded, StepDone
from tests.engine.conftest import tiny_config
from tests.engine.small import Keeping, alone

Save = Callable[..., Saved]


class Ear(Keeping):
    """Keeps what it hears, and does something at a step."""

    def __init__(self, step: int = 0, act: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._step, self._act = step, act

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, StepDone) and event.step == self._step:
            self._act()

    def steps_of(self, kind: type[Any]) -> list[int]:
        return [event.step for event in self.events if isinstance(event, kind)]


def train(images: Path, folder: Path, ear: Ear) -> None:
    """Seven steps, a checkpoint after every third and the last."""
    config = tiny_config(images, "train.duration=7st", "train.keep_checkpoints=9", "optim.warmup=0st")
    world, sources = alone(), open_sources(config.data)
    parts = build_parts(config, world, sources)
    Trainer(config, "tiny", world, sources, parts, folder, ear, StopRequest()).run()


def saving(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object]) -> None:
    """From now on checkpoints are written by the real code, but something comes before, in the same thread."""

    def save(folder: Path, step: int, *rest: Any, **more: Any) -> Saved:
        before(step)
        return save_checkpoint(folder, step, *rest, **more)

    monkeypatch.setattr(state, "save_checkpoint", save)


def test_steps_go_on_while_a_checkpoint_of_an_earlier_one_is_written(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(images, tmp_path / "usual", Ear())
    reached = threading.Event()
    saving(monkeypatch, lambda step: step == 3 and not reached.wait(60) and pytest.fail("steps waited"))
    ear = Ear(5, lambda: (time.sleep(0.3), reached.set()))
    train(images, tmp_path / "late", ear)
    told = [(type(event), event.step) for event in ear.events if isinstance(event, StepDone | CheckpointSaved)]
    assert told.index((StepDone, 5)) < told.index((CheckpointSaved, 3)) < told.index((CheckpointSaved, 6))
    assert ear.steps_of(CheckpointSaved) == [3, 6, 7]
    # Sealed hashes of all arrays: those of the step it is named for, whatever came after.
    for step in (3, 6, 7):
        usual, late = (tmp_path / run / "checkpoints" / f"step-{step:08d}" / MANIFEST for run in ("usual", "late"))
        assert late.read_bytes() == usual.read_bytes()


def test_its_time_is_told_apart_from_what_steps_waited(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = threading.Event()
    saving(monkeypatch, lambda step: step != 3 or reached.wait(60))
    ear = Ear(5, lambda: (time.sleep(0.5), reached.set()))
    train(images, tmp_path, ear)
    saved = [event for event in ear.events if isinstance(event, CheckpointSaved)]
    assert saved[0].seconds < 0.5  # and its thread waited for longer
    (ended,) = (event for event in ear.events if isinstance(event, RunEnded))
    assert ended.checkpoint_s == pytest.approx(sum(event.seconds for event in saved))
    assert all(event.time_s <= ended.time_s for event in saved)


def test_one_is_written_at_a_time(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: set[int] = set()
    beside: list[int] = []

    def write(step: int) -> None:
        beside.append(len(under_way))
        under_way.add(step)
        time.sleep(0.3)  # longer than three steps
        under_way.remove(step)

    saving(monkeypatch, write)
    ear = Ear()
    train(images, tmp_path, ear)
    assert ear.steps_of(CheckpointSaved) == [3, 6, 7]
    assert beside == [0, 0, 0]


def test_a_run_that_fails_finishes_the_one_on_its_way(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise SharedError("Something else.")

    saving(monkeypatch, lambda step: time.sleep(0.5))
    ear = Ear(4, fail)
    with pytest.raises(SharedError, match="Something else"):
        train(images, tmp_path, ear)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000003"]
    assert [type(event) for event in ear.events[-2:]] == [CheckpointSaved, RunEnded]


def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: int) -> None:
        if step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    saving(monkeypatch, refuse)
    ear = Ear()
    train(images, tmp_path, ear)
    assert ear.steps_of(CheckpointSaved) == [6, 7]
    notices = [event.text for event in ear.events if isinstance(event, Notice)]
    assert sum("step 3 could not be written" in text for text in notices) == 1


def test_a_last_one_that_cannot_be_written_is_tried_again_and_then_the_run_has_failed(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def refuse(step: int) -> None:
        tried.append(step)
        if step == 7:
            raise OSError(errno.ENOSPC, "No space left on device")

    saving(monkeypatch, refuse)
    ear = Ear()
    with pytest.raises(SharedError, match="step 7 could not be written"):
        train(images, tmp_path, ear)
    assert tried == [3, 6, 7, 7]
    (ended,) = (event for event in ear.events if isinstance(event, RunEnded))
    assert ended.status == "failed"
