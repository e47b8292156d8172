"""Start one rank per GPU, or as many as asked for on the CPU, through torchrun's own launcher.

All of such a run is on one machine, and all its sockets listen on the loopback (`rendezvous.py`, `comm/meeting.py`).
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Container, Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep.comm.meeting import LOOPBACK, stay_on_loopback
from lockstep.comm.seal import SECRET, make_secret
from lockstep.engine.rendezvous import register_rendezvous
from lockstep.engine.stopped import end_stopped_ranks
from lockstep.errors import LockstepError
from lockstep.processes import LAUNCHER
from lockstep.restarts import OUTCOME, read_outcome

# An interrupted rank finishes its step and writes a checkpoint first; the launcher's own 30 s can cut that short.
SHUTDOWN_TIMEOUT_S = 300


def choose_num_ranks(asked: int | None) -> int:
    """`asked`, or one rank per GPU, or one on the CPU."""
    if asked is not None:
        if asked < 1:
            raise LockstepError(f"--ranks {asked} is not possible; ask for 1 rank or more.")
        return asked
    return max(1, torch.cuda.device_count() if has_gpu() else 0)


def has_gpu() -> bool:
    """Whether a rank here would have a GPU."""
    return torch.cuda.is_available()


def launch_ranks(num_ranks: int, arguments: Sequence[str], restarts: int = 0) -> int:
    """Run `lockstep ARGUMENTS` as `num_ranks` ranks on this node and return the exit status.

    When a rank is lost, all are started again, at most `restarts` times, and go on from the last checkpoint. Ranks that
    end of their own will, asked to stop or for a reason that would come again, leave word of it (`restarts.py`).
    """
    with tempfile.NamedTemporaryFile(prefix="lockstep-outcome-") as outcome:
        if restarts:
            os.environ[OUTCOME] = outcome.name
        return _launch(num_ranks, arguments, restarts) or read_outcome(Path(outcome.name))


def _launch(num_ranks: int, arguments: Sequence[str], restarts: int) -> int:
    # Its warnings are about processes it closes because we asked it to.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    stay_on_loopback(os.environ)  # which the ranks inherit, and with it the run's secret
    os.environ[SECRET] = make_secret()
    os.environ[LAUNCHER] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=register_rendezvous(),
        max_restarts=restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks write to our own output; no folders left in /tmp
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # passed on to the ranks
        local_addr=LOOPBACK,
    )
    with end_stopped_ranks(num_ranks) as ended:
        try:
            elastic_launch(config, sys.executable)("-m", "lockstep", *arguments)
        except SignalException as stop:
            return 128 + int(stop.sigval)
        except ChildFailedError as failure:
            return _explain(failure, ended)
    return 0


def _explain(failure: ChildFailedError, ended: Container[int]) -> int:
    """A rank that failed has said why itself; one that was killed could not."""
    rank, first = failure.get_first_failure()
    if first.pid in ended:
        raise LockstepError(
            f"Rank {rank} was stopped while others ended, so it was killed; "
            "if the run was not finished, go on from the last checkpoint with --resume."
        )
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        raise LockstepError(
            f"Rank {rank} was killed by {name}, so the others were stopped; "
            "go on from the last checkpoint with --resume."
        )
    return int(first.exitcode)
