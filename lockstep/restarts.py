"""What ranks and whoever starts them again owe each other: a lost run goes on, a finished quarrel does not. Torch-free.

torchrun's agent starts all ranks again when one fails, and Slurm requeues a job: such ranks go on from the last
checkpoint. An agent cannot tell a rank that was lost from one that ended of its own will, asked to stop or for a reason
that would come again. Such ranks leave their exit status in a file of the launcher's and end as if all were well.

A rank that is started again must find its own run and no other: by the name of its job, where the run's folder was not
given.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
OUTCOME = "LOCKSTEP_OUTCOME"  # that file
RUN_ID = "TORCHELASTIC_RUN_ID"
NO_IDS = ("", "none", "static")  # torchrun's word where nobody gave --rdzv-id: that of every other job too
PLAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")  # what may stand in a file's name as it is


def count_restarts(environment: Mapping[str, str]) -> int:
    """How often this rank has been started again."""
    return max(_read_count(environment, name) for name in RESTART_COUNTS)


def _read_count(environment: Mapping[str, str], name: str) -> int:
    count = environment.get(name, "")
    return int(count) if count.isascii() and count.isdigit() else 0


def can_restart(environment: Mapping[str, str]) -> bool:
    """Whether an agent would start this rank again on the same node."""
    return _read_count(environment, "TORCHELASTIC_MAX_RESTARTS") > 0


def name_job(environment: Mapping[str, str]) -> str:
    """The job of a rank that may be started again, by a name that stays over restarts; empty where there is none."""
    run = environment.get(RUN_ID, "")
    if run not in NO_IDS and (can_restart(environment) or count_restarts(environment)):
        return f"job-{_make_plain(run)}"
    job, step = (environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # A job's steps are numbered alike when it is requeued, and each may be a run.
    return f"slurm-{_make_plain(f'{job}.{step}' if step else job)}" if job else ""


def _make_plain(name: str) -> str:
    return name if PLAIN.fullmatch(name) else hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]


def is_started_by_agent(environment: Mapping[str, str]) -> bool:
    """Whether an agent of torchrun's starts this rank again, and nobody has started the agent again.

    Our own launcher looks into the folder before it starts any rank.
    """
    is_requeued = _read_count(environment, "SLURM_RESTART_COUNT") > 0
    return RUN_ID in environment and can_restart(environment) and OUTCOME not in environment and not is_requeued


def read_agent_start() -> float:
    """When the agent above this process was started, in seconds of the clock; 0 where the system does not tell."""
    try:
        process = os.getppid()
        # Between an agent and its rank there may be a shell, which has the agent's word too.
        while f"\0{RUN_ID}=".encode() in b"\0" + Path(f"/proc/{process}/environ").read_bytes():
            process = int(_read_status(process)[1])
        ticks = int(_read_status(process)[19])
        lines = Path("/proc/stat").read_text().splitlines()
        booted_s = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
        return booted_s + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return 0.0


def _read_status(process: int) -> list[str]:
    """What the kernel says of a process, from its state on: the name before that may hold anything."""
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()


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
