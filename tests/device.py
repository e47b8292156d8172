"""The GPU under test: left as it was found."""

import gc

import torch

from lockstep.engine.recorded import set_sync_mode


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
