"""The GPU under test: what makes the host wait for it is an error while asked for, and never longer."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def sync_errors() -> Iterator[None]:
    """While inside, an operation that makes the host wait for the GPU raises."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        set_sync_mode("error")
        yield
    finally:
        set_sync_mode(before)


def set_sync_mode(mode: int | str) -> None:
    """Set PyTorch's mode for such operations, which warns that it does not see all of them."""
    with warnings.catch_warnings():
        # As an error, the warning would be raised after the mode was set, and the mode would stay.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def reset_sync_mode() -> int:
    """Back to the default; returns the mode that was left behind, 0 where there was none."""
    if not torch.cuda.is_initialized():
        return 0
    left = torch.cuda.get_sync_debug_mode()
    set_sync_mode("default")
    return left


def free_memory() -> None:
    """Give back what nobody uses: the GPU may be shared by tests that run at the same time."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
