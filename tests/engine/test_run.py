"""One rank's run from configuration to the end, in this process: what it leaves in its folder and what it refuses."""

import errno
import json
import os
import re
import shutil
import signal
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

from lockstep.comm.pulse import Lost, Pulse
from lockstep.comm.world import World
from lockstep.data.pack import pack_folder
from lockstep.engine import build, checkpoint, run
from lockstep.engine.checkpoint import list_checkpoints
from lockstep.engine.identity import IDENTITY_FILE, read_identity
from lockstep.engine.run import STOP_SIGNALS, end_rank, explain_failures, run_rank, share_sources, watch_signals
from lockstep.errors import LockstepError, SharedError
from lockstep.events import EpochDone, Event, Notice, RunEnded, RunStarted, Sink, StepDone
from lockstep.report.run import SilentSink
from tests.engine.conftest import tiny_config
from tests.ranks import run_ranks, world_of_one

SHORT = ["train.duration=3st", "optim.warmup=0st", "train.eval_every=0st"]


def open_sink(world: World, folder: Path) -> Sink:
    return SilentSink()


def train(images: Path, folder: Path, *settings: str, resume: bool = False) -> str:
    config = tiny_config(images, *SHORT, *settings)
    return run_rank(config, "tiny", folder, resume=resume, membership=None, open_sink=open_sink)


def listen(images: Path, folder: Path, *settings: str) -> list[Event]:
    """Resume a run, and hear what it says."""
    heard: list[Event] = []

    class Ear(SilentSink):
        def emit(self, event: Event) -> None:
            heard.append(event)

    config = tiny_config(images, *SHORT, *settings)
    run_rank(config, "tiny", folder, resume=True, membership=None, open_sink=lambda world, folder: Ear())
    return heard


def texts(heard: list[Event]) -> list[str]:
    return [event.text for event in heard if isinstance(event, Notice)]


def read_config(folder: Path) -> dict[str, dict[str, object]]:
    return tomllib.loads((folder / "config.toml").read_text())


def test_a_resumed_run_keeps_its_overrides_for_the_next_time(images: Path, tmp_path: Path) -> None:
    assert train(images, tmp_path) == "finished"
    assert read_config(tmp_path)["train"]["duration"] == "3st"
    assert train(images, tmp_path, "train.duration=4st", resume=True) == "finished"
    assert read_config(tmp_path)["train"]["duration"] == "4st"


