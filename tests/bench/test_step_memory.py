"""Which sides stay in memory: all that fit, and where a pass is large, those that do not hold on to it."""

from pathlib import Path

import pytest

from lockstep.bench import step_memory
from lockstep.bench.step_memory import choose_kept, read_available_bytes
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


def test_free_memory_is_read_in_bytes(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       24000 kB\nMemFree:        100 kB\nMemAvailable:   20000 kB\n")
    assert read_available_bytes(file) == 20000 * 1024
    assert read_available_bytes(tmp_path / "nowhere") == float("inf")
