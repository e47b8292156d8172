"""What a run leaves when it is stopped inside a step or an evaluation: everything up to the last whole step."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.engine import reuse, step, trainer
from lockstep.engine.build import Parts, assemble
from lockstep.engine.giving_up import GIVEN_UP, is_given_up
from lockstep.engine.measure import fake_batch
from lockstep.engine.resume import list_evaluated
from lockstep.engine.run import run_rank
from lockstep.engine.state import list_changing
from lockstep.engine.step import train_step
from lockstep.errors import LockstepError
from lockstep.events import Evaluated, Event, Notice, RunEnded, StepDone, encode
from lockstep.optim.schedule import Schedule
from lockstep.report.run import SilentSink
from tests.engine.conftest import tiny_config
from tests.ranks import run_ranks, world_of_one
from tests.report.records import evaluated, started

CONFIG = RunConfig.model_validate(
    {
        "data": {"image_size": 8},
        "optim": {"name": "lars", "lr": 0.1},
        "comm": {"tune_s": 0.0},
        "train": {"global_batch": 16, "duration": "9st", "max_batch_per_rank": 4},  # alone 4 passes, one of two ranks 2
    }
)
CALM = ["optim.warmup=0st", "train.eval_every=0st", "train.max_batch_per_rank=7"]


def build_parts(world: World) -> Parts:
    torch.manual_seed(1)
    first = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    model = nn.Sequential(*first, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(54, 5))
    return assemble(CONFIG, world, model, Schedule("constant", 0.1, total_steps=9))


def keep(parts: Parts) -> list[Tensor]:
    return [array.clone() for array in list_changing(parts).arrays()]


def after(num_passes: int) -> Callable[[], bool]:
    """Asked to stop after so many passes."""
    left = [num_passes] + [0] * 9

    def asked() -> bool:
        left[0] -= 1
        return left[0] < 0

    return asked


@pytest.mark.parametrize("num_passes", [0, 1, 3])
def test_a_step_that_is_given_up_changes_nothing(num_passes: int) -> None:
    parts, twin = build_parts(world_of_one()), build_parts(world_of_one())
    batch = fake_batch(CONFIG, world_of_one())
    for each in (parts, twin):
        train_step(each, batch, 0.1)
    before = keep(parts)
    assert is_given_up(train_step(parts, batch, 0.1, True, after(num_passes)))
    assert all(map(torch.equal, keep(parts), before))
    for each in (parts, twin):
        assert not is_given_up(train_step(each, batch, 0.1, asked=lambda: False))
    assert all(map(torch.equal, keep(parts), keep(twin)))
    assert not torch.equal(parts.weights, before[0])


def give_up_on_one_rank(world: World, num_passes: int) -> tuple[float, bool, bool]:
    """Rank 1 alone is asked; the other takes all of its passes."""
    parts, batch = build_parts(world), fake_batch(CONFIG, world)
    train_step(parts, batch, 0.1)
    before = keep(parts)
    side = train_step(parts, batch, 0.1, asked=after(num_passes) if world.rank == 1 else lambda: False)
    votes, is_same = float(side[GIVEN_UP]), all(map(torch.equal, keep(parts), before))
    train_step(parts, batch, 0.1, asked=lambda: False)
    try:
        return votes, is_same, torch.equal(parts.weights, before[0])
    finally:
        assert parts.hybrid is not None
        parts.hybrid.close()


def test_where_one_rank_gives_a_step_up_no_rank_takes_it() -> None:
    assert run_ranks(give_up_on_one_rank, 2, 1) == [(1.0, True, False)] * 2


def listen(images: Path, folder: Path, *settings: str, resume: bool = False) -> list[Event]:
    """Train in this process, and hear what the run says; its last word may be an error."""
    heard: list[Event] = []

    class Ear(SilentSink):
        def emit(self, event: Event) -> None:
            heard.append(event)

    config = tiny_config(images, *settings)
    try:
        run_rank(config, "tiny", folder, resume=resume, membership=None, open_sink=lambda world, folder: Ear())
    except LockstepError as error:
        heard.append(Notice(level="warning", text=str(error)))
    return heard


def interrupt_pass(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C comes in this pass of the run, counted from 1."""
    count, plain = [0], step.count_correct

    def counted(*arguments: object) -> Tensor:
        count[0] += 1
        if count[0] == number:
            signal.raise_signal(signal.SIGINT)
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "count_correct", counted)