@pytest.mark.parametrize(
    ("setting", "words"),
    [("optim.name=sgd", "optim.name=lars"), ("model.width=16", "use the model settings"), ("", "is finished")],
)
def test_an_override_that_does_not_fit_leaves_the_run_resumable(
    images: Path, tmp_path: Path, setting: str, words: str
) -> None:
    train(images, tmp_path)
    # Its last word, which the sink of tests does not write.
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    before = (tmp_path / "config.toml").read_bytes()
    settings = ["optim.trust_coefficient=0.001", "train.duration=4st", setting] if setting else []
    with pytest.raises(LockstepError, match=words):
        train(images, tmp_path, *settings, resume=True)
    assert (tmp_path / "config.toml").read_bytes() == before
    assert train(images, tmp_path, "train.duration=4st", resume=True) == "finished"


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_run_that_runs_away_keeps_its_last_finite_checkpoint_and_goes_on_from_it(
    images: Path, tmp_path: Path, compute: str
) -> None:
    """The loss of the last step was still finite: it is computed before the update."""
    calm = [f"precision.compute={compute}", "train.checkpoint_every=1st", "optim.schedule=constant"]
    train(images, tmp_path, *calm, "train.duration=1st")
    wild = [*calm, "optim.trust_coefficient=1e38", "optim.lr=1e30", "train.duration=2st"]
    with pytest.raises(
        LockstepError, match=r"no longer finite.* the last good checkpoint, .*step-00000001, with --resume"
    ):
        train(images, tmp_path, *wild, resume=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert train(images, tmp_path, *calm, "train.duration=2st", resume=True) == "finished"


def test_a_run_killed_before_its_first_checkpoint_starts_again_when_resumed(images: Path, tmp_path: Path) -> None:
    train(images, tmp_path / "whole", "train.duration=4st")
    train(images, tmp_path / "killed", "train.duration=4st")
    shutil.rmtree(tmp_path / "killed" / "checkpoints")
    heard = listen(images, tmp_path / "killed", "train.duration=4st")
    assert any(
        text.endswith("has no checkpoint yet; starting it from step 0, with its own configuration.")
        for text in texts(heard)
    )
    assert [event.start_step for event in heard if isinstance(event, RunStarted)] == [0]
    whole, again = (
        load_file(tmp_path / name / "checkpoints" / "step-00000004" / "model.safetensors")
        for name in ("whole", "killed")
    )
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_resume_with_another_global_batch_keeps_its_place_and_counts_anew(images: Path, tmp_path: Path) -> None:
    """130 samples: 7 steps of 28 end 56 samples into the second epoch; two steps of 56 are left of it."""
    train(images, tmp_path, "train.duration=7st")
    heard = listen(images, tmp_path, "train.global_batch=56", "train.duration=3ep")
    said = texts(heard)
    assert "Going on from step 7 on 1 rank; 1 wrote the checkpoint." in said
    assert (
        "train.global_batch was 28 and is 56: the run keeps its place in the data (epoch 2, sample 57), "
        "which is step 4 of 9 in such batches."
    ) in said
    assert [event.start_step for event in heard if isinstance(event, RunStarted)] == [4]
    assert [event.step for event in heard if isinstance(event, StepDone)] == [5, 6, 7, 8, 9]
    epochs = [event for event in heard if isinstance(event, EpochDone)]
    assert [(event.epoch, event.ledger_ok) for event in epochs] == [(1, True), (2, True)]
    (again,) = (
        event
        for event in listen(images, tmp_path, "train.global_batch=56", "train.duration=4ep")
        if isinstance(event, RunStarted)
    )
    assert again.start_step == 9


def test_checkpoints_counted_in_smaller_batches_are_not_taken_for_newer_ones(images: Path, tmp_path: Path) -> None:
    train(images, tmp_path, "train.duration=7st")
    train(images, tmp_path, "train.global_batch=130", "train.duration=2ep", resume=True)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]


def test_a_resume_says_in_one_line_what_is_asked_for_anew(images: Path, tmp_path: Path) -> None:
    train(images, tmp_path)
    said = texts(listen(images, tmp_path, "train.duration=4st", "optim.weight_decay=0.001"))
    changes = [text for text in said if text.startswith("Going on with other settings")]
    assert changes == [
        "Going on with other settings: optim.weight_decay was 0.0001 and is 0.001; "
        'train.duration was "3st" and is "4st".'
    ]


@pytest.mark.parametrize("change", ["name", "class"])
def test_other_data_of_the_same_size_is_refused(images: Path, tmp_path: Path, change: str) -> None:
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    train(folder, tmp_path / "run")
    first = min((folder / "train" / "star").iterdir())
    first.rename(folder / "train" / ("ring" if change == "class" else "star") / "another.jpeg")
    with pytest.raises(
        LockstepError, match=r"The training data has changed .* \(other .*names\); resume with the data"
    ):
        train(folder, tmp_path / "run", "train.duration=4st", resume=True)


def test_the_same_data_in_another_place_or_packed_is_the_same(images: Path, tmp_path: Path) -> None:
    train(images, tmp_path / "run")
    moved = Path(shutil.copytree(images, tmp_path / "moved"))
    assert train(moved, tmp_path / "run", "train.duration=4st", resume=True) == "finished"
    pack_folder(images, tmp_path / "pack")
    assert train(tmp_path / "pack", tmp_path / "run", "train.duration=5st", resume=True) == "finished"
    pack_folder(images, tmp_path / "small", shard_mb=0.05)
    assert train(tmp_path / "small", tmp_path / "run", "train.duration=6st", resume=True) == "finished"
    other = max((moved / "train" / "star").iterdir())
    other.write_bytes(min((moved / "train" / "ring").iterdir()).read_bytes())
    pack_folder(moved, tmp_path / "other")
    with pytest.raises(LockstepError, match=r"has changed .* \(other bytes\)"):
        train(tmp_path / "other", tmp_path / "run", "train.duration=7st", resume=True)


