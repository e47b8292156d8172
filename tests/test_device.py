"""One test can never leave the GPU in a mode that fails the next: shown with a mode that lives in a list."""

import warnings

import pytest
import torch

from lockstep.engine.recorded import refuse_waits
from tests.device import reset_sync_mode


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """PyTorch's mode without a GPU: setting it takes effect first and warns then, as in PyTorch."""
    now = [0]

    def set_mode(wanted: int | str) -> None:
        now[0] = {"default": 0, "warn": 1, "error": 2}.get(wanted, wanted)  # type: ignore[arg-type, assignment]
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return now


def test_waiting_for_the_gpu_is_an_error_inside_and_not_after(mode: list[int]) -> None:
    with refuse_waits():
        assert mode == [2]
    assert mode == [0]


def test_the_mode_is_put_back_after_a_failure(mode: list[int]) -> None:
    with pytest.raises(RuntimeError, match="called a synchronizing"), refuse_waits():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert mode == [0]


def test_a_mode_left_behind_is_named_and_reset(mode: list[int]) -> None:
    mode[0] = 2
    assert reset_sync_mode() == 2
    assert mode == [0]
    assert reset_sync_mode() == 0
