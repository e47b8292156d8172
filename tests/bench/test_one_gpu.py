"""The bench beside torchvision: what it is asked for, and one small run on a GPU."""

import json
from pathlib import Path

import pytest
import torch

from lockstep.bench import one_gpu
from lockstep.errors import LockstepError


def test_batches_are_numbers_with_commas() -> None:
    assert one_gpu.parse_batches("32,256") == [32, 256]
    for wrong in ("", "32,", "a", "0", "-1"):
        with pytest.raises(LockstepError, match="--batch"):
            one_gpu.parse_batches(wrong)


def test_peers_are_picked_by_name() -> None:
    assert one_gpu.pick_peers("") == list(one_gpu.PEERS)
    assert one_gpu.pick_peers("none") == []
    assert one_gpu.pick_peers("fp32, fp16-compiled") == ["fp32", "fp16-compiled"]
    with pytest.raises(LockstepError, match="knows no jax"):
        one_gpu.pick_peers("jax")


def test_a_model_it_does_not_know_is_one_sentence() -> None:
    with pytest.raises(LockstepError, match="--model resnet51 is unknown; choose alexnet or resnet18"):
        one_gpu.run(models=["resnet51"], batches=[8], peers=[], rounds=2)


def test_a_file_that_cannot_be_written_is_said_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="cannot be written"):
        one_gpu.run(models=["resnet50"], batches=[8], peers=[], rounds=2, json_file=tmp_path / "none" / "rows.json")


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(LockstepError, match="needs a GPU"):
        one_gpu.run(models=["resnet50"], batches=[8], peers=[], rounds=2)


@pytest.mark.gpu
def test_a_small_run_gives_a_row_for_each_side(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    one_gpu.run(models=["resnet50"], batches=[8], peers=["tf32"], rounds=2, json_file=file)
    ours, theirs = json.loads(file.read_text())
    assert ours["name"].startswith("lockstep")
    assert theirs["name"] == "torchvision, tf32"
    assert ours["images_per_second"] > 0
    assert 0 < ours["matrix_share"] < 1