def test_a_manifest_that_knows_neither_batch_nor_data_still_resumes(images: Path, tmp_path: Path) -> None:
    train(images, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["state"]["order"]["global_batch"], manifest["state"]["order"]["data"]
    path.write_text(json.dumps(manifest | {"seal": checkpoint._seal(manifest)}))
    assert train(images, tmp_path, "train.duration=4st", resume=True) == "finished"


def test_a_folder_that_cannot_be_made_is_a_sentence(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LockstepError, match=r"cannot be written \(Not a directory\); choose another --out"):
        train(images, tmp_path / "file" / "run")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_noted_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with watch_signals() as stop:
        assert stop.signal == 0
        signal.raise_signal(number)
        assert stop.signal == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "Rank 5 is out of device memory; lower train.max_batch_per_rank",
        ),
        (ValueError("Expected more than 1 value per channel when training"), "too few for batch norm"),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), "Rank 5 lost contact"),
        (RuntimeError("Timed out waiting 600000ms for recv operation"), "Rank 5 lost contact"),
        (RuntimeError("NCCL error: remote process exited"), "Rank 5 lost contact"),
    ],
)
def test_an_outside_failure_becomes_a_sentence(error: Exception, words: str) -> None:
    with pytest.raises(LockstepError, match=words), explain_failures(replace(world_of_one(), rank=5)):
        raise error


@pytest.mark.parametrize("ask", [lambda: torch.empty(1 << 46), lambda: np.empty(1 << 46)])
def test_a_recipe_that_no_memory_holds_is_one_sentence(ask: Callable[[], object]) -> None:
    said = pytest.raises(LockstepError, match=r"Rank 5 is out of memory; lower train\.global_batch")
    with said, explain_failures(replace(world_of_one(), rank=5)):
        ask()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("no"), KeyError("x")])
def test_a_defect_of_ours_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_failures(world_of_one()):
        raise error
    assert caught.value is error


def test_a_run_taken_up_between_image_sizes_agrees_with_one_that_never_stopped(images: Path, tmp_path: Path) -> None:
    settings = [
        'data.image_sizes=[{until = "1ep", size = 32}]',
        "data.image_size=40",
        "data.eval_resize=40",
        "optim.schedule=constant",
    ]
    train(images, tmp_path / "whole", *settings, "train.duration=7st")
    train(images, tmp_path / "broken", *settings, "train.duration=4st")
    train(images, tmp_path / "broken", *settings, "train.duration=7st", resume=True)
    whole, broken = (
        load_file(tmp_path / name / "checkpoints" / "step-00000007" / "model.safetensors")
        for name in ("whole", "broken")
    )
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def list_names(world: World, images: Path, moved: Path | None) -> list[str]:
    """What a rank finds in the folder; only rank 0 may scan, and another one's folder may be elsewhere."""
    config = tiny_config(images)
    if not world.is_first:
        build.open_folder = None  # type: ignore[assignment]
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": str(moved or images)})})
    try:
        sources = share_sources(config, replace(world, local_rank=0), None)  # each on a node of its own
    except LockstepError as error:
        return [str(error)]
    names = [sources.train.name(sample) for sample in range(sources.train.num_samples)]
    assert sources.train.read(0) == Path(names[0]).read_bytes()
    return [*names, *sources.val.classes, str(sources.train.labels.tolist())]


def test_rank_0_alone_scans_a_folder(images: Path) -> None:
    first, second = run_ranks(list_names, 2, images, None)
    assert first == second
    assert len(first) > 10


def test_a_rank_without_the_folder_says_so(images: Path, tmp_path: Path) -> None:
    _, second = run_ranks(list_names, 2, images, tmp_path / "elsewhere")
    assert second == [
        f"The data path {tmp_path / 'elsewhere'} is not a folder; set data.path to one that holds train/ and val/."
    ]


