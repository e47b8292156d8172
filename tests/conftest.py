"""Tests run on the CPU, also where there is a GPU; those marked `gpu` are asked for with `-m gpu`."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("-m") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks CUDA what there is
