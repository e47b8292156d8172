"""State in the memory of a node: taken when due, private, gone in the end; what a run goes on from."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from lockstep import api
from lockstep.data.order import Cursor, Ledger
from lockstep.engine import launch, snapshot
from lockstep.engine.build import Parts
from lockstep.engine.checkpoint import list_checkpoints
from lockstep.engine.identity import read_identity, write_identity
from lockstep.engine.owner import lock_folder
from lockstep.engine.resume import TakenUp, take_up
from lockstep.engine.snapshot import (
    Snapshots,
    clear_memory,
    find_memory,
    has_begun_here,
    is_private,
    make_private,
    sweep_memory,
)
from lockstep.engine.starting import start_anew
from lockstep.engine.state import State
from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.engine.saving import save_state
from tests.engine.test_state import ORDER, build_parts, collect, scramble
from tests.ranks import world_of_one

WORLD = world_of_one()
RUN, OTHER = "0" * 32, "1" * 32  # identities


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's shared memory, where ranks can be started again."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(snapshot, "MEMORY", folder)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    return folder


def open_snapshots(tmp_path: Path, share: float = 0.01, run: str = RUN) -> Snapshots:
    snapshots = Snapshots(tmp_path / "run", run, WORLD, share)
    snapshots.begin(0)
    return snapshots


def build_scrambled() -> Parts:
    parts = build_parts(WORLD)
    scramble(WORLD, parts)
    return parts


def state_at(step: int) -> State:
    return State(step, Cursor(0, 0), Ledger())


def take(snapshots: Snapshots, tmp_path: Path, step: int, parts: Parts | None = None) -> str:
    return snapshots.take(tmp_path / "disk", state_at(step), parts or build_scrambled(), WORLD, ORDER)


def go_on(snapshots: Snapshots, tmp_path: Path, parts: Parts, warnings: list[str] | None = None) -> TakenUp | None:
    said = warnings if warnings is not None else []
    return take_up(tmp_path / "disk", snapshots, parts, WORLD, ORDER, said.append)


def test_what_was_taken_is_what_a_new_rank_goes_on_from(tmp_path: Path) -> None:
    parts = build_scrambled()
    assert take(open_snapshots(tmp_path), tmp_path, 7, parts) == ""
    snapshots, fresh = Snapshots(tmp_path / "run", RUN, WORLD, 0.01), build_parts(WORLD)
    assert snapshots.find_newest() == 7
    taken_up = go_on(snapshots, tmp_path, fresh)
    assert taken_up is not None
    assert (taken_up.state.step, taken_up.where) == (7, "a snapshot in memory")
    mine, theirs = collect(fresh), collect(parts)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("disk", "where"), [(6, "a snapshot in memory"), (7, "the checkpoint"), (8, "the checkpoint")])
def test_the_newest_counts_and_the_disk_if_both_are(tmp_path: Path, disk: int, where: str) -> None:
    snapshots, parts = open_snapshots(tmp_path), build_scrambled()
    take(snapshots, tmp_path, 7)
    save_state(tmp_path / "disk", state_at(disk), parts, WORLD, ORDER, keep=2)
    taken_up = go_on(snapshots, tmp_path, parts)
    assert taken_up is not None
    assert (taken_up.state.step, taken_up.where) == (max(disk, 7), where)


def test_damaged_memory_is_passed_over(tmp_path: Path) -> None:
    snapshots, parts = open_snapshots(tmp_path), build_scrambled()
    take(snapshots, tmp_path, 9)
    save_state(tmp_path / "disk", state_at(4), parts, WORLD, ORDER, keep=2)
    (file,) = snapshots.folder.glob("step-*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    warnings: list[str] = []
    taken_up = go_on(snapshots, tmp_path, parts, warnings)
    assert taken_up is not None
    assert taken_up.state.step == 4
    assert any("does not match its hash" in text for text in warnings)


def test_memory_of_other_data_is_passed_over(tmp_path: Path) -> None:
    snapshots, parts = open_snapshots(tmp_path), build_scrambled()
    take(snapshots, tmp_path, 9)
    warnings: list[str] = []
    other = ORDER | {"seed": 6}
    assert take_up(tmp_path / "disk", snapshots, parts, WORLD, other, warnings.append) is None
    assert any("seed = 5" in text for text in warnings)


def test_nothing_anywhere_is_nothing(tmp_path: Path) -> None:
    assert go_on(open_snapshots(tmp_path), tmp_path, build_parts(WORLD)) is None


def test_only_the_newest_is_kept_also_when_steps_are_counted_anew(tmp_path: Path) -> None:
    snapshots = open_snapshots(tmp_path)
    for step in (3, 9, 5):
        take(snapshots, tmp_path, step)
    assert [path.name for path in snapshots.folder.iterdir()] == ["step-00000005"]


def test_they_take_no_more_than_their_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a save of 0.2 s and steps of 0.01 s, a share of a tenth is one in 200 steps."""
    now_s = 100.0
    monkeypatch.setattr(snapshot.time, "perf_counter", lambda: now_s)
    snapshots = open_snapshots(tmp_path, share=0.1)

    def save(*_: object, **__: object) -> None:
        nonlocal now_s
        now_s += 0.2

    monkeypatch.setattr(snapshot, "save_checkpoint", save)
    assert snapshots.is_due(1)
    now_s += 0.01
    take(snapshots, tmp_path, 1)
    assert not snapshots.is_due(200)
    assert snapshots.is_due(202)
    now_s += 2.0
    take(snapshots, tmp_path, 201)
    assert not snapshots.is_due(400)
    assert snapshots.is_due(402)


