"""The bench beside timm: what it is asked for, what its rows say, a small run with a stand-in of timm's interface."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from lockstep.bench import beside_timm, timm_peers
from lockstep.bench.commands import bench
from lockstep.bench.timm_peers import PEERS, Case, pick_peers
from lockstep.bench.turns import Outcome, Ready
from lockstep.errors import LockstepError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    for split, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 255, (30, 30, 3), np.uint8)).save(place / f"{number}.jpeg")
    return tmp_path / "images"


def test_peers_are_picked_by_name() -> None:
    assert pick_peers("") == list(PEERS)
    assert pick_peers("none") == []
    assert pick_peers("plain, compiled") == ["plain", "compiled"]
    with pytest.raises(LockstepError, match="knows no fp16 of timm's"):
        pick_peers("fp16")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model=resnet50"], "--model resnet50 is none of timm's; write timm:NAME"),
        (["--json=none/rows.json"], "cannot be written"),
        (["--data=none"], "--data none holds no train/"),
        (["--data=images", "--batch=4,13"], "12 images to train with, fewer than a batch of 13"),
        (["--nodes=2"], "--nodes has no effect with --against timm; leave it out."),
        (["--html=x.html"], "--html has no effect with --against timm"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_is_measured(
    options: list[str], sentence: str, timm: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    result = CliRunner().invoke(bench, ["step", "--against=timm", *options])
    assert isinstance(result.exception, LockstepError)
    assert sentence in str(result.exception)


def test_without_timm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(LockstepError, match=r"`bench step --against timm` needs timm, .* `pip install timm`"):
        beside_timm.run(batches=[4], peers=["plain"], rounds=2)


def test_data_is_not_asked_for_beside_others() -> None:
    for other in ("ddp", "bare", "torchvision"):
        result = CliRunner().invoke(bench, ["step", f"--against={other}", "--data=images"])
        assert isinstance(result.exception, LockstepError)
        assert str(result.exception).startswith(f"--data has no effect with --against {other}")


def test_ratios_are_medians_over_the_rounds_and_times_those_of_one_batch() -> None:
    ready = Ready("as measured", 9.0, 1.0, 3 << 30, 3 << 30)
    ours = Outcome("lockstep", ready, [1.0, 2.0, 4.0])
    theirs = Outcome("timm, plain", ready, [3.0, 2.0, 10.0])  # 3, 1 and 2.5 times as long
    case = Case("timm:tiny", 8, 32, "fp32", 10, chunk=4)
    first, second = beside_timm.build_rows(case, [ours, theirs])
    assert (first.ratio, second.ratio) == (1.0, 2.5)
    assert first.step_s == 0.5
    assert second.images_per_second == pytest.approx(8 / 0.75)
    text = io.StringIO()
    beside_timm.describe([first, second], Console(file=text, width=160))
    assert [line.split()[-3:] for line in text.getvalue().splitlines() if "plain" in line] == [
        ["2.50x", "timm,", "plain"]
    ]
    assert beside_timm.build_rows(case, [theirs])[0].ratio == 0.0  # nothing to compare with


def test_batches_that_lie_ready_are_taken_before_the_clock_starts(folder: Path) -> None:
    case = beside_timm.open_case(Case("timm:tiny", 4, 32, "fp32", 1000), folder, smallest=4)
    assert (case.classes, case.data) == (2, str(folder))
    assert case.chunk * beside_timm.WARM_UP_STEPS >= case.threads * beside_timm.READY_BATCHES


def test_what_is_timed_of_timms_side_is_training(timm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("timm:tiny", 8, 16, "fp32", 3)
    losses: list[float] = []
    plain = torch.nn.functional.cross_entropy

    def listen(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
        loss = plain(logits, labels, label_smoothing=label_smoothing)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", listen)
    _, step = timm_peers.build_timm(case, "")
    for _ in range(30):
        step()
    assert losses[-1] < losses[0] - 0.01


def test_a_small_run_from_a_folder_gives_a_row_for_each_side(
    timm: None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    beside_timm.run(
        models="timm:tiny", batches=[4], image_size=16, data=folder, peers=["plain"], rounds=2, json_file=file
    )
    ours, theirs = json.loads(file.read_text())
    assert (ours["name"], theirs["name"]) == ("lockstep", "timm, plain"), capsys.readouterr().out
    assert ours["ratio"] == 1.0
    assert theirs["ratio"] > 0
    assert {row["data"] for row in (ours, theirs)} == {str(folder)}
    assert theirs["images_per_second"] == pytest.approx(4 / theirs["step_s"])
