"""Killed and resumed, a run ends as if nothing had happened."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.comm.world import World
from lockstep.engine.build import build_parts, open_sources
from lockstep.engine.checkpoint import list_checkpoints
from lockstep.engine.trainer import StopRequest, Trainer
from lockstep.events import EpochDone, Event, Notice, RunEnded, RunStarted, StepDone
from lockstep.report.run import SilentSink
from tests.engine import commands
from tests.engine.conftest import tiny_config, tiny_settings
from tests.ranks import Backend, over_nccl, run_ranks

# A GPU takes these small steps so quickly that a run must be longer to be met alive. Kernels are pinned: which of them
# is the quicker is measured at every start, and on another kind the weights round differently.
ON_A_GPU = ["train.duration=12ep", "data.decoder=cpu", "train.own_kernels=off", "train.cuda_graph=off"]
NUM_STEPS = {"gloo": 20, "nccl": 60}  # epochs have 5 steps


def settings(images: Path, *more: str, backend: Backend = "gloo") -> list[str]:
    wanted = [*tiny_settings(images), "train.duration=4ep", *(ON_A_GPU if backend == "nccl" else ()), *more]
    return [f"--set={setting}" for setting in wanted]


@pytest.fixture(scope="module", params=["gloo"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Gloo, unless a test asks for NCCL as well."""
    name: Backend = request.param
    return name


both_backends = pytest.mark.parametrize("backend", ["gloo", over_nccl()], indirect=True)


