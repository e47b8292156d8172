"""A rank ends with the process that started it, so that none trains on unseen. Torch-free.

The launcher leaves its number in the environment (`engine/launch.py`); `cli.py` calls this before anything else. The
kernel does the rest: it needs no thread, and it also reaches a rank that is stuck.
"""

import ctypes
import os
import signal
from collections.abc import MutableMapping

LAUNCHER = "LOCKSTEP_LAUNCHER"  # the process that started this rank
# What torchrun and srun leave in the environment. A rank started by hand may outlive its shell, as after `nohup`.
STARTERS = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID")
PR_SET_PDEATHSIG = 1


def follow_launcher(environment: MutableMapping[str, str]) -> None:
    """In a rank started by our launcher, torchrun or srun: its end is the end of this process too."""
    launcher = environment.pop(LAUNCHER, "")  # not for the processes that this one starts
    if launcher.isdecimal():
        follow_parent(int(launcher))
    elif any(name in environment for name in STARTERS):
        follow_parent(os.getppid())


def follow_parent(parent: int) -> None:
    """Be killed when the parent ends, however it ends; without a word where the system has no such thing."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError, TypeError):
        return
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)
