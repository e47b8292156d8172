"""Which sides stay in memory: all that fit, and where a pass is large, those that do not hold on to it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.bench import step_memory
from lockstep.bench.cases import USUAL_CASES
from lockstep.bench.step_memory import choose_kept, measure_pass, read_available_bytes
from lockstep.errors import LockstepError
from tests.ranks import world_of_one

SIDES = [*"abcdef"]
RECORDED = "ef"


@pytest.mark.parametrize(
    ("free", "pass_bytes", "kept"),
    [
        (360, 0, "abcdef"),  # 6 sides of 3 arrays of 10 bytes are half of it
        (359, 0, "abcd"),
        (299, 0, ""),
        (4560, 700, "abcdef"),  # and a pass of each recording, and of whose turn it is
        (4559, 700, "abcd"),
        (1700, 700, "abcd"),  # their arrays, those of the one whose turn it is, and its pass
        (1699, 700, ""),
        (730, 700, ""),
    ],
)
def test_all_stay_or_those_without_a_recording_or_none(
    free: float, pass_bytes: int, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_memory, "read_available_bytes", lambda: free)
    assert choose_kept(SIDES, RECORDED, 10, pass_bytes, world_of_one()) == tuple(kept)


def test_a_side_that_does_not_fit_alone_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "read_available_bytes", lambda: 3.4e9)
    choose_kept(["a"], "", int(1e9), int(0.4e9), world_of_one())
    with pytest.raises(LockstepError, match=r"1 ranks need more than 3.5 GB on this host, of which 3.4 GB are free; "):
        choose_kept(["a"], "", int(1e9), int(0.5e9), world_of_one())


def test_a_pass_that_does_not_fit_is_a_sentence_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    world: Any = SimpleNamespace(device=torch.device("cuda"), gather_values=lambda value: [value, 1000])
    monkeypatch.setattr(step_memory, "build_network", lambda *_: nn.Linear(1, 1))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    batch: Any = None
    monkeypatch.setattr(step_memory, "compute_loss", lambda *_: torch.ones((), requires_grad=True))
    assert measure_pass(USUAL_CASES[0], world, batch) == 1000
    monkeypatch.setattr(step_memory, "compute_loss", run_out)
    with pytest.raises(LockstepError, match="A pass over 64 images a rank does not fit into the GPU; ask for fewer"):
        measure_pass(USUAL_CASES[0], world, batch)


def test_free_memory_is_read_in_bytes(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       24000 kB\nMemFree:        100 kB\nMemAvailable:   20000 kB\n")
    assert read_available_bytes(file) == 20000 * 1024
    assert read_available_bytes(tmp_path / "nowhere") == float("inf")
