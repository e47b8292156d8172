"""Sweeps beside each other: a row for each cell at each point of the grid."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.report.compare_rows import RowFile, compare_facts, tabulate_rows
from lockstep.report.compare_subjects import LARGEST_FILE, read_subjects
from lockstep.report.page.compare_rows_page import build_row_comparison
from tests.engine import commands
from tests.report import browser
from tests.report.made_sweep import make_sweep, write_sweep
from tests.report.test_browser import check


def read_sweeps(*paths: Path) -> list[RowFile]:
    return [one for one in read_subjects(paths) if isinstance(one, RowFile)]


def test_sweeps_are_compared_cell_by_cell_and_point_by_point(tmp_path: Path) -> None:
    folders = [write_sweep(tmp_path / "a"), write_sweep(tmp_path / "b", base=0.6, lr=0.2)]
    table = tabulate_rows(read_sweeps(*folders))
    assert table.heads == ["row", "quantity", "a", "b", "difference"]
    rows = {(row[0], row[1]): row[2:] for row in table.rows}
    assert {row for row, _ in rows} == {
        f"{cell}, global_batch {batch}" for cell in ("momentum", "LARS") for batch in (32, 256)
    }
    # Two seeds 0.02 apart: a deviation of 0.02 / √2.
    assert rows["LARS, global_batch 32", "top-1, %"] == ["51.00 ± 1.41", "61.00 ± 1.41", "+10.00 points"]
    assert rows["LARS, global_batch 32", "steps to 30 %"] == ["100 (1 of 2)", "100 (1 of 2)", "1.000 ×"]
    assert rows["LARS, global_batch 32", "images/s"][-1] == "1.000 ×"


def test_a_folder_is_its_sweep_json(tmp_path: Path) -> None:
    first, second = write_sweep(tmp_path / "a"), write_sweep(tmp_path / "b", base=0.6)
    by_folder, by_file = read_sweeps(first, second), read_sweeps(first / "sweep.json", second / "sweep.json")
    assert [file.name for file in by_file] == ["a", "b"]
    assert tabulate_rows(by_folder) == tabulate_rows(by_file)


def test_what_was_chosen_is_told_where_it_differs(tmp_path: Path) -> None:
    first, second = write_sweep(tmp_path / "a"), write_sweep(tmp_path / "b", lr=0.2, cells=("LARS",))
    table = compare_facts(read_sweeps(first, second))
    assert table is not None
    assert ["best of LARS, global_batch 32", "lr 0.1", "lr 0.2"] in table.rows
    assert ["best of momentum, global_batch 32", "lr 0.1", "–"] in table.rows
    assert compare_facts(read_sweeps(first, first)) is None


def test_settings_that_all_trials_of_a_sweep_have_are_told_where_sweeps_differ(tmp_path: Path) -> None:
    folders = [write_sweep(tmp_path / name, settings=(f"train.duration={name}ep", "model.width=8")) for name in "69"]
    first, second = (sweep.facts for sweep in read_sweeps(*folders))
    assert (first["train.duration"], second["train.duration"]) == ("6ep", "9ep")
    assert first["model.width"] == second["model.width"] == "8"


def test_other_measures_and_targets_are_other_quantities(tmp_path: Path) -> None:
    first, second = write_sweep(tmp_path / "a"), write_sweep(tmp_path / "b", target=0.4)
    words = {row[1] for row in tabulate_rows(read_sweeps(first, second)).rows}
    assert words == {"top-1, %", "images/s", "time of a run, s"}
    other = json.loads(make_sweep())
    (second / "sweep.json").write_text(json.dumps(other | {"measure": "best_top1"}))
    assert "top-1, %" not in {row[1] for row in tabulate_rows(read_sweeps(first, second)).rows}


def test_a_grid_in_another_order_is_the_same_grid(tmp_path: Path) -> None:
    for name, keys in (("a", ("train.global_batch", "optim.lr")), ("b", ("optim.lr", "train.global_batch"))):
        table = json.loads(make_sweep())
        for cell in table["cells"]:
            point = {"train.global_batch": cell["point"]["train.global_batch"], "optim.lr": 0.1}
            cell["point"] = {key: point[key] for key in keys}
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    rows = tabulate_rows(read_sweeps(tmp_path / "a.json", tmp_path / "b.json")).rows
    assert {row[0] for row in rows if row[1] == "top-1, %"} == {
        f"{cell}, global_batch {batch}, lr 0.1" for cell in ("momentum", "LARS") for batch in (32, 256)
    }


def test_settings_of_one_name_keep_where_they_are_from(tmp_path: Path) -> None:
    table = json.loads(make_sweep())
    table["cells"][0]["point"] = {"model.name": "resnet18", "optim.name": "lars"}
    (tmp_path / "a.json").write_text(json.dumps(table))
    rows = read_sweeps(tmp_path / "a.json", tmp_path / "a.json")[0].rows
    assert rows[0].identity == ("momentum", "model.name resnet18", "optim.name lars")


def test_the_command_compares_sweeps_and_draws_them(tmp_path: Path) -> None:
    folders = [write_sweep(tmp_path / "a"), write_sweep(tmp_path / "b", base=0.6)]
    status, out, err = commands.run("compare", *map(str, folders), "--out", str(tmp_path / "c.html"))
    assert status == 0, err
    assert "51.00" in out
    assert "+10.00" in out
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    charts = {chart["name"]: chart for chart in data["charts"]}
    assert list(charts) == ["bars-top1", "bars-steps-to-30", "bars-images-per-second"]
    trace = charts["bars-top1"]["traces"][1]
    assert trace["x"] == pytest.approx([61.0] * 4)
    assert trace["error_x"]["array"] == pytest.approx([2**0.5] * 4)
    assert charts["bars-top1"]["layout"]["yaxis"]["ticktext"][0] == "momentum<br>global_batch 32"


def test_the_page_is_drawn_whole_on_a_screen_and_on_a_phone(tmp_path: Path) -> None:
    folders = [write_sweep(tmp_path / "a"), write_sweep(tmp_path / "b", base=0.6)]
    (tmp_path / "c.html").write_text(build_row_comparison(read_sweeps(*folders)), encoding="utf-8")
    with browser.open_browser(tmp_path / "profile") as page:
        for width, scheme in ((1400, "light"), (400, "dark")):
            page.show(f"file://{tmp_path}/c.html", width=width, scheme=scheme)
            drawn = check(page)
            assert drawn == {"bars-top1": 8, "bars-steps-to-30": 8, "bars-images-per-second": 8}
        assert page.run("document.querySelectorAll('#chart-bars-top1 .xerror').length") == 8
        hidden = "[...document.querySelectorAll('.scroll')].map((one) => one.scrollHeight - one.clientHeight)"
        assert set(page.run(hidden)) == {0}  # tables are the page, and none is to be scrolled through


@pytest.mark.parametrize(
    "change",
    [
        {"cells": None},
        {"cells": []},
        {"cells": {}},
        {"cells": [1]},
        {"cells": [{}] * 6000},
        {"measure": 3},
        {"measure": "loss"},
        {"target": "high"},
        {"set": "x"},
        {"set": [1]},
        {"cells.cell": None},
        {"cells.cell": "x" * 10_000},
        {"cells.point": [1]},
        {"cells.point": {"x": "y" * 10_000}},
        {"cells.best": [1]},
        {"cells.seeds": None},
        {"cells.top1": 0.5},
        {"cells.top1": {"mean": "high"}},
        {"cells.top1": {"mean": float("nan")}},
        {"cells.top1": {"mean": 10**400}},
        {"cells.wall_s": {"mean": 1.0, "deviation": [1]}},
        {"cells.bad": "none"},
    ],
    ids=str,
)
def test_a_forged_sweep_is_one_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    table = json.loads(make_sweep())
    for key, value in change.items():
        where, _, inner = key.partition(".")
        if inner:
            table[where][1][inner] = value
        else:
            table[where] = value
    (tmp_path / "forged.json").write_text(json.dumps(table))
    with pytest.raises(LockstepError, match=r"forged\.json is not as `lockstep sweep` wrote it: .*; run"):
        read_subjects([tmp_path / "forged.json", write_sweep(tmp_path / "good")])


def test_a_huge_or_endless_sweep_is_one_sentence(tmp_path: Path) -> None:
    good, path = write_sweep(tmp_path / "good"), tmp_path / "forged.json"
    path.write_text('{"cells": ' * 100_000)
    with pytest.raises(LockstepError, match=r"forged\.json is no JSON"):
        read_subjects([good, path])
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(LockstepError, match=r"forged\.json: it has more than"):
        read_subjects([good, path])


def test_whatever_stands_anywhere_in_a_sweep_it_is_shown_or_refused(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = {"x": deep}
    odd = [None, True, -1, 10**4000, 1e308, -1e308, float("inf"), "", "<img src=x>", "\ud800\x1b[2J", [], {}, deep]
    rule, refused = random.Random(0), 0
    good, path = write_sweep(tmp_path / "good") / "sweep.json", tmp_path / "forged.json"
    for _ in range(300):
        table = json.loads(make_sweep())
        for _ in range(rule.randint(1, 3)):
            _replace_somewhere(table, odd, rule)
        path.write_text(json.dumps(table))
        try:
            files = read_sweeps(path, good)
            tabulate_rows(files)
        except LockstepError:
            refused += 1
            continue
        compare_facts(files)
        assert "<img" not in build_row_comparison(files)
    assert 50 < refused < 250


def _replace_somewhere(table: Any, odd: list[Any], rule: random.Random) -> None:
    """Put something odd in the place of a value at any depth, of the cells more often than not."""
    where: Any = table["cells"] if rule.random() < 0.8 and isinstance(table.get("cells"), list) else table
    while True:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = rule.choice(keys)
        inner = where[key]
        if not isinstance(inner, dict | list) or not inner or rule.random() < 0.2:
            where[key] = rule.choice(odd)
            return
        where = inner
