"""What ranks and whoever starts them again owe each other: a lost run goes on, a finished quarrel does not. Torch-free.

torchrun's agent starts all ranks again when one fails, and Slurm requeues a job: such ranks go on from the last
checkpoint. An agent cannot tell a rank that was lost from one that ended of its own will, asked to stop or for a reason
that would come again. Such ranks leave their exit status in a file of the launcher's and end as if all were well.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
OUTCOME = "LOCKSTEP_OUTCOME"  # that file


def count_restarts(environment: Mapping[str, str]) -> int:
    """How often this rank has been started again."""
    counts = [environment.get(name, "") for name in RESTART_COUNTS]
    return max((int(count) for count in counts if count.isascii() and count.isdigit()), default=0)


def can_restart(environment: Mapping[str, str]) -> bool:
    """Whether an agent would start this rank again on the same node."""
    most = environment.get("TORCHELASTIC_MAX_RESTARTS", "")
    return most.isascii() and most.isdigit() and int(most) > 0


def leave_outcome(status: int, environment: Mapping[str, str]) -> int:
    """The exit status of a rank that ends for good: 0 where an agent would start it again; the launcher is told it."""
    file = environment.get(OUTCOME)
    if not file or not status:
        return status
    with contextlib.suppress(OSError):
        Path(file).write_text(str(status))
        return 0
    return status


def read_outcome(file: Path) -> int:
    """The status that ranks left in a file; 0 where they left none."""
    try:
        return int(file.read_text() or 0) % 256
    except (OSError, ValueError):
        return 0
