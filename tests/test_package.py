"""What importing the package does to the process."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "32"), ("1", "1")])
def test_cuda_gets_queues_enough_unless_the_user_says_how_many(given: str | None, expected: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
    if given is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = given
    code = "import os, lockstep; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == expected