def test_none_are_taken_where_nobody_starts_ranks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert not open_snapshots(tmp_path).is_due(10**9)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    assert not open_snapshots(tmp_path).is_due(10**9)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert not open_snapshots(tmp_path, share=0.0).is_due(10**9)
    assert open_snapshots(tmp_path).is_due(1)


def test_memory_that_is_too_small_costs_the_snapshots_once_and_not_the_run(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "save_checkpoint", fail)
    snapshots = open_snapshots(tmp_path)
    assert "No space left on device" in take(snapshots, tmp_path, 1)
    assert take(snapshots, tmp_path, 2) == ""
    assert list(memory.iterdir()) == []


def test_what_another_run_in_a_folder_of_this_name_left_is_neither_taken_up_nor_removed(tmp_path: Path) -> None:
    old = open_snapshots(tmp_path)
    take(old, tmp_path, 7)
    new = open_snapshots(tmp_path, run=OTHER)
    assert go_on(new, tmp_path, build_scrambled()) is None
    new.clear()
    assert old.find_newest() == 7
    assert Snapshots(tmp_path / "copy", RUN, WORLD, 0.01).find_newest() == -1


def test_a_snapshot_whose_manifest_names_another_run_is_not_taken_up(tmp_path: Path) -> None:
    old, new = open_snapshots(tmp_path), open_snapshots(tmp_path, run=OTHER)
    take(old, tmp_path, 7)
    old.folder.rename(new.folder)
    assert new.find_newest() == -1


def test_a_run_without_an_identity_has_no_snapshots(tmp_path: Path, memory: Path) -> None:
    take(open_snapshots(tmp_path), tmp_path, 7)
    nameless = open_snapshots(tmp_path, run="")
    nameless.clear()
    assert (nameless.is_due(1), nameless.find_newest(), len(list(memory.iterdir()))) == (False, -1, 1)


def test_a_run_that_begins_anew_clears_what_it_left_itself(tmp_path: Path, memory: Path) -> None:
    take(open_snapshots(tmp_path), tmp_path, 7)
    assert list(memory.iterdir())
    open_snapshots(tmp_path)
    assert not list(memory.iterdir())


