"""Benchmarks beside each other: rows matched by what they are, and charts whose rows can be told apart."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.report.compare_rows import RowFile, compare_rows, tabulate_rows
from lockstep.report.compare_subjects import read_subjects
from lockstep.report.page.compare_rows_page import build_row_comparison
from lockstep.report.page.row_labels import name_rows
from lockstep.report.quantities import describe_quantity


def read_files(paths: Sequence[Path]) -> list[RowFile]:
    return [one for one in read_subjects(paths) if isinstance(one, RowFile)]


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
    files = read_files([write_rows(tmp_path / "a.json", 1.0), write_rows(tmp_path / "b.json", 0.5)])
    first = compare_rows(files)[0]
    assert (first.identity, first.key, first.numbers) == (
        ("resnet50", "batch 32", "lockstep"),
        "median_s",
        [32.0, 16.0],
    )
    table = tabulate_rows(files)
    assert table.rows[3][-3:] == ["256", "128", "0.500 ×"]
    assert {row[1] for row in table.rows} == {"median time, s"}  # both had as many rounds


def test_rows_called_alike_are_all_kept(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        rows = [{"side": "ours", "threads": threads, "median_s": factor * threads} for threads in (1, 4)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    compared = compare_rows(read_files([tmp_path / "a.json", tmp_path / "b.json"]))
    assert [(row.identity, row.numbers) for row in compared] == [
        (("ours",), [1.0, 2.0]),
        (("ours", "no. 2"), [4.0, 8.0]),
    ]


def test_what_is_no_benchmark_is_one_sentence(tmp_path: Path) -> None:
    file, other = write_rows(tmp_path / "a.json", 1.0), write_rows(tmp_path / "other.json", 1.0, model="alexnet")
    with pytest.raises(LockstepError, match="no row in common; compare files of the same benchmark"):
        tabulate_rows(read_files([file, other]))
    for content in ("{}", "[]", "[1]", "nonsense", "[" * 100_000):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(LockstepError, match=r"bad\.json"):
            read_subjects([file, tmp_path / "bad.json"])


def test_strangers_rows_are_text_and_never_a_failure(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    hostile = "<img src=x>"
    row = {"model": deep, "side": hostile, "median_s": 1e308, f"steps to {hostile}": 1.0, "_s": 1, "huge": 10**4000}
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps([row | {"seconds": name == "a" or 1e-308}]))
    files = read_files([tmp_path / "a.json", tmp_path / "b.json"])
    assert tabulate_rows(files).rows[0][0] == hostile
    page = build_row_comparison(files)
    assert "<img" not in page
    assert "bars-steps-to-img-src-x" in page


def test_the_page_says_what_it_draws_in_words(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / "a.json", 1e-3), write_rows(tmp_path / "b.json", 2e-3)]
    page = build_row_comparison(read_files(files))
    assert "bars-median-s" in page
    assert ">Median time, ms</h3>" in page
    assert "median_s" not in page.partition('<script type="application/json"')[0]
    assert "In all rows: resnet50." in page


def test_rows_of_a_chart_are_told_apart() -> None:
    network = "quickstart's network, 0.7 M parameters"
    rows = [(network, f"batch {batch}", "ranks 1", side) for batch in (64, 256) for side in ("bare loop", "lockstep")]
    assert name_rows(rows[:2]) == ["bare loop", "lockstep"]
    assert name_rows(rows) == [
        "batch 64, bare loop",
        "batch 64, lockstep",
        "batch 256, bare loop",
        "batch 256, lockstep",
    ]
    others = [("ResNet-18, 11.2 M parameters", "batch 16", "ranks 1", side) for side in ("bare loop", "lockstep")]
    assert name_rows([*rows[:2], *others])[1] == "quickstart's network<br>0.7 M parameters<br>batch 64, lockstep"
    ways = [(f"{'a long name, ' * 9}called {way}",) for way in ("flat", "torus")]
    assert [name.rpartition("<br>")[2] for name in name_rows(ways)] == ["called flat", "called torus"]
    long = [("x" * 300 + str(place),) for place in range(3)]
    assert len(set(name_rows(long))) == 3
    assert all(name.count("<br>") < 4 for name in name_rows(long))
    assert name_rows([("a", "b")]) == ["a, b"]
    assert name_rows([("a",), ("a", "b")]) == ["a", "b"]
    assert name_rows([("<b>",), ("c",)]) == ["&lt;b&gt;", "c"]


@pytest.mark.parametrize(
    ("key", "values", "words", "shown"),
    [
        ("median_s", [0.002, 0.5], "median time, ms", "500"),
        ("step_s", [0.5, 2.0], "time of a step, s", "2"),
        ("images_per_second", [123_456.7], "images/s", "123,457"),
        ("memory_bytes", [3 << 30], "memory, GiB", "3"),
        ("sent_gbit_per_s", [9.5], "sent, Gbit/s", "9.5"),
        ("top1", [0.925], "top-1, %", "92.50"),
        ("hidden_share", [0.5], "hidden share", "0.5"),
    ],
)
def test_quantities_have_words_and_units(key: str, values: list[float], words: str, shown: str) -> None:
    quantity = describe_quantity(key, values)
    assert quantity.words == words
    assert quantity.show(values[-1]) == shown


def test_a_deviation_decides_how_many_digits_are_shown() -> None:
    assert describe_quantity("images_per_second", [2651.4]).show(2651.4, 128.2) == "2,651 ± 128"
    assert describe_quantity("wall_s", [24.191]).show(24.191, 8.9) == "24.2 ± 8.9"
    assert describe_quantity("top1", [0.166]).show(0.166, 0.0226) == "16.60 ± 2.26"
    assert describe_quantity("wall_s", [2.0]).show(2.0, 0.0) == "2"
