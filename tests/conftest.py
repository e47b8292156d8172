"""Tests run on the CPU, also where there is a GPU; those marked `gpu` are asked for with `-m gpu`."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A machine that runs other things as well takes its time over an example now and then.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Before torch is loaded: a thread that waits for the others of its pool sleeps. Spinning, as they do otherwise, the
# threads of several ranks and workers take the cores from whoever they wait for, and a step takes seconds. Tests run
# side by side, so that one thread each is what there are cores for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.option.markexpr = config.option.markexpr or "not gpu"
    if config.option.markexpr == "gpu":
        # Before CUDA starts: with more queues a GPU has no room for the processes of several tests (engine/places.py).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if config.option.markexpr == "gpu" and not config.option.collectonly:
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("the tests marked gpu need one that PyTorch can use; there is none here")
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks CUDA what there is
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined: kernels run on the CPU, step by step
        from tests.interpreter import mend_interpreter  # not before: it loads Triton

        mend_interpreter()
    from lockstep.processes import start_hearing  # not before: the package has variables of its own for CUDA

    start_hearing()  # where the tests run in the background, what they start is to be interrupted all the same


@pytest.fixture(autouse=True)
def default_sync_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test on the GPU that leaves PyTorch's sync debug mode on fails itself, and not all tests after it."""
    yield
    if request.node.get_closest_marker("gpu"):
        from tests.device import free_memory, reset_sync_mode  # not before `pytest_configure`: it loads torch

        free_memory()  # of which other workers' ranks have none otherwise
        left = reset_sync_mode()
        assert left == 0, f"the test left the sync debug mode at {left}; use refuse_waits of lockstep.engine.recorded"
