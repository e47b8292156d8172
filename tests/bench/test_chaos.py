"""Faults are planned by a seed; runs that meet them lose nothing, and one that loses something is found out."""

import io
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lockstep.bench.chaos import hook, strike, surroundings
from lockstep.bench.chaos.campaign import find_left_out, make_reference, open_place
from lockstep.bench.chaos.disk import Disk, open_disk
from lockstep.bench.chaos.faults import (
    FAULTS_A_RUN,
    KINDS,
    LAUNCHER,
    PHASES,
    TURNS,
    TWO_NODES,
    Fault,
    RunPlan,
    plan_runs,
)
from lockstep.bench.chaos.find import MARKER, find_processes, find_rank, find_ranks, wait_until_gone
from lockstep.bench.chaos.judge import Reference, judge
from lockstep.bench.chaos.reads import SlowFile, can_block
from lockstep.bench.chaos.report import Report, Row, UsefulTime, Verdict, describe, read_report, show
from lockstep.bench.chaos.runs import SETTINGS, Place, Run
from lockstep.bench.chaos.strike import Striker
from lockstep.bench.chaos.surroundings import Surroundings
from lockstep.bench.chaos.torment import torment, wait_for_moment
from lockstep.bench.chaos.useful import count_steps, measure_lost
from lockstep.cli import app
from lockstep.errors import LockstepError
from lockstep.events import EpochDone, Event, RunStarted, StepDone, encode
from tests.engine import commands

ROW = Row(1, "restarts", "SIGKILL", "rank 0", "step", 5, True, False, True, None, 0.5, 2.5, False)


def plan(count: int, seed: int, *left_out: str) -> list[RunPlan]:
    return list(islice(plan_runs(seed, 2, left_out), count))


def faults_of(plans: list[RunPlan]) -> list[Fault]:
    return [fault for plan in plans for fault in plan.faults]


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    assert plan(20, 3) == plan(20, 3)
    assert plan(20, 3) != plan(20, 4)


def test_many_faults_meet_every_kind_phase_victim_and_way() -> None:
    plans = plan(200, 0)
    faults = faults_of(plans)
    assert {fault.kind for fault in faults} == {kind for kinds in KINDS.values() for kind in kinds}
    assert {fault.phase for fault in faults} == set(PHASES)
    assert {fault.target for fault in faults} == {LAUNCHER, 0, 1}
    assert {plan.way for plan in plans} == set(TURNS)
    for one in plans:
        assert {fault.kind for fault in one.faults} <= KINDS[one.way].keys()


def test_what_cannot_be_done_here_is_left_out() -> None:
    plans = plan(200, 0, *TWO_NODES, "slow disk", "blocked read")
    assert {fault.kind for fault in faults_of(plans)} == KINDS["resume"].keys() - {"slow disk", "blocked read"}
    assert {plan.way for plan in plans} == {"resume", "restarts"}


def test_a_few_runs_meet_every_phase_and_teardown_comes_last_in_a_run() -> None:
    plans = plan(2, 11)
    assert len(faults_of(plans)) == FAULTS_A_RUN["resume"] + FAULTS_A_RUN["restarts"]
    assert {fault.phase for fault in faults_of(plans)} == set(PHASES)
    for one in plan(100, 12):
        last = [fault.phase == "teardown" for fault in one.faults]
        assert last == sorted(last)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with open_place() as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(place: Place) -> Reference:
    return make_reference(place, 2, "resume", SETTINGS)


@pytest.fixture(scope="module")
def finished(place: Place) -> Iterator[tuple[Run, list[Row], Surroundings]]:
    """A run that met a fault of every kind that this user can have on one machine and that takes little time."""
    left_out = find_left_out(place, 2)
    faults = [
        Fault("slow disk", 0, "first steps", 0.0),
        Fault("late read", 0, "step", 0.0, 0.7),
        Fault("SIGKILL", 1, "after a checkpoint", 0.05),
        Fault("blocked read", 0, "step", 0.0, 0.3),
    ]
    before = Surroundings()
    with Run(1, place, 2, "restarts") as run:
        rows = torment(run, [fault for fault in faults if fault.kind not in left_out])
        yield run, rows, before


