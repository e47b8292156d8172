"""The commit of a checkout, and nothing of an installed package."""

import re
from pathlib import Path

import pytest

from lockstep import commit


def test_a_checkout_tells_its_commit() -> None:
    told = commit.read_commit()
    is_checkout = (Path(commit.__file__).parents[1] / ".git").exists()
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", told) if is_checkout else told == ""


def test_an_installed_package_tells_none_also_inside_another_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(commit, "__file__", str(tmp_path / "venv" / "lockstep" / "commit.py"))
    assert commit.read_commit() == ""


def test_a_repository_without_commits_or_git_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "lockstep").mkdir()
    monkeypatch.setattr(commit, "__file__", str(tmp_path / "lockstep" / "commit.py"))
    assert commit.read_commit() == ""
    monkeypatch.setenv("PATH", "")
    assert commit.read_commit() == ""
