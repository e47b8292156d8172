"""Faults, done to a run: signals, the disk, a file that does not come, the network; and their mending."""

import signal
import time

from lockstep.bench.chaos.faults import LAUNCHER, Fault
from lockstep.bench.chaos.find import find_rank, send, wait_until_gone
from lockstep.bench.chaos.reads import SlowFile
from lockstep.bench.chaos.runs import DATA, TIMEOUT_S, Part, Run
from lockstep.processes import APART_S

PAUSE_S = 1.0  # of what is stopped, held or cut off for a while
SLOW_S = 1.2  # of a disk
ARRIVAL_S = 6.0  # until somebody reads a file of the data: an epoch takes less
LATE_S = 1.0
AGAIN_S = APART_S + 0.1  # between two signals that are not taken for one


class Striker:
    """Does faults to one run, and undoes what they took from everybody."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._file: SlowFile | None = None

    def strike(self, fault: Fault, part: Part) -> bool:
        """Do it; False if its victim is gone already, or nobody came to meet it."""
        run, disk = self._run, self._run.place.disk
        pid = part.launcher if fault.target == LAUNCHER else find_rank(run.marker, fault.target)
        if pid is None:
            return False
        match fault.kind:
            case "full disk":
                disk.fill()
            case "read-only disk":
                disk.spoil()
            case "slow disk":
                disk.slow_down(SLOW_S)
            case "held interpreter":
                (run.hold / str(fault.target)).write_text(str(int(PAUSE_S * 1e6)))
            case "blocked read" | "late read":
                return self._block(fault, part)
            case "cut network" | "cut network, mended":
                self._cut(fault)
            case "lost store":
                send(pid, signal.SIGKILL)
            case _:
                send_signals(fault, pid)
        return True

    def mend(self, fault: Fault) -> None:
        """Give back what a fault took from everybody."""
        run = self._run
        if fault.kind == "full disk":
            run.place.disk.empty()
        elif fault.kind == "read-only disk":
            wait_until_gone(run.marker)
            run.place.disk.renew()
        elif fault.kind == "cut network" and run.cluster is not None:
            run.cluster.mend(self._node(fault))
        elif self._file is not None:
            self._file.close()
            self._file = None

    @property
    def blocked(self) -> str:
        """The name of the file that does not come; empty if there is none."""
        return self._file.path.name if self._file else ""

    def _block(self, fault: Fault, part: Part) -> bool:
        """Put a slow file in the place of one that will be read, and wait for somebody to read it.

        One that never comes is of the validation set: left out there, it changes no weight.
        """
        split, delay = ("val", None) if fault.kind == "blocked read" else ("train", LATE_S)
        files = sorted((self._run.place.cache / DATA / split).glob("*/*"))
        self._file = SlowFile(files[int(fault.choice * len(files))], delay)
        end = time.monotonic() + ARRIVAL_S
        while not self._file.num_reads and time.monotonic() < end and not part.is_over:
            time.sleep(0.01)
        if self._file.num_reads:
            return True
        self._file.close()
        self._file = None
        return False

    def _cut(self, fault: Fault) -> None:
        """Pull a node's cable, and put it back for a fault that is mended in time."""
        cluster = self._run.cluster
        assert cluster is not None
        cluster.cut(self._node(fault))
        if fault.kind == "cut network, mended":
            time.sleep(PAUSE_S)
            cluster.mend(self._node(fault))

    def _node(self, fault: Fault) -> int:
        return fault.target * 2 // self._run.num_ranks


def send_signals(fault: Fault, pid: int) -> None:
    """One signal, the same again, or another that undoes it."""
    name, _, more = fault.kind.partition(",")
    number = signal.Signals[name.removesuffix(" twice")]
    send(pid, number)
    if name.endswith("twice"):
        time.sleep(AGAIN_S)
        send(pid, number)
    if more:
        time.sleep(PAUSE_S)
        send(pid, signal.SIGCONT)
    elif fault.is_survived:  # a launcher, for longer than anybody waits for anything; a stopped one never ends
        time.sleep(TIMEOUT_S + 2)
        send(pid, signal.SIGCONT)
