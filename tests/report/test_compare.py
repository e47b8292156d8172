"""Runs beside each other, and benchmarks beside each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.report.compare import (
    compare_results,
    compare_rows,
    compare_settings,
    read_subjects,
    tabulate_rows,
)
from lockstep.report.page.compare_page import build_bench_comparison, build_run_comparison
from tests.engine import commands
from tests.report.made_run import make_run, write_run
from tests.report.records import ended, evaluated, started, stepped


def write_two(folder: Path) -> list[Path]:
    first = [started(), stepped(10, 1005), evaluated(10, 1006, 0.5), evaluated(20, 1012, 0.9), ended(20, 1013, 13.0)]
    config = {"train": {"eval_every": "1ep", "checkpoint_every": "1ep"}, "optim": {"lr": 2.0}}
    second = [started(config=config, world_size=4), stepped(10, 1004, step_s=0.4), evaluated(10, 1005, 0.8)]
    return [write_run(folder / "a", first), write_run(folder / "b", second)]


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    table = compare_settings(read_subjects(write_two(tmp_path)))  # type: ignore[arg-type]
    assert table is not None
    assert table.rows == [["train.checkpoint_every", "0st", "1ep"], ["ranks", "2", "4"], ["optim.lr", "–", "2.0"]]
    assert table.heads == ["setting", "a", "b"]
    same = read_subjects([tmp_path / "a", tmp_path / "a"])
    assert compare_settings(same) is None  # type: ignore[arg-type]


def test_results_are_those_of_the_summaries(tmp_path: Path) -> None:
    rows = {row[0]: row[1:] for row in compare_results(read_subjects(write_two(tmp_path))).rows}  # type: ignore[arg-type]
    assert rows["status"] == ["finished", "unfinished"]
    assert rows["top-1"] == ["90.0 %", "80.0 %"]
    assert rows["time to 80.0 %"] == ["0:12", "0:05"]
    assert rows["T, images/s"] == ["64.0", "–"]
    assert rows["ms a step, median"] == ["500.00", "400.00"]
    assert "energy, kJ" not in rows


def write_rows(path: Path, factor: float, **more: Any) -> Path:
    rows = [
        {
            "model": "resnet50",
            "batch": batch,
            "side": side,
            "setting": f"x{factor}",
            "median_s": factor * batch,
            "rounds": 8,
        }
        for batch in (32, 256)
        for side in ("lockstep", "ddp")
    ]
    path.write_text(json.dumps([row | more for row in rows]))
    return path


def test_rows_of_a_benchmark_are_matched_by_what_they_are(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / "a.json", 1.0), write_rows(tmp_path / "b.json", 0.5)]
    benchmarks: Any = read_subjects(files)
    assert compare_rows(benchmarks)[0] == ("resnet50, batch 32, lockstep", "median_s", [32.0, 16.0])
    assert tabulate_rows(benchmarks).rows[3][-3:] == ["256", "128", "0.500"]
    assert {row[1] for row in tabulate_rows(benchmarks).rows} == {"median_s"}  # both had as many rounds
    assert "bars-median-s" in build_bench_comparison(benchmarks)


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    runs, file = write_two(tmp_path), write_rows(tmp_path / "a.json", 1.0)
    other = write_rows(tmp_path / "other.json", 1.0, model="alexnet")
    for paths, words in (
        (runs[:1], "at least two"),
        ([*runs, file], "only one kind"),
        ([tmp_path / "none", *runs], "Cannot read"),
    ):
        with pytest.raises(LockstepError, match=words):
            read_subjects(paths)
    with pytest.raises(LockstepError, match="no row in common"):
        tabulate_rows(read_subjects([file, other]))  # type: ignore[arg-type]
    for content in ("{}", "[]", "[1]", "nonsense", "[" * 100_000):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(LockstepError, match=r"bad\.json"):
            read_subjects([file, tmp_path / "bad.json"])


def test_the_command_prints_tables_and_writes_the_page(tmp_path: Path) -> None:
    runs = write_two(tmp_path)
    status, out, err = commands.run("compare", *map(str, runs), "--out", str(tmp_path / "c.html"))
    assert status == 0, err
    assert "optim.lr" in out
    assert "90.0 %" in out
    assert (tmp_path / "c.html").stat().st_size > 1e6


def test_names_of_strangers_are_text(tmp_path: Path) -> None:
    names = ["<script>alert(1)<", '"><img src=x>']
    runs: Any = read_subjects([write_run(tmp_path / name, make_run(steps=100)) for name in names])
    page = build_run_comparison(runs)
    assert "<script>alert" not in page
    assert "<img" not in page