def test_ranks_that_start_again_know_that_their_run_had_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what a run before theirs has left, nor by a folder of another path."""
    started_s = time.time()
    monkeypatch.setattr(snapshot, "read_agent_start", lambda: started_s)
    snapshots = open_snapshots(tmp_path)
    take(snapshots, tmp_path, 7)
    assert not has_begun_here(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert has_begun_here(tmp_path / "run")
    assert not has_begun_here(tmp_path / "other")
    os.utime(snapshots.folder, (started_s - 60, started_s - 60))
    assert not has_begun_here(tmp_path / "run")


def test_a_folder_that_others_can_write_to_is_neither_used_nor_read(tmp_path: Path, memory: Path) -> None:
    snapshots = open_snapshots(tmp_path)
    take(snapshots, tmp_path, 7)
    snapshots.folder.chmod(0o770)
    assert snapshots.find_newest() == -1
    assert "others can write to it" in take(snapshots, tmp_path, 8)
    assert snapshots.folder.exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    link = find_memory(tmp_path / "other", RUN)
    link.symlink_to(elsewhere)
    assert not is_private(link)
    with pytest.raises(OSError, match="others can write to it"):
        make_private(link)
    clear_memory(link)
    assert elsewhere.exists()


def test_old_leftovers_are_swept_and_nothing_else(memory: Path, tmp_path: Path) -> None:
    old, young = find_memory(tmp_path / "a", RUN), find_memory(tmp_path / "b", RUN)
    foreign = memory / "lockstep-999999-abc"
    for folder in (old, young, foreign):
        folder.mkdir(mode=0o700)
    hours_ago = time.time() - 7200
    for folder in (old, foreign):
        os.utime(folder, (hours_ago, hours_ago))
    sweep_memory()
    assert sorted(memory.iterdir()) == sorted([young, foreign])


def test_nodes_on_one_machine_have_each_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = find_memory(tmp_path, RUN)
    monkeypatch.setenv("LOCKSTEP_NODE", "b")
    assert find_memory(tmp_path, RUN) != here


def test_a_lost_rank_costs_a_few_steps_and_not_all_since_the_last_checkpoint(images: Path, tmp_path: Path) -> None:
    """Real ranks, no checkpoint on disk before the end; the weights are those of a run that nobody disturbed."""
    more = ["train.duration=10ep", "train.checkpoint_every=0st", "train.snapshot_share=0.5"]
    settings = [f"--set={setting}" for setting in [*tiny_settings(images), *more]]
    plain, folder = tmp_path / "plain", tmp_path / "run"
    assert commands.run("train", "quickstart", "--ranks=2", f"--out={plain}", *settings)[0] == 0
    process = commands.start("train", "quickstart", "--ranks=2", "--restarts=5", f"--out={folder}", *settings)
    for step in (12, 30):
        commands.wait_for_step(folder, step, process)
        os.kill(commands.find_ranks(process, 2)["1" if step == 12 else "0"], signal.SIGKILL)
        commands.wait_until(lambda step=step: _count_starts(folder) == (2 if step == 12 else 3), process)  # type: ignore[misc]
    status, out, err = commands.finish(process)
    assert status == 0, err
    assert "Traceback" not in out + err
    assert out.count("wrote a snapshot in memory") == 2
    starts = [event["start_step"] for event in _read_log(folder) if event["kind"] == "RunStarted"]
    assert starts[1] >= 6
    assert starts[2] >= 24
    ledgers = [event for event in _read_log(folder) if event["kind"] == "EpochDone"]
    assert all(event["ledger_ok"] for event in ledgers)
    mine, theirs = commands.last_weights(folder), commands.last_weights(plain)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert not Path("/dev/shm", find_memory(folder, read_identity(folder)).name).exists()


def test_another_run_in_the_place_of_a_killed_one_goes_on_from_its_own_weights(images: Path, tmp_path: Path) -> None:
    """A snapshot that a killed launcher left is of the run that was there, not of the copy that is."""
    more = ["train.checkpoint_every=0st", "optim.warmup=0st"]
    settings = [f"--set={setting}" for setting in [*tiny_settings(images), *more]]
    other, folder = tmp_path / "other", tmp_path / "run"
    assert commands.run("train", "quickstart", f"--out={other}", *settings, "--set=train.duration=2st")[0] == 0
    often = "--set=train.snapshot_share=0.5"
    process = commands.start(
        "train",
        "quickstart",
        "--restarts=3",
        "--ranks=1",
        f"--out={folder}",
        *settings,
        often,
        "--set=train.duration=4000ep",
    )
    commands.wait_for_step(folder, 12, process)
    left = Path("/dev/shm", find_memory(folder, read_identity(folder)).name)
    commands.kill_all(process)
    try:
        assert list(left.glob("step-*"))
        shutil.rmtree(folder)
        shutil.copytree(other, folder)
        status, out, err = commands.run("train", str(folder), "--resume", "--set=train.duration=4st")
        assert status == 0, err
        assert "Going on from step 2 on 1 rank; 1 wrote the checkpoint." in " ".join(out.split())
        assert list(left.glob("step-*"))
    finally:
        shutil.rmtree(left, ignore_errors=True)


def test_a_snapshot_from_before_steps_were_counted_anew_is_not_taken_for_newer(images: Path, tmp_path: Path) -> None:
    """A killed launcher left it, and the run went on in larger batches without another."""
    folder, often = tmp_path / "run", "--set=train.snapshot_share=0.5"
    endless = [*tiny_settings(images), "train.duration=4000ep", "train.checkpoint_every=0st", "train.eval_every=0st"]
    settings = [f"--set={setting}" for setting in endless]
    process = commands.start("train", "quickstart", "--restarts=3", "--ranks=1", f"--out={folder}", *settings, often)
    commands.wait_for_step(folder, 100, process)  # far enough for the next part to stay behind
    left = Path("/dev/shm", find_memory(folder, read_identity(folder)).name)
    commands.kill_all(process)
    try:
        (old,) = left.glob("step-*")
        larger = ["--set=train.global_batch=56", "--set=train.checkpoint_every=1st"]
        process = commands.start("train", str(folder), "--resume", *larger)
        commands.wait_until(lambda: len(list_checkpoints(folder / "checkpoints")) > 1, process)
        commands.kill_all(process)
        (newest, *_) = list_checkpoints(folder / "checkpoints")
        assert newest.name < old.name
        step = int(newest.name.removeprefix("step-"))
        status, out, err = commands.run("train", str(folder), "--resume", f"--set=train.duration={step + 1}st")
        assert status == 0, err
        assert f"Going on from step {step} on 1 rank; 1 wrote the checkpoint." in " ".join(out.split())
    finally:
        shutil.rmtree(left, ignore_errors=True)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_launcher_whose_ranks_found_the_folder_taken_leaves_the_snapshots_of_whoever_has_it(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """Two were started at once, and neither saw the other's lock before its ranks had met."""
    folder = tmp_path / "run"
    file = lock_folder(folder)
    find_memory(folder, write_identity(folder)).mkdir(mode=0o700)
    if not is_taken:  # its own ranks have ended
        os.close(file)
    monkeypatch.setattr(launch, "launch_ranks", lambda *_: 1)
    start = start_anew("quickstart", [], folder)
    assert api._launch(None, api.Asked("quickstart", out=folder), start, (2, 2)) == 1
    assert len(list(memory.iterdir())) == is_taken
    if is_taken:
        os.close(file)


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_ranks_that_start_again_do_not_begin_anew_where_their_folder_is_gone(
    images: Path, tmp_path: Path, how: str
) -> None:
    settings = [*tiny_settings(images), "train.duration=4000ep", "train.checkpoint_every=0st", "train.eval_every=0st"]
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    process = commands.start(
        "train", "quickstart", "--ranks=1", "--restarts=3", f"--out={folder}", *[f"--set={one}" for one in settings]
    )
    commands.wait_for_step(folder, 5, process)
    left = Path("/dev/shm", find_memory(folder, read_identity(folder)).name)
    commands.wait_until(lambda: bool(list(left.glob("step-*"))), process)
    shutil.move(folder, elsewhere) if how == "moved" else shutil.rmtree(folder)
    os.kill(commands.find_ranks(process, 1)["0"], signal.SIGKILL)
    try:
        status, out, err = commands.finish(process)
        assert (status, "Traceback" in out + err, folder.exists()) == (1, False, False), err
        assert f"The run's folder {folder} was moved or deleted" in err
        assert list(left.glob("step-*"))  # which the run goes on from if its folder is put back
    finally:
        shutil.rmtree(left, ignore_errors=True)


def _count_starts(folder: Path) -> int:
    return sum(event["kind"] == "RunStarted" for event in _read_log(folder))


def _read_log(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]
