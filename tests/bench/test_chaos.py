"""Faults are planned by a seed; runs that meet them lose nothing, and one that loses something is found out."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.bench import chaos
from lockstep.bench.chaos import Run, digest_weights, find_processes, find_rank, judge
from lockstep.bench.faults import DISKS, LAUNCHER, PHASES, SIGNALS, Fault, plan_faults
from lockstep.events import EpochDone, encode


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    assert plan_faults(50, 3, 2, with_disks=True) == plan_faults(50, 3, 2, with_disks=True)
    assert plan_faults(50, 3, 2, with_disks=True) != plan_faults(50, 4, 2, with_disks=True)


def test_many_faults_meet_every_kind_phase_and_victim() -> None:
    faults = plan_faults(400, 0, 3, with_disks=True)
    assert {fault.kind for fault in faults} == {*SIGNALS, *DISKS}
    assert {fault.phase for fault in faults} == set(PHASES)
    assert {fault.target for fault in faults} == {LAUNCHER, 0, 1, 2}
    assert not DISKS.keys() & {fault.kind for fault in plan_faults(400, 0, 3, with_disks=False)}


def test_seven_faults_in_a_row_meet_every_phase() -> None:
    assert {fault.phase for fault in plan_faults(7, 11, 2, with_disks=False)} == set(PHASES)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that met two faults, resumed to its end."""
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(chaos.HOLD)
    run = Run(1, folder, 2, folder / "cache")
    faults = [Fault(0, "SIGKILL", 1, "after a checkpoint", 0.05), Fault(1, "held interpreter", 0, "step", 0.0)]
    rows = chaos.torment(run, faults, folder)
    assert [row.came for row in rows] == [True, True]
    assert rows[0].ended
    assert rows[0].status not in (0, None)
    assert rows[0].recovery_s is not None
    assert not any(row.hung for row in rows)
    return run


def test_a_run_that_met_faults_ends_as_if_it_had_met_none(finished: Run, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    plain = Run(2, tmp_path, 2, tmp_path / "cache")
    assert plain.finish(plain.start(), 120) == 0, plain.output
    assert judge(finished, digest_weights(plain.folder)).problems == []
    assert find_processes(finished.marker) == []


def test_other_weights_lost_samples_and_leftovers_are_found_out(finished: Run, tmp_path: Path) -> None:
    damaged = Run(3, tmp_path, 2, tmp_path / "cache")
    shutil.copytree(finished.folder, damaged.folder)
    (damaged.folder / "core.123").touch()
    lost = EpochDone(epoch=9, ledger="00", ledger_ok=False, bad_samples=0)
    with (damaged.folder / "events.jsonl").open("a") as log:
        log.write(encode(lost) + "\n")
    damaged.output = "Traceback (most recent call last):"
    problems = " ".join(judge(damaged, "another digest").problems)
    for part in ("other weights", "lost or doubled", "traceback", "core.123"):
        assert part in problems


def test_a_rank_is_found_by_its_environment(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    run = Run(4, tmp_path, 2, tmp_path / "cache")
    part = run.start()
    fault = Fault(0, "SIGKILL", 1, "start-up", 0.0)
    assert chaos.wait_for_moment(run, part, fault)
    assert find_rank(run.marker, 1) not in (None, find_rank(run.marker, 0), part.process.pid)
    part.kill(run.marker)
    assert run.finish(part, 30) is not None
    assert chaos.wait_until_gone(run.marker) == []


def test_the_table_has_a_line_for_each_kind_and_one_for_all() -> None:
    row = chaos.Row(0, 1, "SIGKILL", "rank 0", "step", 5, True, True, 1, 0.5, 2.5, False)
    stream = io.StringIO()
    Console(width=120, file=stream).print(chaos.build_table([row, row]))
    text = stream.getvalue()
    assert "SIGKILL" in text
    assert "0.5 (0.5)" in text
    assert "all" in text
