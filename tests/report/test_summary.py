"""The summary of runs made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.events import Event, Notice
from lockstep.report.summary import summarize, write_summary
from tests.report.records import ended, epoch_done, evaluated, started, stepped

FINISHED: list[Event] = [
    started(1000),
    stepped(10, 1005),
    epoch_done(0, 1005, bad_samples=1),
    evaluated(10, 1007, top1=0.6),
    stepped(20, 1012),
    epoch_done(1, 1012, bad_samples=2),
    evaluated(20, 1014, top1=0.9),
    stepped(40, 1024),
    epoch_done(3, 1024, bad_samples=2),
    evaluated(40, 1026, top1=0.8),
    ended(40, 1027, wall_s=27.5),
]


def test_a_finished_run_in_numbers() -> None:
    summary = summarize(FINISHED)
    assert summary["status"] == "finished"
    assert (summary["steps"], summary["epochs"], summary["wall_s"]) == (40, 4.0, 27.5)
    assert (summary["T"], summary["S"], summary["N"], summary["e"]) == (64.0, 40.0, 2, 0.8)
    assert (summary["images_per_second"], summary["world_size"], summary["resumed"]) == (64.0, 2, 0)
    assert (summary["ledger"], summary["ledger_ok"], summary["bad_samples"]) == ("0003", True, 2)


def test_the_noise_scale_is_the_middle_of_all_that_were_measured_and_the_last() -> None:
    assert summarize(FINISHED)["noise_scale"] is None
    steps = [replace(stepped(step, 1000 + step), noise_scale=scale) for step, scale in ((1, 900.0), (2, None))]
    resumed = [started(1010, start_step=2), *(replace(stepped(n, 1010 + n), noise_scale=100.0 * n) for n in (3, 4))]
    assert summarize([started(1000), *steps, *resumed])["noise_scale"] == {"middle": 400.0, "last": 400.0}


def test_samples_left_out_of_validation_are_counted_too() -> None:
    events = [started(), epoch_done(0, 1005, bad_samples=2), replace(evaluated(10, 1007, top1=0.6), bad_samples=1)]
    summary = summarize(events)
    assert (summary["bad_samples"], summary["bad_validation_samples"]) == (3, 1)


def test_accuracy_is_the_last_evaluation_and_the_best_is_kept_beside_it() -> None:
    summary = summarize(FINISHED)
    assert (summary["top1"], summary["top5"]) == (0.8, 0.9)
    assert summary["best"] == {"step": 20, "top1": 0.9, "wall_s": 14.0}
    assert summary["time_to_accuracy"] == [
        {"step": 10, "top1": 0.6, "wall_s": 7.0},
        {"step": 20, "top1": 0.9, "wall_s": 14.0},
        {"step": 40, "top1": 0.8, "wall_s": 26.0},
    ]


def test_a_resumed_run_adds_up_time_and_counts_lost_work_once() -> None:
    # Killed 16 s into the first part, after an evaluation at step 20; goes on from the checkpoint at step 10.
    killed: list[Event] = [
        started(1000),
        evaluated(10, 1007, top1=0.6),
        epoch_done(0, 1007),
        evaluated(20, 1014, top1=0.95),
        epoch_done(1, 1014, ledger_ok=False),
        stepped(24, 1016),
        Notice(time_s=4999, level="info", text="Resuming at step 10."),
    ]
    resumed: list[Event] = [
        started(5000, start_step=10, world_size=4),
        evaluated(20, 5007, top1=0.7),
        epoch_done(1, 5007),
        ended(40, 5020, wall_s=21.0, world_size=4, images_per_second=128.0),
    ]
    summary = summarize(killed + resumed)
    assert [(point["step"], point["wall_s"]) for point in summary["time_to_accuracy"]] == [(10, 7.0), (20, 16.0 + 7.0)]
    assert summary["best"]["top1"] == 0.7
    assert (summary["wall_s"], summary["resumed"]) == (16.0 + 21.0, 1)
    assert (summary["T"], summary["N"]) == (128.0, 4)
    assert summary["ledger_ok"] is True


def test_a_run_without_an_end_is_unfinished_and_its_speeds_unknown() -> None:
    summary = summarize([started(1000), stepped(10, 1005), stepped(15, 1008)])
    assert (summary["status"], summary["steps"], summary["epochs"], summary["wall_s"]) == ("unfinished", 15, 1.5, 8.0)
    assert summary["top1"] is summary["best"] is summary["T"] is summary["e"] is summary["ledger"] is None


def test_a_log_without_a_run_is_refused() -> None:
    with pytest.raises(LockstepError, match=r"holds no run, .*; name a run's folder"):
        summarize([])


def test_a_summary_replaces_the_last_one_and_leaves_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_summary(path, summarize(FINISHED))
    assert json.loads(path.read_text()) == summarize(FINISHED)
    assert list(tmp_path.iterdir()) == [path]


def test_a_summary_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"^Cannot write the summary .*: No such file or directory\.$"):
        write_summary(tmp_path / "none" / "summary.json", {})
