"""Start one rank per GPU, or as many as asked for on the CPU, under torch's elastic agent.

All of such a run is on one machine, and all its sockets listen on the loopback (`rendezvous.py`, `comm/meeting.py`).
"""

import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.comm.meeting import stay_on_loopback
from lockstep.comm.seal import SECRET, make_secret
from lockstep.engine.agent import Agent, Start, describe_end
from lockstep.engine.places import Places
from lockstep.engine.rendezvous import LoopbackRendezvous
from lockstep.engine.template import Template
from lockstep.errors import LockstepError
from lockstep.processes import LAUNCHER, answer_signals
from lockstep.restarts import OUTCOME, read_outcome

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
RANKS = re.compile(r"(-?\d{1,6})(?::(-?\d{1,6}))?")


def choose_num_ranks(asked: str | None) -> tuple[int, int]:
    """The least and the most ranks to train on: as `asked` ("4", or "2:8"), or one per GPU, or one on the CPU."""
    if asked is None:
        most = max(1, torch.cuda.device_count() if has_gpu() else 0)
        return most, most
    least, most = read_range(asked)
    if most > least and has_gpu():  # a range takes what there is
        most = max(least, min(most, torch.cuda.device_count()))
    return least, most


def read_range(asked: str) -> tuple[int, int]:
    """The least and the most ranks of "4" or "2:8"."""
    match = RANKS.fullmatch(asked)
    if not match:
        raise LockstepError(f"--ranks {asked[:40]} is not possible; ask for a number, or for a range such as 2:8.")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1 or most < least:
        raise LockstepError(f"--ranks {asked} is not possible; ask for 1 rank or more, the smaller number first.")
    return least, most


def has_gpu() -> bool:
    """Whether a rank here would have a GPU."""
    return torch.cuda.is_available()


def launch_ranks(template: Template, ranks: tuple[int, int], arguments: Sequence[str], restarts: int = 0) -> int:
    """Run `lockstep ARGUMENTS` as ranks on this node, at least and at most so many, and return the exit status.

    When a rank is lost, all are started again, at most `restarts` times, and go on from where they were. Ranks that end
    of their own will, asked to stop or for a reason that would come again, leave word of it (`restarts.py`).
    """
    with _open_outcome() as outcome:
        if restarts:
            os.environ[OUTCOME] = str(outcome)

        def start(environment: Mapping[str, str]) -> int:
            outcome.write_text("")  # whatever ranks have left there, they were told to start again
            return template.start(arguments, environment)

        return _launch(ranks, start, restarts, partial(read_outcome, outcome))


@contextmanager
def _open_outcome() -> Iterator[Path]:
    """A file for ranks to leave word in; in memory where there is such a thing: a kill leaves nothing behind."""
    if sys.platform != "linux":
        with tempfile.NamedTemporaryFile(prefix="lockstep-outcome-") as file:
            yield Path(file.name)
        return
    number = os.memfd_create("lockstep-outcome")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{number}")
    finally:
        os.close(number)


def _launch(ranks: tuple[int, int], start: Start, restarts: int, read_end: Callable[[], int]) -> int:
    # Its warnings are about ranks that it stops because we asked it to.
    logging.getLogger(SimpleElasticAgent.__module__).setLevel(logging.CRITICAL)
    stay_on_loopback(os.environ)  # which the ranks inherit, and with it the run's secret
    os.environ[SECRET] = make_secret()
    os.environ[LAUNCHER] = str(os.getpid())
    places = Places(*ranks, devices=_list_devices() if has_gpu() else ())
    spec = WorkerSpec(
        role="default",
        local_world_size=places.num_ranks,
        rdzv_handler=LoopbackRendezvous(uuid.uuid4().hex, places),
        entrypoint="lockstep",
        max_restarts=restarts,
        monitor_interval=0.05,
    )
    agent = Agent(spec, start, places, read_end)
    try:
        with _raise_signals():
            result = agent.run()
    except SignalException as stop:
        return 128 + int(stop.sigval)
    if status := read_end():  # by ranks that ended of their own will
        return status
    if result.is_failed():
        rank, failure = next(iter(result.failures.items()))
        return _explain(rank, failure.exitcode, was_stopped=failure.pid in agent.killed)
    return 0


def _explain(rank: int, code: int, *, was_stopped: bool) -> int:
    """A rank that failed has said why itself; one that was killed could not."""
    if was_stopped:
        raise LockstepError(
            f"Rank {rank} was stopped while others ended, so it was killed; "
            "if the run was not finished, go on from the last checkpoint with --resume."
        )
    if code < 0:
        raise LockstepError(
            f"Rank {rank} {describe_end(code)}, so the others were stopped; "
            "go on from the last checkpoint with --resume."
        )
    return code


def _list_devices() -> list[str]:
    """The GPUs that ranks here see, by the names that CUDA_VISIBLE_DEVICES has for them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def _raise_signals() -> Iterator[None]:
    """While inside, the first signal is an exception, by which the agent passes it on to the ranks and waits."""
    has_come = False

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            raise SignalException(f"signal {number}", sigval=signal.Signals(number))

    with answer_signals(PASSED_ON, note):
        yield
