"""One run in a folder of its own, started and resumed until it is finished: on one machine, or on two nodes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lockstep.bench.chaos import hook
from lockstep.bench.chaos.disk import Disk
from lockstep.bench.chaos.faults import TWO_NODES, Way
from lockstep.bench.chaos.find import MARKER, POLL_S, find_processes, find_ranks, kill
from lockstep.bench.virtual import VirtualCluster
from lockstep.errors import LockstepError
from lockstep.events import Event, StepDone, read_events
from lockstep.processes import start_hearing

TIMEOUT_S = 6.0  # comm.timeout_s of the runs
READ_TIMEOUT_S = 3.0
GRACE_S = 15.0  # beyond the timeout, nothing may take longer to end
RESTARTS = 1000
LOOK_S = 2.0  # between two looks at who is left
SETTINGS = (
    "data.train_images=416",
    "data.val_images=100",
    "data.image_size=32",
    "data.eval_resize=36",
    "data.bad_share=0.05",
    f"data.read_timeout_s={READ_TIMEOUT_S:g}",
    "model.width=8",
    "optim.warmup=0st",
    "train.global_batch=26",
    "train.duration=5ep",
    "train.eval_every=1ep",
    "train.checkpoint_every=6st",
    "train.log_every=1",
    # Measured, so that there is a phase of it, but with one outcome: weights can be compared to the last bit.
    "comm.tune_s=1",
    "comm.algorithm=flat",
    "comm.fusion=threshold",
    "comm.overlap=on",
    f"comm.timeout_s={TIMEOUT_S:g}",
)
UNSAVED = "could not be written"  # in a run's last words
DATA = "generated-v1-416x100"  # in the cache: where those images lie
# What torchrun's agent of a node runs as. Only what its ranks say counts: its own report of a failed rank is a
# traceback. The ranks' variables are for it to set. By itself it waits ten minutes for a node that was killed before it
# came, and only its own options shorten that.
AGENT = (
    "exec env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE "
    '"$PYTHON" -m torch.distributed.run --nnodes=2 --nproc-per-node="$LOCAL_WORLD_SIZE" {meeting} --no-python '
    """sh -c 'exec "$PYTHON" -m lockstep "$@" >>"$OUTPUT" 2>&1' lockstep "$@" """
)
# How agents meet, once and for all, or as often as one of them has lost a rank.
MEETING: dict[Way, str] = {
    "two nodes": (
        '--rdzv-backend=static --node-rank="$LOCKSTEP_NODE" --rdzv-conf=timeout=12 '
        '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    ),
    "two nodes, restarts": (
        '--rdzv-backend=c10d --rdzv-id=chaos --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --local-addr="$NODE_ADDRESS" '
        '--rdzv-conf="is_host=$((LOCKSTEP_NODE == 0)),join_timeout=12,read_timeout=12,keep_alive_interval=2,'
        f'keep_alive_max_attempt=4" --max-restarts={RESTARTS}'
    ),
}


class Place:
    """What runs of one command share: a disk for their folders, and a folder beside it for all else."""

    def __init__(self, disk: Disk, beside: Path) -> None:
        self.disk = disk
        self.beside = beside
        self.cache = beside / "cache"
        self.site = beside / "site"
        self.site.mkdir()
        start_hearing()  # faults are signals, also where this command runs in the background
        (self.site / "sitecustomize.py").write_text(hook.TEXT)


@dataclass
class Part:
    """What was started, until it ends."""

    processes: list["subprocess.Popen[Any]"]  # the launcher, or an agent for each node
    begun_s: float
    num_events: int  # that the log had before

    @property
    def is_over(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    @property
    def launcher(self) -> int:
        """The process that holds the store."""
        return self.processes[0].pid

    def wait(self, seconds: float) -> bool:
        """Whether it is over within that time."""
        end = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < end:
            time.sleep(POLL_S)
        return self.is_over

    def kill(self, marker: str) -> None:
        """End everything."""
        kill([process.pid for process in self.processes if process.poll() is None])
        kill(find_processes(marker))
        self.wait(10)


class Run:
    """A run that goes on in one of the ways; inside its context, if it needs two nodes."""

    def __init__(self, number: int, place: Place, num_ranks: int, way: Way, settings: Sequence[str] = SETTINGS) -> None:
        self.number = number
        self.place = place
        self.num_ranks = num_ranks
        self.way = way
        self.folder = place.disk.folder / f"run-{number:04d}"
        self.marker = f"{os.getpid()}-{number}"
        self.hold, self.temporary = place.beside / f"hold-{number}", place.beside / f"tmp-{number}"
        self.hold.mkdir()
        self.temporary.mkdir()
        self.num_hung = 0
        self.problems: list[str] = []  # seen on the way
        self.cluster: VirtualCluster | None = None
        self._settings = settings
        self._paths = [path for path in (os.environ.get("PYTHONPATH"),) if path]
        self._log = place.beside / f"output-{number}"
        self._log.touch()

    def __enter__(self) -> Self:
        if self.way in TWO_NODES:
            self.cluster = VirtualCluster(2, self.num_ranks // 2)
            self.cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill(find_processes(self.marker))  # whatever ends this command ends its runs
        if self.cluster is not None:
            self.cluster.close()

    def start(self) -> Part:
        """Start the program, or have it go on if it has begun; one killed before it left a word is started again."""
        resume = (self.folder / "config.toml").is_file()
        settings = [f"--set={setting}" for setting in self._settings]
        target = [str(self.folder), "--resume"] if resume else ["quickstart", f"--out={self.folder}", *settings]
        variables = {
            MARKER: self.marker,
            hook.FOLDER: str(self.hold),
            "LOCKSTEP_CACHE": str(self.place.cache),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join([str(self.place.site), str(Path(__file__).parents[3]), *self._paths]),
        }
        (self.hold / hook.TAKEN_OVER).unlink(missing_ok=True)
        begun, num_events = time.monotonic(), len(self.events())
        return Part(self._start(["train", *target], variables), begun, num_events)

    def _start(self, arguments: list[str], variables: dict[str, str]) -> list["subprocess.Popen[Any]"]:
        if self.cluster is not None:
            variables |= {"PYTHON": sys.executable, "OUTPUT": str(self._log), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"}
            # Else ranks would meet in the agents' own store, in parts of it that agents count apart.
            variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            agent = AGENT.format(meeting=MEETING[self.way])
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            return self.cluster.start(["sh", "-c", agent, "agent", *arguments], variables, one_per_node=True, **quiet)
        restarts = [f"--restarts={RESTARTS}"] if self.way == "restarts" else []
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *arguments, f"--ranks={self.num_ranks}", *restarts],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                start_new_session=True,
            )
        return [process]

    def finish(self, part: Part, limit_s: float) -> int | None:
        """The exit status; None, and an end by force, if it does not come in time."""
        end = time.monotonic() + limit_s
        while not part.wait(max(0.0, min(LOOK_S, end - time.monotonic()))):
            if self._has_only_agents():
                part.kill(self.marker)
                return 0
            if time.monotonic() >= end:
                self.num_hung += 1
                part.kill(self.marker)
                return None
        return next((process.returncode for process in part.processes if process.returncode), 0)

    def _has_only_agents(self) -> bool:
        """Whether a finished run's ranks are gone: torchrun's agents wait minutes for each other over a cut network."""
        return self.cluster is not None and self.is_finished and not find_ranks(self.marker)

    def events(self) -> list[Event]:
        """What the run has said so far."""
        with contextlib.suppress(LockstepError):
            return read_events(self.folder / "events.jsonl")
        return []

    def has_said(self, kind: str, since: int) -> bool:
        """Whether a record of a kind is among those from number `since` on."""
        return any(event.kind == kind for event in self.events()[since:])

    def has_taken_over(self) -> bool:
        """Whether the part that was started last has come from Python's own start to Lockstep's code."""
        return (self.hold / hook.TAKEN_OVER).exists()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        return " / ".join(self.output.strip().splitlines()[-3:])

    @property
    def last_step(self) -> int:
        return max((event.step for event in self.events() if isinstance(event, StepDone)), default=0)

    @property
    def is_finished(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads((self.folder / "summary.json").read_text())["status"] == "finished")
        return False

    @property
    def is_unsaved(self) -> bool:
        """Whether it ended because the disk was full for its last checkpoint; its launcher rightly lets it."""
        return UNSAVED in self.last_words

    def interrupt(self, part: Part) -> None:
        """Ask it to stop."""
        part.processes[0].send_signal(signal.SIGINT)

    def remove(self) -> None:
        """Leave nothing of it."""
        for folder in (self.folder, self.hold, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        self._log.unlink(missing_ok=True)
