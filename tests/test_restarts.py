"""A lost run is started again and goes on; one that ended of its own will is not."""

from pathlib import Path

import pytest

from lockstep.restarts import OUTCOME, count_restarts, leave_outcome, read_outcome


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"SLURM_RESTART_COUNT": "1"}, 1),
        ({"TORCHELASTIC_RESTART_COUNT": "1", "SLURM_RESTART_COUNT": "3"}, 3),
        ({"SLURM_RESTART_COUNT": "-1"}, 0),
        ({"SLURM_RESTART_COUNT": "many"}, 0),
    ],
)
def test_restarts_are_counted_by_torchrun_or_slurm(environment: dict[str, str], count: int) -> None:
    assert count_restarts(environment) == count


def test_a_rank_that_ends_for_good_tells_the_launcher_and_not_its_agent(tmp_path: Path) -> None:
    file = tmp_path / "outcome"
    file.touch()
    assert leave_outcome(130, {OUTCOME: str(file)}) == 0
    assert read_outcome(file) == 130


def test_without_a_launcher_that_restarts_the_status_is_the_ranks_own(tmp_path: Path) -> None:
    assert leave_outcome(1, {}) == 1
    assert leave_outcome(1, {OUTCOME: str(tmp_path / "gone" / "file")}) == 1
    assert leave_outcome(0, {OUTCOME: str(tmp_path / "file")}) == 0
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("content", ["", "nonsense", "0"])
def test_no_word_is_no_outcome(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").write_text(content)
    assert read_outcome(tmp_path / "file") == 0
    assert read_outcome(tmp_path / "missing") == 0