def test_a_run_interrupted_amid_a_step_goes_on_as_if_it_had_never_stopped(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 28 samples in 4 passes; the signal comes in the second pass of step 3, before a record is due."""
    settings = [*CALM, "train.duration=5st", "train.log_every=4", "train.checkpoint_every=0st"]
    listen(images, tmp_path / "whole", *settings)
    monkeypatch.setattr(trainer, "LONG_STEP_S", 0.0)
    with monkeypatch.context() as patch:
        interrupt_pass(patch, 4 + 4 + 2)
        heard = listen(images, tmp_path / "cut", *settings)
    assert [event.status for event in heard if isinstance(event, RunEnded)] == ["interrupted"]
    assert [event.text for event in heard if isinstance(event, Notice)][-1].startswith("Step 3 was given up")
    assert [event.step for event in heard if isinstance(event, StepDone)] == [1, 2]
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-00000002"]
    listen(images, tmp_path / "cut", *settings, resume=True)
    for file in ("model", "optimizer"):
        whole, cut = (
            load_file(tmp_path / name / "checkpoints" / "step-00000005" / f"{file}.safetensors")
            for name in ("whole", "cut")
        )
        assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_short_step_is_taken_to_its_end(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first records all ranks know that their steps are short; the wish to stop goes with the next one."""
    interrupt_pass(monkeypatch, 4 * 3 + 2)
    heard = listen(images, tmp_path, *CALM, "train.duration=9st")
    assert [event.step for event in heard if isinstance(event, RunEnded)] == [5]


def test_a_run_whose_first_step_is_given_up_starts_again(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_pass(patch, 2)
        heard = listen(images, tmp_path, *CALM, "train.duration=2st")
    assert [(event.status, event.step) for event in heard if isinstance(event, RunEnded)] == [("interrupted", 0)]
    heard = listen(images, tmp_path, *CALM, "train.duration=2st", resume=True)
    assert [(event.status, event.step) for event in heard if isinstance(event, RunEnded)] == [("finished", 2)]


def test_validation_images_that_cannot_be_read_cost_no_step(images: Path, tmp_path: Path) -> None:
    """50 validation images, of which data.bad_share allows one: the checkpoint comes before the evaluation."""
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    for victim in sorted((folder / "val" / "ring").iterdir())[:3]:
        victim.write_bytes(b"not an image")
    settings = ["optim.warmup=0st", "train.duration=3st", "train.eval_every=2st", "train.checkpoint_every=2st"]
    heard = listen(folder, tmp_path / "run", *settings)
    (ended,) = (event for event in heard if isinstance(event, RunEnded))
    assert ended.status == "failed"
    assert "of 50 samples cannot be read, and data.bad_share allows 1" in ended.reason
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json").is_file()
    # The evaluation that was missed comes first.
    heard = listen(folder, tmp_path / "run", *settings, "data.bad_share=0.1", resume=True)
    assert [(event.step, event.total, event.bad_samples) for event in heard if isinstance(event, Evaluated)] == [
        (2, 47, 3),
        (3, 47, 3),
    ]


def test_evaluations_of_steps_that_were_lost_do_not_count(tmp_path: Path) -> None:
    events = [started(), evaluated(10, 1001, 0.5), evaluated(20, 1002, 0.5), started(start_step=10)]
    assert list_evaluated(tmp_path) == set()
    (tmp_path / "events.jsonl").write_text("".join(f"{encode(event)}\n" for event in events))
    assert list_evaluated(tmp_path) == {10}
    (tmp_path / "events.jsonl").write_text('{"kind": "Evaluated", "step": "x"}\n')
    assert list_evaluated(tmp_path) == set()


def test_the_reason_of_an_end_is_a_sentence_from_the_first_measurement_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*arguments: object, **more: object) -> None:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")

    monkeypatch.setattr(reuse, "choose_plan", lose)
    heard = listen(images, tmp_path, *CALM)
    assert [event.reason for event in heard if isinstance(event, RunEnded)] == [
        "Rank 0 lost contact with the other ranks and stopped."
    ]


def test_of_few_classes_nobody_counts_the_five_best(images: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    for split in ("train", "val"):
        for name in ("ring", "star", "disc"):
            source = images / split / name
            if source.is_dir():
                shutil.copytree(source, few / split / name)
    assert 2 <= len(list((few / "val").iterdir())) <= 3
    heard = listen(few, tmp_path / "run", *CALM, "train.duration=1st", "train.global_batch=14")
    assert [event.top5 for event in heard if isinstance(event, Evaluated)] == [None]
