"""Half precision in networks that were written for FP32: PyTorch's autocast around the forward pass (step 6).

`optim/groups.py` decides which parameters are half. This package's networks take half images and mix half weights with
FP32 norms as they are. Any other network may add, normalise or concatenate what it likes; autocast brings the operands
of each operation together. The weights that are multiplied are half already, so nothing large is cast.
"""

import torch
from torch import nn


def compute_in(model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Let the network compute in `dtype` wherever autocast says that is right; one that says it takes half does so."""
    if dtype == torch.float32 or getattr(model, "takes_half", False):
        return
    # No cache: it would hold casts of weights that change with every step, and a recording could not keep them.
    autocast = torch.autocast(device_type, dtype=dtype, cache_enabled=False)
    model.forward = autocast(model.forward)
