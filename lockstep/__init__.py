"""Lockstep: synchronous data-parallel training of image models, from a laptop to a cluster."""

import os
from importlib import import_module

from lockstep.errors import LockstepError, Stop
from lockstep.private import COMPILED, find_compiled

__version__ = "0.1.0"
__all__ = ["LockstepError", "Result", "Stop", "__version__", "evaluate", "export", "load", "predict", "train"]

# CUDA reads this when it starts. By default it feeds a GPU through 8 queues that streams share, so that nvJPEG's work
# may stand in line behind whole recorded steps; CUDA_DEVICE_MAX_CONNECTIONS=8 lockstep bench input --train shows it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# PyTorch reads this when it first allocates. A recorded step keeps its memory for good, and in pieces of fixed size a
# ResNet-50's wastes a sixth of it. Whoever has settings of their own keeps them, under either name.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# PyTorch reads this when it is imported. Its words on a lost connection, errors as well as warnings, come with pages of
# C++ addresses; what has happened is said in a sentence of ours.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# PyTorch reads this when it first compiles. By itself it would take a folder in /tmp that anybody can make before.
os.environ.setdefault(COMPILED, str(find_compiled()))


def __getattr__(name: str) -> object:
    """What is for programs (`api.py`) is read when it is first asked for: `import lockstep` is instant."""
    if name in __all__:
        return getattr(import_module("lockstep.api"), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
