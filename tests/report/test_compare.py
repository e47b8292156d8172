"""Runs beside each other."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.report.compare import tell_changes
from lockstep.report.compare_runs import Run, compare_results, compare_settings, list_status, split_changes
from lockstep.report.compare_subjects import read_subjects
from lockstep.report.page.compare_page import build_run_comparison
from tests.engine import commands
from tests.report.made_run import make_run, write_run
from tests.report.made_sweep import write_sweep
from tests.report.records import ended, evaluated, started, stepped


def write_two(folder: Path) -> list[Path]:
    first = [started(), stepped(10, 1005), evaluated(10, 1006, 0.5), evaluated(20, 1012, 0.9), ended(20, 1013, 13.0)]
    config = {"train": {"eval_every": "1ep", "checkpoint_every": "1ep"}, "optim": {"lr": 2.0}}
    second = [started(config=config, world_size=4), stepped(10, 1004, step_s=0.4), evaluated(10, 1005, 0.8)]
    return [write_run(folder / "a", first), write_run(folder / "b", second)]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    return [one for one in read_subjects(paths) if isinstance(one, Run)]


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    table = compare_settings(read_runs(write_two(tmp_path)))
    assert table is not None
    assert table.rows == [["train.checkpoint_every", "0st", "1ep"], ["ranks", "2", "4"], ["optim.lr", "–", "2.0"]]
    assert table.heads == ["setting", "a", "b"]
    assert compare_settings(read_runs([tmp_path / "a", tmp_path / "a"])) is None


def test_results_are_those_of_the_summaries(tmp_path: Path) -> None:
    runs = read_runs(write_two(tmp_path))
    rows = {row[0]: row[1:3] for row in compare_results(runs).rows}
    assert list_status(runs) == ["finished", "unfinished"]
    assert rows["top-1"] == ["90.0 %", "80.0 %"]
    assert rows["time to 80.0 %"] == ["12.0 s", "5.0 s"]
    assert rows["T, images/s"] == ["64.0", "–"]
    assert rows["ms a step, median"] == ["500.00", "400.00"]
    assert "energy, kJ" not in rows


def test_what_a_run_without_a_right_answer_reached_is_no_goal(tmp_path: Path) -> None:
    none_right = [started(run="diverged"), evaluated(10, 1003.0, 0.0)]
    runs = read_runs([*write_two(tmp_path), write_run(tmp_path / "diverged", none_right)])
    rows = {row[0]: row[1:4] for row in compare_results(runs).rows}
    assert rows["best top-1"][2] == "0.0 %"
    assert rows["time to 80.0 %"] == ["12.0 s", "5.0 s", "–"]


def test_a_second_run_is_told_by_how_far_it_is_from_the_first(tmp_path: Path) -> None:
    table = compare_results(read_runs(write_two(tmp_path)))
    rows = {row[0]: row[-1] for row in table.rows}
    assert table.heads[-1] == "difference"
    assert rows["top-1"] == "-10.00 points"
    assert rows["ms a step, median"] == "0.800 ×"  # 400 of 500
    assert rows["time to 80.0 %"] == "0.417 ×"  # 5 s of 12 s
    assert rows["T, images/s"] == "–"  # the second has not ended


def test_more_runs_are_each_compared_with_the_first(tmp_path: Path) -> None:
    first, second = write_two(tmp_path)
    table = compare_results(read_runs([first, second, first]))
    names = table.heads[1:4]
    assert table.heads[4:] == [f"{names[1]} against {names[0]}", f"{names[2]} against {names[0]}"]
    rows = {row[0]: row[4:] for row in table.rows}
    assert rows["top-1"] == ["-10.00 points", "+0.00 points"]
    assert rows["ms a step, median"] == ["0.800 ×", "1.000 ×"]


def test_more_than_two_runs_are_told_from_the_first_in_a_table_of_its_own(tmp_path: Path) -> None:
    """Both side by side are wider than a terminal or a phone."""
    first, second = write_two(tmp_path)
    results, changes = split_changes(compare_results(read_runs([first, second, first])), 3)
    assert len(results.heads) == 4
    assert changes.heads == ["result", *results.heads[2:]]
    assert changes.caption == f"Against {results.heads[1]}"
    rows = {row[0]: row[1:] for row in changes.rows}
    assert rows["top-1"] == ["-10.00 points", "+0.00 points"]
    assert len(split_changes(compare_results(read_runs([first, second])), 2)) == 1
    status, out, _ = commands.run("compare", str(first), str(second), str(first))
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "finished" in out  # and no word of it on two lines


def test_a_chart_tells_the_number_that_says_most_of_a_curve(tmp_path: Path) -> None:
    """A last step's throughput says nothing of a run's, and every learning rate ends at about nothing."""
    path = write_run(tmp_path / "a", make_run(steps=200))
    page = build_run_comparison(read_runs([path, path]))
    assert re.search(r"The medians: \S+a 9,\d\d\d; ", page)
    assert re.search(r"The highest: \S+a 1\.18; ", page)


def test_changes_that_cannot_be_told_are_a_dash() -> None:
    assert tell_changes([0.0, 1.0, None], is_share=False) == ["–", "–"]
    assert tell_changes([1e-308, 1e308], is_share=False) == ["–"]
    assert tell_changes([-1e308, 1e308], is_share=True) == ["–"]
    assert tell_changes([0.0, 0.5], is_share=True) == ["+50.00 points"]
    assert tell_changes([0.1, 0.1 - 1e-9], is_share=True) == ["+0.00 points"]


def test_numbers_on_the_page_are_aligned_and_the_validation_loss_is_drawn(tmp_path: Path) -> None:
    page = build_run_comparison(read_runs(write_two(tmp_path)))
    table = page[page.index('id="results-table"') :].partition("</table>")[0]
    assert table.count("<td>") == 0
    assert table.count('<td class="number">') > 10
    assert "a (finished)" in page
    assert "b (unfinished)" in page
    assert 'id="chart-validation-loss"' in page


def test_names_are_short_and_never_the_same(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [*write_two(tmp_path), write_two(tmp_path / "other")[0] / "events.jsonl"]
    assert [run.name for run in read_runs(paths)] == [f"{tmp_path.name}/a", "b", "other/a"]
    assert [run.name for run in read_runs([paths[1]] * 2)] == [f"{tmp_path.name}/b", f"{tmp_path.name}/b (2)"]


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    runs = write_two(tmp_path)
    file, sweep = tmp_path / "a.json", write_sweep(tmp_path / "sweep")
    file.write_text('[{"side": "ours", "median_s": 1.5}]')
    for paths, words in (
        (runs[:1], "at least two"),
        ([*runs, file], "a is a run and a.json a benchmark; .* only one kind"),
        ([*runs, sweep], "a is a run and sweep a sweep; .* only one kind"),
        ([file, sweep / "sweep.json"], "a.json is a benchmark and sweep a sweep; .* only one kind"),
        ([tmp_path / "none", *runs], "Cannot read .*none: .*; give a run's folder"),
        ([file, tmp_path / "none.json"], "Cannot read .*none.json"),
    ):
        with pytest.raises(LockstepError, match=words):
            read_subjects(paths)


def test_the_command_prints_tables_and_writes_the_page(tmp_path: Path) -> None:
    runs = write_two(tmp_path)
    status, out, err = commands.run("compare", *map(str, runs), "--out", str(tmp_path / "c.html"))
    assert status == 0, err
    assert "optim.lr" in out
    assert "90.0 %" in out
    assert "unfinished" in out
    assert (tmp_path / "c.html").stat().st_size > 1e6


def test_names_of_strangers_are_text(tmp_path: Path) -> None:
    names = ["<script>alert(1)<", '"><img src=x>']
    page = build_run_comparison(read_runs([write_run(tmp_path / name, make_run(steps=100)) for name in names]))
    assert "<script>alert" not in page
    assert "<img" not in page
