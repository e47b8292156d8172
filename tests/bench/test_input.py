"""The input benchmark: what it opens, what its rows hold, what it says about them."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lockstep.bench import input as bench
from lockstep.bench.input import Row, build_table, describe_feed, describe_ratios, measure_input, open_photos
from lockstep.bench.input_peers import Setting
from lockstep.bench.photos import build_photos
from lockstep.data.pack import pack_folder
from lockstep.errors import LockstepError
from tests.engine import commands

ROWS = [
    Row("lockstep", "decode", 1500.0, 2, 10.0, 3),
    Row("dataloader-pillow", "decode", 900.0, 2, 10.0, 3),
    Row("lockstep", "all", 1000.0, 2, 10.0, 3),
    Row("dataloader-pillow", "all", 500.0, 2, 10.0, 3),
]


def test_every_stage_of_every_contestant_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEPTHS", (2,))
    source = open_photos(build_photos(tmp_path, 4), Console())
    said: list[tuple[int, int]] = []
    setting = Setting(source, 32, 2, 1, torch.device("cpu"))
    rows = measure_input(setting, rounds=2, round_s=0.01, say=lambda done, total: said.append((done, total)))
    measured = {(row.name, row.stage) for row in rows}
    own = {("lockstep", stage) for stage in ("read", "decode", "crop", "all")}
    assert measured >= own | {("dataloader-pillow", stage) for stage in ("decode", "crop", "all")}
    assert [row.stage for row in rows] == sorted((row.stage for row in rows), key=bench.STAGES.index)
    assert all(row.images_per_second > 0 and (row.threads, row.rounds) == (1, 2) for row in rows)
    assert said[-1][0] == said[-1][1]


def test_a_folder_of_photos_of_classes_and_of_splits_all_open(tmp_path: Path) -> None:
    photos = build_photos(tmp_path, 2)
    for place in ("flat", "classes/a", "classes/b", "splits/train/a", "splits/val/a"):
        (tmp_path / place).mkdir(parents=True)
        for file in photos.iterdir():
            (tmp_path / place / file.name).write_bytes(file.read_bytes())
    pack_folder(tmp_path / "splits", tmp_path / "packed")
    names = ("flat", "classes", "splits", "packed")
    opened = {name: open_photos(tmp_path / name, Console()) for name in names}
    assert {name: source.num_samples for name, source in opened.items()} == dict(zip(names, (2, 4, 2, 2), strict=True))
    assert opened["packed"].read(1) == opened["splits"].read(1)


def test_what_is_no_folder_or_holds_no_photos_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="is not a folder; name one that holds photos"):
        open_photos(tmp_path / "nowhere", Console())
    with pytest.raises(LockstepError, match="holds no images"):
        open_photos(tmp_path, Console())


def test_the_table_has_a_line_for_each_stage_with_images_per_core() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(build_table(ROWS))
    lines = capture.get().splitlines()
    assert lines[0].split()[-2:] == ["lockstep", "dataloader-pillow"]
    assert [line.split() for line in lines[1:]] == [
        ["decode", "1,500", "(750)", "900", "(450)"],
        ["all", "1,000", "(500)", "500", "(250)"],
    ]


def test_the_ratio_is_that_of_the_whole_pipelines() -> None:
    [sentence] = describe_ratios(ROWS)
    assert "2.00 × what dataloader-pillow" in sentence


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (900.0, "would be fed"),
        (1000.0, "would be fed"),
        (1400.0, "needs 1 more core."),
        (8000.0, "needs 14 more cores."),
    ],
)
def test_it_says_how_many_cores_a_training_speed_needs(wanted: float, said: str) -> None:
    assert said in describe_feed(ROWS, wanted)


def test_the_command_prints_a_table_and_writes_rows(tmp_path: Path) -> None:
    photos, file = build_photos(tmp_path, 4), tmp_path / "rows.json"
    options = ("--image-size=32", "--batch=2", "--threads=1", "--rounds=2", "--round-s=0.01", "--feed=1e9")
    status, out, err = commands.run("bench", "input", str(photos), f"--json={file}", *options)
    assert status == 0, err
    assert "dataloader-pillow" in out
    assert "more cores" in out
    rows = json.loads(file.read_text())
    assert {"name", "stage", "images_per_second", "threads"} <= rows[0].keys()
    assert Row(**rows[-1]).stage == "all"


def test_a_json_file_that_cannot_be_written_is_a_sentence_before_measuring(tmp_path: Path) -> None:
    status, out, err = commands.run("bench", "input", f"--json={tmp_path / 'nowhere' / 'rows.json'}")
    assert status == 1
    assert "Traceback" not in out + err
    assert "choose another --json" in err