def refuse_to_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_configuration_that_has_not_changed_is_not_written_again(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(images, tmp_path)
    (tmp_path / "summary.json").unlink(missing_ok=True)
    os.utime(tmp_path / "config.toml", (0, 0))
    monkeypatch.setattr(run, "write_whole", refuse_to_write)
    assert train(images, tmp_path, resume=True) == "finished"
    assert (tmp_path / "config.toml").stat().st_mtime > 0  # it tells when the run was last gone on with


def test_after_a_restart_a_configuration_that_cannot_be_written_is_a_warning(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(images, tmp_path)
    monkeypatch.setattr(run, "write_whole", refuse_to_write)
    with pytest.raises(SharedError, match=r"cannot be written \(No space left on device\)"):
        train(images, tmp_path, "train.duration=4st", resume=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    heard = listen(images, tmp_path, "train.duration=4st")
    assert any("cannot be written (No space left on device)" in text for text in texts(heard))
    assert [event.step for event in heard if isinstance(event, StepDone)] == [4]


def test_a_run_has_one_identity_from_its_beginning_on(images: Path, tmp_path: Path) -> None:
    train(images, tmp_path)
    identity = read_identity(tmp_path)
    assert identity
    train(images, tmp_path, "train.duration=4st", resume=True)
    assert read_identity(tmp_path) == identity
    (tmp_path / IDENTITY_FILE).unlink()  # as a run of an older version has none
    train(images, tmp_path, "train.duration=5st", resume=True)
    assert read_identity(tmp_path) not in ("", identity)
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / IDENTITY_FILE, tmp_path / "new")
    train(images, tmp_path / "new")
    assert read_identity(tmp_path / "new") != read_identity(tmp_path)


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_run_whose_folder_is_gone_ends_with_a_sentence_and_makes_no_new_one(
    images: Path, tmp_path: Path, how: str
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    class Mover(SilentSink):
        def emit(self, event: Event) -> None:
            if isinstance(event, StepDone) and event.step == 2:
                folder.rename(elsewhere)
                if how == "deleted":
                    shutil.rmtree(elsewhere)
                if how == "replaced":
                    shutil.copytree(elsewhere, folder)

    config = tiny_config(images, *SHORT)
    with pytest.raises(SharedError, match=f"^The run's folder {re.escape(str(folder))} was moved or deleted while"):
        run_rank(config, "tiny", folder, resume=False, membership=None, open_sink=lambda world, folder: Mover())
    assert folder.exists() == (how == "replaced")
    assert not list(folder.glob("checkpoints/step-*"))


def test_a_clock_that_is_set_back_changes_no_duration(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Event] = []

    class Ear(SilentSink):
        def emit(self, event: Event) -> None:
            heard.append(event)
            if isinstance(event, StepDone) and event.step == 1:
                monkeypatch.setattr(time, "time", lambda: 1e6)

    config = tiny_config(images, *SHORT)
    run_rank(config, "tiny", tmp_path, resume=False, membership=None, open_sink=lambda world, folder: Ear())
    (ended,) = (event for event in heard if isinstance(event, RunEnded))
    assert 0 < ended.startup_s < ended.wall_s < 600


def test_a_folder_of_other_things_is_refused_and_one_with_leftovers_is_not(tmp_path: Path) -> None:
    for name in ("images", "files", "fresh"):
        (tmp_path / name).mkdir()
    (tmp_path / "images" / "ant").mkdir()
    (tmp_path / "files" / "a.jpg").touch()
    for name, foreign in (("images", "ant"), ("files", "a.jpg")):
        with pytest.raises(LockstepError, match=f"{name} holds no run but other things, such as {foreign}; choose"):
            run.prepare_folder(tmp_path / name)
    (tmp_path / "fresh" / ".lock").touch()
    (tmp_path / "fresh" / "job.log").touch()
    (tmp_path / "fresh" / "checkpoints").mkdir()
    run.prepare_folder(tmp_path / "fresh")
    run.prepare_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("why", "rank", "expected"),
    [
        ("", 0, "lockstep: Rank 2 stopped answering and never sent buffer 2 of step 7; rank 0 stopped."),
        ("", 1, "lockstep: Rank 2 stopped answering and never sent buffer 2 of step 7; rank 1 stopped."),
        ("The disk is full.", 0, "lockstep: Rank 2 could not go on, and rank 0 stopped with it: The disk is full."),
        ("The disk is full.", 1, ""),  # rank 0 of its node says it
    ],
)
def test_a_gpus_rank_that_would_wait_for_ever_says_who_is_lost_and_why(
    why: str, rank: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    ended: list[int] = []
    monkeypatch.setattr(run, "say_last", said.append)
    monkeypatch.setattr(os, "_exit", ended.append)
    store = HashStore()
    pulse, lost = Pulse(store, rank, 3, keeper=None), Pulse(store, 2, 3, keeper=None)
    lost.fail(why)
    end_rank(replace(world_of_one(), rank=rank, local_rank=rank, size=3, pulse=pulse), Lost(2, True, 7, 1))
    for one in (pulse, lost):
        one.close()
    assert "".join(said) == expected
    assert ended == [1]