def test_faults_come_and_are_survived_healed_or_end_a_part(finished: tuple[Run, list[Row], Surroundings]) -> None:
    _, rows, _ = finished
    assert all(row.came for row in rows)
    assert not any(row.hung for row in rows)
    by_kind = {row.kind: row for row in rows}
    killed = by_kind["SIGKILL"]
    assert killed.healed
    assert not killed.ended
    assert killed.detection_s is not None
    assert killed.recovery_s is not None
    assert killed.detection_s < killed.recovery_s
    assert not any(row.ended for row in rows)
    if "blocked read" in by_kind:
        detection = by_kind["blocked read"].detection_s
        assert detection is not None
        assert detection > 1


def test_a_run_that_met_faults_ends_as_if_it_had_met_none(
    finished: tuple[Run, list[Row], Surroundings], reference: Reference
) -> None:
    run, rows, before = finished
    assert judge(run, reference, before, rows).problems == []
    assert find_processes(run.marker) == []


def test_other_weights_lost_samples_and_leftovers_are_found_out(
    finished: tuple[Run, list[Row], Surroundings], reference: Reference, tmp_path: Path
) -> None:
    (tmp_path / "beside").mkdir()
    damaged = Run(3, Place(Disk(tmp_path), tmp_path / "beside"), 2, "resume")
    shutil.copytree(finished[0].folder, damaged.folder)
    (damaged.folder / "core.123").touch()
    (damaged.folder / "checkpoints" / ".aside-x").touch()
    (damaged.temporary / "scratch").touch()
    lost = EpochDone(epoch=2, ledger="00", ledger_ok=True, bad_samples=0)
    with (damaged.folder / "events.jsonl").open("a") as log:
        log.write(encode(lost) + "\n")
    (damaged.place.beside / "output-3").write_text("Traceback (most recent call last):\n")
    damaged.problems.append("was seen to falter")
    damaged.num_hung = 1
    stay = [sys.executable, "-c", "import time; time.sleep(60)"]
    left = subprocess.Popen(stay, env=os.environ | {MARKER: damaged.marker})
    try:
        expected = replace(reference, weights="others", ledgers=reference.ledgers | {9: "0"})
        problems = " ".join(judge(damaged, expected, Surroundings(), []).problems)
    finally:
        left.kill()
        left.wait()
    parts = ["other weights", "lost or doubled", "certify epochs [9]", "Traceback", "core.123", ".aside-x", "scratch"]
    for part in [*parts, "falter", "hung 1", "1 processes"]:
        assert part in problems


def test_shared_memory_namespaces_and_mounts_left_behind_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shm", "netns"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(surroundings, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(surroundings, "NAMESPACES", tmp_path / "netns")
    (tmp_path / "shm" / "lockstep-old").touch()
    before = Surroundings()
    (tmp_path / "shm" / "lockstep-snapshot").touch()
    (tmp_path / "netns" / f"lockstep-{os.getpid()}-7-0-node0").touch()
    (tmp_path / "netns" / "lockstep-1-7-0-node0").touch()
    mine = f"namespace lockstep-{os.getpid()}-7-0-node0"
    assert before.list_new() == [mine]  # the memory is perhaps somebody else's
    monkeypatch.setattr(surroundings, "read_mounts", lambda: ["tmpfs /somewhere tmpfs rw 0 0"])
    alone = replace(before, is_ours=True).list_new()
    assert alone == ["mount /somewhere", mine, "shared memory lockstep-snapshot"]


def test_a_rank_is_found_by_its_environment(place: Place) -> None:
    with Run(4, place, 2, "resume") as run:
        part = run.start()
        assert wait_for_moment(run, part, Fault("SIGKILL", 1, "start-up", 0.0))
        assert find_rank(run.marker, 1) not in (None, find_rank(run.marker, 0), part.launcher)
        part.kill(run.marker)
        assert run.finish(part, 30) is not None
        assert wait_until_gone(run.marker) == []
        run.remove()


def test_an_interrupt_in_start_up_waits_until_lockstep_can_answer_it(tmp_path: Path) -> None:
    """Python's own start is made so long here that whatever does not wait would strike amid it."""
    (tmp_path / "beside").mkdir()
    place = Place(Disk(tmp_path), tmp_path / "beside")
    start = place.site / "sitecustomize.py"
    start.write_text("import time; time.sleep(1)\n" + start.read_text())
    with Run(5, place, 2, "resume") as run:
        for kind in ("SIGINT", "SIGINT twice"):  # the second part must not find the word of the first
            fault = Fault(kind, LAUNCHER, "start-up", 0.0)
            part = run.start()
            assert not run.has_taken_over()
            assert wait_for_moment(run, part, fault)
            assert run.has_taken_over()
            assert Striker(run).strike(fault, part)
            assert run.finish(part, 30) == 130
        assert not any(word in run.output for word in ("Traceback", "Fatal")), run.output

        part = run.start()
        assert wait_for_moment(run, part, Fault("SIGKILL", LAUNCHER, "start-up", 0.0))
        assert not run.has_taken_over(), "other faults strike at once"
        part.kill(run.marker)
        run.remove()


