"""What importing the package does to the process."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def test_what_draws_a_runs_page_comes_with_the_package() -> None:
    """The README's --html asks for no extra."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert any(wanted.startswith("plotly") for wanted in project["dependencies"])


@pytest.mark.parametrize(("given", "expected"), [(None, "32"), ("1", "1")])
def test_cuda_gets_queues_enough_unless_the_user_says_how_many(given: str | None, expected: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
    if given is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = given
    code = "import os, lockstep; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None"),
    ],
)
def test_memory_comes_in_pieces_that_grow_unless_the_user_has_settings(given: dict[str, str], expected: str) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {key: value for key, value in os.environ.items() if key not in names} | given
    code = "import os, lockstep; print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == expected
