"""The bench beside torchvision: what it is asked for, what its table says, and one small run on a GPU."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from lockstep.bench import one_gpu, torchvision_peers
from lockstep.bench.torchvision_peers import PEERS, pick_peers
from lockstep.bench.turns import Entry, Step, take_turns
from lockstep.errors import LockstepError

ROW = one_gpu.Row(
    name="lockstep, fp16, LARS",
    setting="as measured",
    model="resnet50",
    batch=256,
    images_per_second=8000.0,
    step_s=0.032,
    spread_s=0.0,
    prepare_s=9.0,
    memory_bytes=10 << 30,
    peak_bytes=10 << 30,
    tflops=190.0,
    matrix_share=0.25,
)


def describe(rows: list[one_gpu.Row]) -> str:
    text = io.StringIO()
    one_gpu.describe(rows, Console(file=text, width=200))
    return text.getvalue()


def test_batches_are_numbers_with_commas() -> None:
    assert one_gpu.parse_batches("32,256") == [32, 256]
    for wrong in ("", "32,", "a", "0", "-1"):
        with pytest.raises(LockstepError, match="--batch"):
            one_gpu.parse_batches(wrong)


def test_peers_are_picked_by_name() -> None:
    assert pick_peers("") == list(PEERS)
    assert pick_peers("none") == []
    assert pick_peers("fp32, fp16-compiled") == ["fp32", "fp16-compiled"]
    with pytest.raises(LockstepError, match="knows no jax"):
        pick_peers("jax")


def test_a_model_it_does_not_know_is_one_sentence() -> None:
    with pytest.raises(LockstepError, match="--model resnet51 is unknown; choose alexnet or resnet18"):
        one_gpu.run(models=["resnet51"], batches=[8], peers=[], rounds=2)


def test_a_file_that_cannot_be_written_is_said_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="cannot be written"):
        one_gpu.run(models=["resnet50"], batches=[8], peers=[], rounds=2, json_file=tmp_path / "none" / "rows.json")


def test_a_folder_that_is_no_checkout_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=f"--before {tmp_path} is no checkout of Lockstep"):
        one_gpu.run(models=["resnet50"], batches=[8], peers=["fp32"], rounds=2, before=tmp_path)


def test_a_torchvision_for_another_pytorch_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms is not there')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(LockstepError, match=r"torchvision cannot be imported \(.*nms is not there\); install one that"):
        torchvision_peers.build_network("resnet50")


def test_another_checkout_takes_its_steps_with_its_own_modules(tmp_path: Path) -> None:
    bench = tmp_path / "lockstep" / "bench"
    bench.mkdir(parents=True)
    for folder in (bench, bench.parent):
        (folder / "__init__.py").write_text("")
    (bench / "pace.py").write_text("import time\ndef step(): time.sleep(0.05)\n")
    lines = [
        "from lockstep.bench import pace",
        "def build_ours(model, batch):",
        "    return f'{model} of {batch}', pace.step",
    ]
    (bench / "one_gpu.py").write_text("\n".join(lines))
    entry = Entry("before, x", one_gpu.build_before, (str(tmp_path), "resnet50", 8))
    (outcome,) = take_turns([entry], rounds=2, turn_s=0.1)
    assert outcome.ready.setting == "resnet50 of 8"
    assert min(outcome.times) >= 0.05


def test_another_checkout_is_no_peer_but_has_a_ratio() -> None:
    peer = replace(ROW, name="torchvision, fp32", images_per_second=1000.0)
    before = replace(ROW, name="before, a976f16", images_per_second=7800.0)
    lines = describe([ROW, before, peer]).splitlines()
    assert "1.03x " in next(line for line in lines if "before" in line)
    assert "8.00x *" in next(line for line in lines if "fp32" in line)


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(LockstepError, match="needs a GPU"):
        one_gpu.run(models=["resnet50"], batches=[8], peers=[], rounds=2)


def test_the_quickest_peer_is_marked_and_ratios_are_ours_over_theirs() -> None:
    slow = replace(ROW, name="torchvision, fp32", images_per_second=1000.0)
    quick = replace(ROW, name="torchvision, fp16-compiled", images_per_second=5000.0)
    lines = describe([ROW, slow, quick]).splitlines()
    assert [line.split()[-3:] for line in lines if "fp32" in line] == [["8.00x", "torchvision,", "fp32"]]
    assert "1.60x *" in next(line for line in lines if "fp16-compiled" in line)
    assert sum("x *" in line for line in lines) == 1


def test_a_peak_is_shown_where_it_is_well_above_the_steady_state() -> None:
    assert "peak" not in describe([replace(ROW, peak_bytes=int(1.01 * ROW.memory_bytes))])
    assert "10.0 (peak 10.5)" in describe([replace(ROW, peak_bytes=int(1.05 * ROW.memory_bytes))])


def test_the_table_says_how_alexnets_differ() -> None:
    assert "no batch norm" in describe([replace(ROW, model="alexnet")])
    assert "no batch norm" not in describe([ROW])


def test_operations_are_those_of_forward_and_both_gradients() -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.Flatten(), nn.Linear(8 * 112 * 112, 10))
    convolution, linear = 2 * 8 * 112 * 112 * 3 * 49, 2 * 8 * 112 * 112 * 10
    assert one_gpu.count_flops(network) == 2 * convolution + 3 * linear  # the images need no gradient


def build_fake_step(model: str, batch: int, *setting: object) -> tuple[str, Step]:
    return f"{model} {batch}", lambda: torch.ones(batch).sum()


def build_broken_peer(*_: object) -> tuple[str, Step]:
    raise RuntimeError("CUDA error: unspecified launch failure\nmore")


def build_fake_product() -> tuple[str, Step]:
    return "", lambda: None


def test_a_peer_that_fails_costs_only_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # here, not in the sides' processes
    monkeypatch.setattr(one_gpu, "build_ours", build_fake_step)
    monkeypatch.setattr(one_gpu, "build_matrix_product", build_fake_product)
    monkeypatch.setattr(torchvision_peers, "build_peer", build_broken_peer)
    monkeypatch.setattr(torchvision_peers, "build_network", lambda _: nn.Conv2d(3, 2, 3))
    file = tmp_path / "rows.json"
    one_gpu.run(models=["alexnet"], batches=[4], peers=["fp16-compiled-graphs"], rounds=2, json_file=file)
    [row] = json.loads(file.read_text())
    assert (row["name"], row["setting"], row["batch"]) == ("lockstep, fp16, LARS", "alexnet 4", 4)
    assert row["images_per_second"] == pytest.approx(4 / row["step_s"])
    said = capsys.readouterr().out
    assert "left out: torchvision, fp16-compiled-graphs: CUDA error: unspecified launch failure\n" in said
    assert "alexnet, batch 4: alexnet 4" in said


@pytest.mark.gpu
def test_a_small_run_gives_a_row_for_each_side(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    one_gpu.run(models=["resnet50"], batches=[8], peers=["tf32"], rounds=2, json_file=file)
    ours, theirs = json.loads(file.read_text())
    assert ours["name"].startswith("lockstep")
    assert theirs["name"] == "torchvision, tf32"
    assert ours["images_per_second"] > 0
    assert 0 < ours["matrix_share"] < 1
    for row in (ours, theirs):
        assert 0 < row["memory_bytes"] <= row["peak_bytes"]