STUCK = (
    "import os; from lockstep.engine.run import watch_signals\n"
    "with watch_signals():\n"
    "    print('reading', flush=True)\n"
    "    os.read(os.pipe()[0], 1)\n"
)


def test_an_interrupt_that_comes_twice_is_not_taken_for_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"reading\n"
    strike.send_signals(Fault("SIGINT twice", 0, "step", 0.0), process.pid)
    try:
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"stopped at once" in err


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint"])
def test_a_fault_meets_an_evaluation_and_a_checkpoint_while_they_run(phase: str, place: Place) -> None:
    """What is struck in one has not said that it is done."""
    record = {"evaluation": "Evaluated", "checkpoint": "CheckpointSaved"}[phase]
    with Run(6, place, 2, "resume") as run:
        part = run.start()
        fault = Fault("SIGKILL", 0, phase, 0.2)
        assert wait_for_moment(run, part, fault)
        assert Striker(run).strike(fault, part)
        assert run.finish(part, 30) not in (0, None)
        assert run.has_said("StepDone", 0)
        assert not run.has_said(record, 0)
        assert bool(list((run.folder / "checkpoints").glob(".aside-*"))) == (phase == "checkpoint")
        run.remove()


FORKED = """
import os, sys, time
if os.fork() == 0:
    time.sleep(0.2)
    os.environ["RANK"] = "1"
    open("/proc/self/comm", "w").write("lockstep:1")
    last = time.monotonic()
    while time.monotonic() - last < 0.5:
        last = time.monotonic()
        time.sleep(0.01)
    print("held", flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_rank_is_found_by_its_name_and_can_be_held(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(hook.TEXT)
    variables = {MARKER: "forked", hook.FOLDER: str(tmp_path), "PYTHONPATH": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", FORKED], env=os.environ | variables, stdout=subprocess.PIPE)
    end = time.monotonic() + 60
    while not (found := find_ranks("forked")) and time.monotonic() < end:
        time.sleep(0.02)
    assert found.keys() == {1}
    assert found[1] != parent.pid
    (tmp_path / "1").write_text("1000000")
    out, _ = parent.communicate(timeout=60)
    assert out == b"held\n"


def test_a_disk_fills_breaks_and_slows_down(tmp_path: Path) -> None:
    with open_disk(tmp_path) as disk:
        if disk.left_out:
            pytest.skip("this user may not mount such a disk")
        disk.fill()
        with pytest.raises(OSError, match="No space"):
            (disk.folder / "file").write_bytes(bytes(10000))
        disk.empty()
        with (disk.folder / "log").open("ab", buffering=0) as log:  # as a run has it open
            log.write(b"before")
            os.fsync(log.fileno())
            disk.spoil()
            with pytest.raises(OSError, match="Read-only"):
                log.write(b"after")
        disk.renew()
        assert (disk.folder / "log").read_bytes() == b"before"
        code = "import sys, time; t = time.time(); open(sys.argv[1], 'w').write('x'); print(time.time() - t)"
        loop = f'for i in 1 2 3; do {sys.executable} -c "{code}" {disk.folder}/slow; done'
        writer = subprocess.Popen(["sh", "-c", loop], stdout=subprocess.PIPE, text=True)
        disk.slow_down(1.0)
        assert max(map(float, writer.communicate(timeout=60)[0].split())) > 0.02
    assert not disk.folder.is_mount()


def test_a_slow_file_keeps_its_readers_waiting_and_lets_killed_ones_go(tmp_path: Path) -> None:
    if not can_block(tmp_path):
        pytest.skip("this user has no FUSE")
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(300_000))
    slow = SlowFile(path, 0.3)
    start = time.monotonic()
    assert subprocess.run(["cat", path], capture_output=True, check=True).stdout == path.read_bytes()
    assert time.monotonic() - start >= 0.3
    slow.close()
    slow = SlowFile(path, None)
    reader, killed = (subprocess.Popen(["cat", path], stdout=subprocess.PIPE) for _ in range(2))
    while slow.num_reads < 2:
        time.sleep(0.01)
    killed.kill()
    killed.communicate(timeout=60)
    assert reader.poll() is None
    slow.close()
    assert reader.communicate(timeout=60)[0] == path.read_bytes()
    assert not path.is_mount()


def print_reports(*reports: Report) -> tuple[bool, str]:
    stream = io.StringIO()
    is_clean = show(reports, Console(width=120, file=stream))
    return is_clean, stream.getvalue()


def test_the_table_tells_ways_kinds_and_dead_ranks_apart() -> None:
    other = replace(ROW, way="resume", victim="launcher", healed=False, ended=True)
    is_clean, text = print_reports(Report(7, 2, "abc", rows=[ROW, ROW, other], verdicts=[Verdict(1)]))
    assert is_clean
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines if "dead rank" in line] == [["a", "dead"]]
    assert sum("SIGKILL" in line for line in lines) == 2
    assert "0.5, 0.5" in text
    assert "seed 7, 2 ranks, commit abc: 3 faults" in text


def test_percentiles_are_the_median_and_nearly_the_largest() -> None:
    assert describe([None, *map(float, range(1, 1001))]) == "500.5, 990.0"
    assert describe([None]) == ""


def test_files_of_several_parts_make_one_table(tmp_path: Path) -> None:
    useful = UsefulTime(15, 120, 8, 1000, 0.05, 0.42)
    whole, part = Report(1, 2, "abc", rows=[ROW], verdicts=[Verdict(1)]), Report(2, 2, "abc", useful=[useful])
    part.verdicts = [Verdict(3, ["run 3 lost its way"])]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for report, file in zip((whole, part), files, strict=True):
        report.write(file)
        assert read_report(file) == report
    done = CliRunner().invoke(app, ["bench", "chaos", "--merge", *map(str, files)])
    assert done.exit_code == 1
    for words in ("all: 1 faults, 0 hangs, 1 problems", "problem, seed 2: run 3 lost its way", "42.0%"):
        assert words in done.output
    assert CliRunner().invoke(app, ["bench", "chaos", "--merge", str(files[0])]).exit_code == 0


@pytest.mark.parametrize("text", ["", "[]", '{"seed": 1}', '{"seed": 1, "num_ranks": 2, "commit": "", "rows": [1]}'])
def test_a_file_that_no_part_wrote_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "part.json").write_text(text)
    with pytest.raises(LockstepError, match="was not written by"):
        read_report(tmp_path / "part.json")


def step(at: float, number: int, seconds: float = 1.0) -> Event:
    values = dict.fromkeys(("epoch", "loss", "top1", "lr", "images_per_second", "input_s"), 0.0)
    return StepDone(time_s=at, step=number, step_s=seconds, compute_s=0.0, comm_s=0.0, **values)


def test_steps_that_were_taken_twice_count_once() -> None:
    undisturbed = [step(number, number + 1) for number in range(10)]
    later = [step(11, 12), step(12, 13), step(15, 12), step(16, 13), step(17, 14), step(99, 50)]
    assert count_steps([*undisturbed, *later], 10.0, 20.0) == 4


def test_time_is_lost_from_a_fault_until_the_run_is_as_far_again() -> None:
    """A second a step. Killed at 12, on its feet at 14.5, at step 13 again at 16.5: the next one is of use."""
    begun = {item.name: None for item in fields(RunStarted)} | {"start_step": 11}
    again = RunStarted(**begun | {"time_s": 14.5})  # type: ignore[arg-type]
    undisturbed = [RunStarted(**begun | {"time_s": 0.0}), *(step(number, number + 1) for number in range(13))]  # type: ignore[arg-type]
    later = [again, step(15.5, 12), step(16.5, 13), step(17.5, 14), step(18.5, 15)]
    assert measure_lost([*undisturbed, *later], 10.0, 20.0) == pytest.approx(4.5)
    assert measure_lost(undisturbed, 10.0, 20.0) == 0
    assert measure_lost([*undisturbed, again, step(15.5, 12)], 10.0, 20.0) == pytest.approx(8.0), "never as far again"
    assert measure_lost([*undisturbed, *later], 18.0, 20.0) == 0


def test_a_campaign_that_is_asked_to_end_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "bench", "chaos", "--faults=5"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    commands.wait_until(lambda: bool(list(tmp_path.glob("lockstep-chaos-*/*"))), process)
    process.terminate()
    assert process.communicate(timeout=60)[1] == "lockstep: interrupted.\n"
    assert list(tmp_path.glob("lockstep-chaos-*")) == []
