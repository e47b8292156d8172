"""A lost run is started again and goes on; one that ended of its own will is not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.restarts import OUTCOME, count_restarts, leave_outcome, name_job, read_agent_start, read_outcome


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


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "a-1", "TORCHELASTIC_MAX_RESTARTS": "2"}, "job-a-1"),
        ({"TORCHELASTIC_RUN_ID": "a-1", "TORCHELASTIC_MAX_RESTARTS": "0"}, ""),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "2"}, ""),
        ({"TORCHELASTIC_RUN_ID": "static", "TORCHELASTIC_MAX_RESTARTS": "2"}, ""),
        ({"TORCHELASTIC_RUN_ID": "", "TORCHELASTIC_MAX_RESTARTS": "2"}, ""),
        ({"SLURM_JOB_ID": "12"}, "slurm-12"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}, "slurm-12.0"),
        ({"SLURM_JOB_ID": "12", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "2"}, "slurm-12"),
        ({"SLURM_JOB_ID": "12", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "2"}, "job-a"),
    ],
)
def test_a_job_has_a_name_where_its_ranks_may_be_started_again(environment: dict[str, str], job: str) -> None:
    assert name_job(environment) == job
    assert name_job(environment | {"TORCHELASTIC_RESTART_COUNT": "0"}) == job


def test_a_jobs_name_is_no_path_whatever_it_is() -> None:
    names = [
        name_job({"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_MAX_RESTARTS": "1"}) for run in ("../a", "../b", "é" * 99)
    ]
    assert len(set(names)) == 3
    assert all(name.startswith("job-") and name.isascii() and "/" not in name for name in names)


def test_the_agent_is_whoever_started_the_rank_or_its_shell() -> None:
    """This process stands for the agent: its children have a run's name, and it has none."""
    started_s = read_agent_start_below("")
    assert started_s < time.time()
    time.sleep(1.1)
    assert read_agent_start_below("") == started_s
    assert read_agent_start_below("sh -c '\"$@\"; true' sh ") == started_s
    assert 0 <= read_agent_start() <= started_s


def read_agent_start_below(shell: str) -> float:
    line = f'{shell}"{sys.executable}" -c "import lockstep.restarts as r; print(repr(r.read_agent_start()))"'
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a", "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, check=True)
    return float(result.stdout)