@pytest.fixture(scope="module")
def untouched(images: Path, backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that nobody interrupts."""
    folder = tmp_path_factory.mktemp("runs") / "untouched"
    wanted = settings(images, backend=backend)
    status, _, err = commands.finish(
        commands.start_ranks(backend, 2, "train", "quickstart", f"--out={folder}", *wanted)
    )
    assert status == 0, err
    return folder


def ledgers(folder: Path) -> dict[int, tuple[str, bool]]:
    return {e.epoch: (e.ledger, e.ledger_ok) for e in commands.events(folder) if isinstance(e, EpochDone)}


@both_backends
def test_killed_in_mid_epoch_and_resumed_the_weights_are_bit_identical(
    images: Path, untouched: Path, backend: Backend, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    wanted = settings(images, backend=backend)
    process = commands.start_ranks(backend, 2, "train", "quickstart", f"--out={folder}", *wanted)
    commands.wait_for_checkpoint(folder, 6, process)  # epochs have 5 steps, checkpoints come every 3
    commands.kill_all(process)
    assert not (folder / "summary.json").exists()
    status, out, err = commands.finish(commands.start_ranks(backend, 2, "train", str(folder), "--resume"))
    assert status == 0, err
    starts = [event for event in commands.events(folder) if isinstance(event, RunStarted)]
    assert starts[0].start_step == 0
    assert starts[1].start_step % 3 == 0
    assert 6 <= starts[1].start_step < NUM_STEPS[backend]
    check_weights(commands.last_weights(folder), commands.last_weights(untouched), backend)
    assert ledgers(folder) == ledgers(untouched)
    assert "Going on from step" in out


def check_weights(found: dict[str, Tensor], expected: dict[str, Tensor], backend: Backend) -> None:
    """Bit-identical; on a GPU nearly so, where cuDNN adds in an order that changes from run to run."""
    assert expected.keys() == found.keys()
    if backend == "gloo":
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        return
    names = [name for name in expected if name.endswith("weight")]
    whole, other = (torch.cat([arrays[name].flatten() for name in names]) for arrays in (expected, found))
    assert torch.linalg.norm(other - whole) <= 0.02 * torch.linalg.norm(whole)


@both_backends
def test_resumed_on_other_rank_counts_it_sees_exactly_the_remaining_samples(
    images: Path, untouched: Path, backend: Backend, tmp_path: Path
) -> None:
    folder = tmp_path / "moved"
    *earlier, last = [2, 3, 1] if backend == "gloo" else [2, 4]
    arguments = ["train", "quickstart", f"--out={folder}", *settings(images, backend=backend)]
    for count, step in zip(earlier, (4, 11), strict=False):
        process = commands.start_ranks(backend, count, *arguments)
        commands.wait_for_step(folder, step, process)
        commands.kill_all(process)
        arguments = ["train", str(folder), "--resume"]
    status, _, err = commands.finish(commands.start_ranks(backend, last, *arguments))
    assert status == 0, err
    # The ledger hashes every (epoch, sample): equal ledgers mean each epoch saw each sample exactly once.
    assert ledgers(folder) == ledgers(untouched)
    assert all(is_whole for _, is_whole in ledgers(folder).values())
    starts = [event.world_size for event in commands.events(folder) if isinstance(event, RunStarted)]
    assert starts == [*earlier, last]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_writes_a_checkpoint_and_then_exits(
    images: Path, untouched: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "stopped"
    never = "train.checkpoint_every=0st"
    process = commands.start("train", "quickstart", "--ranks=2", f"--out={folder}", *settings(images, never))
    commands.wait_for_step(folder, 2, process)
    ranks = commands.list_children(process.pid)
    process.send_signal(number)
    status, out, err = commands.finish(process)
    assert status == 128 + number
    assert err == ""  # torch's elastic agent has nothing to add
    assert "interrupted" in out
    assert f"go on with         lockstep train {folder} --resume --ranks 2\n" in out
    ended = commands.events(folder)[-1]
    assert isinstance(ended, RunEnded)
    assert ended.status == "interrupted"
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    status, _, err = commands.run("train", str(folder), "--resume", "--ranks=2")
    assert status == 0, err
    check_weights(commands.last_weights(folder), commands.last_weights(untouched), "gloo")


def checkpoint_arrays(folder: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, each rank's own statistics among them."""
    files = sorted((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    assert [file.stem for file in files] == ["model", "optimizer", "statistics"]
    return {f"{file.stem} {name}": value for file in files for name, value in load_file(file).items()}


class Stopped(Exception):
    """A rank that ends like a killed one: at once, and without a word."""


def train_and_stop(world: World, images: Path, folder: Path, stop_at: int, how: str) -> str:
    """Train to step 13, or until asked to stop or cut off after step `stop_at`."""
    config = tiny_config(images, "train.duration=13st", "optim.warmup=0st", "train.keep_checkpoints=99")
    sources = open_sources(config.data)
    stop = StopRequest()

    class Watch(SilentSink):
        def emit(self, event: Event) -> None:
            if isinstance(event, StepDone) and event.step == stop_at - (how == "asked"):
                if how == "killed":
                    raise Stopped
                stop.signal = signal.SIGINT  # noted by the next step

    parts = build_parts(config, world, sources)
    trainer = Trainer(config, "tiny", world, sources, parts, folder, Watch(), stop)
    if list_checkpoints(folder / "checkpoints"):
        trainer.resume()
    try:
        return trainer.run()
    except Stopped:
        return "killed"
    finally:
        assert parts.hybrid is not None
        parts.hybrid.close()


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(train_and_stop, 2, images, folder, 0, "") == ["finished"] * 2
    return folder


@pytest.mark.parametrize("stop_at", [4, 7])  # where no checkpoint is due; evaluations come after 5 and 10
@pytest.mark.parametrize("how", ["asked", "killed"])
def test_every_later_checkpoint_is_bit_identical_however_the_run_was_ended(
    images: Path, whole: Path, tmp_path: Path, how: str, stop_at: int
) -> None:
    first = run_ranks(train_and_stop, 2, images, tmp_path / "broken", stop_at, how)
    assert first == [{"asked": "interrupted", "killed": "killed"}[how]] * 2
    assert (tmp_path / "broken" / "checkpoints" / f"step-{stop_at:08d}").exists() == (how == "asked")
    assert run_ranks(train_and_stop, 2, images, tmp_path / "broken", 0, "") == ["finished"] * 2
    for step in (3, 6, 9, 12, 13):
        expected, found = (checkpoint_arrays(folder, step) for folder in (whole, tmp_path / "broken"))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected), step


def resume_and_read_pulse(world: World, images: Path, folder: Path) -> tuple[int, int]:
    """What the pulse tells of this rank after 4 steps and, resumed, 9 more."""
    for stop_at, how in ((4, "asked"), (0, "")):
        train_and_stop(world, images, folder, stop_at, how)
    assert world.pulse is not None
    return world.pulse._progress


def test_a_resumed_rank_is_known_by_the_number_of_the_runs_own_step(images: Path, tmp_path: Path) -> None:
    """It is what the sentence on a lost rank names."""
    assert run_ranks(resume_and_read_pulse, 2, images, tmp_path / "run") == [(14, 0)] * 2


def test_a_killed_rank_ends_the_others_with_a_sentence(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    process = commands.start(
        "train", "quickstart", "--ranks=3", f"--out={folder}", *settings(images, "train.duration=400ep")
    )
    commands.wait_for_step(folder, 2, process)
    ranks = commands.list_children(process.pid)
    victim = ranks[1]
    name = commands.read_rank(victim)
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    status, out, err = commands.finish(process)
    assert time.monotonic() - start < 30
    assert status == 1
    assert f"Rank {name} was killed by SIGKILL" in err
    survivors = [line for line in err.splitlines() if f"Rank {name} stopped answering and never sent buffer" in line]
    assert 1 <= len(survivors) <= 2, err  # the launcher gives the slower one no more than a moment
    assert "Traceback" not in out + err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_stopped_rank_ends_the_run_once_the_time_is_up_and_is_named(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    process = commands.start(
        "train",
        "quickstart",
        "--ranks=3",
        f"--out={folder}",
        *settings(images, "train.duration=4000ep", "comm.timeout_s=10"),
    )
    commands.wait_for_step(folder, 2, process)
    ranks = commands.list_children(process.pid)
    name = commands.read_rank(ranks[1])
    os.kill(ranks[1], signal.SIGSTOP)
    status, out, err = commands.finish(process, timeout_s=180)  # it has no other end
    assert status == 1
    assert f"Rank {name} stopped answering and never sent buffer" in err
    assert "Traceback" not in out + err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.fixture
def endless(images: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run of two NCCL ranks under way in `tmp_path / "run"`, that ends only when it is made to."""
    wanted = settings(images, "train.duration=4000ep", "train.checkpoint_every=0st", backend="nccl")
    process = commands.start_on_one_gpu(2, "train", "quickstart", f"--out={tmp_path / 'run'}", *wanted)
    commands.wait_for_step(tmp_path / "run", 2, process)
    yield process
    if process.poll() is None:
        commands.kill_all(process)


@pytest.mark.gpu
def test_over_nccl_a_killed_rank_ends_the_others(endless: "subprocess.Popen[str]", tmp_path: Path) -> None:
    ranks = commands.list_children(endless.pid)
    os.kill(ranks[1], signal.SIGKILL)
    status, _, _ = commands.finish(endless, timeout_s=60)  # the survivor waits in NCCL: who ends it is left open
    assert status == 1
    ends = [event.status for event in commands.events(tmp_path / "run") if isinstance(event, RunEnded)]
    assert ends in ([], ["failed"])
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.gpu
def test_over_nccl_a_signal_to_one_rank_stops_all_at_one_step_with_a_checkpoint(
    endless: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    ranks = commands.list_children(endless.pid)
    os.kill(next(pid for pid in ranks if commands.read_rank(pid) == "1"), signal.SIGTERM)
    _, out, err = commands.finish(endless, timeout_s=60)
    ended = commands.events(tmp_path / "run")[-1]
    assert isinstance(ended, RunEnded), out + err
    assert ended.status == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / f"step-{ended.step:08d}" / "manifest.json").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(images: Path, untouched: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    process = commands.start("train", "quickstart", "--ranks=1", f"--out={folder}", *settings(images))
    commands.wait_for_step(folder, 10, process)
    commands.kill_all(process)
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1] / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(content)
    status, _, err = commands.run("train", str(folder), "--resume", "--ranks=1")
    assert status == 0, err
    notices = [event.text for event in commands.events(folder) if isinstance(event, Notice)]
    assert any("is damaged (model.safetensors does not match its hash)" in text for text in notices)
    assert ledgers(folder) == ledgers(untouched)
