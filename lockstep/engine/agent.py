"""torch's elastic agent with ranks as plain child processes: who has ended, who is to be stopped, who starts again.

The agent's own loop decides: it monitors, and starts all ranks again when one is lost. Here is what it leaves open, for
ranks that a template forks (`template.py`) in places that may fail (`places.py`).
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.engine.places import Places
from lockstep.processes import say_last

STOP_S = 300  # an interrupted rank finishes its step and writes a checkpoint first
LAST_WORDS_S = 30.0  # for ranks that are left when another is lost, to say who it was
RESTART_S = 0.5  # the same when all are about to start again
STOPPED_S = 8.0  # someone may have stopped a rank for a look
POLL_S = 0.01

Start = Callable[[Mapping[str, str]], int]  # environment → process


class Agent(SimpleElasticAgent):
    """Ranks of this machine, started by `start`, watched, stopped and started again."""

    def __init__(self, spec: WorkerSpec, start: Start, places: Places, read_end: Callable[[], int] = lambda: 0) -> None:
        """`read_end`: the exit status that ranks have left which are not to be started again; 0 while there is none."""
        super().__init__(spec)
        self._read_end = read_end
        self._start = start
        self._places = places
        self._num_starts = 0
        self._ended: dict[int, int] = {}  # exit codes by process
        self._stopped_since: dict[int, float] = {}
        self._looked_s = time.monotonic()
        self._is_restarting = False
        self.killed: set[int] = set()  # ranks that were stopped (SIGSTOP) while others had ended

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ended.clear()
        self._num_starts += 1
        shared = {**os.environ, **self._places.describe()}
        return {
            worker.local_rank: self._start({**shared, **self._describe(worker_group, worker)})
            for worker in worker_group.workers
        }

    def _describe(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        """What torchrun tells a rank."""
        spec = group.spec
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "GROUP_RANK": str(group.group_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self._num_starts - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._reap()
        ranks = {worker.id: worker for worker in worker_group.workers}
        codes = {pid: self._ended[pid] for pid in ranks if pid in self._ended}
        self._end_stopped(ranks.keys() - codes.keys() if codes else set())
        # Killed comes before failed: those that fail have lost the one that was killed.
        lost = sorted((code, pid) for pid, code in codes.items() if code)
        if lost:
            if self._read_end():  # they have lost one that ended of its own will
                self._remaining_restarts = 0
            failures = {
                ranks[pid].global_rank: ProcessFailure(ranks[pid].local_rank, pid, code, "") for code, pid in lost
            }
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if len(codes) < len(ranks):
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(r.global_rank for r in ranks.values())
        )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Also after a change of places; a rank that was lost is remembered, and said."""
        failures = self._monitor_workers(worker_group).failures
        if failures:
            rank, failure = next(iter(failures.items()))
            is_left_out = self._places.lose(failure.local_rank)
            how = describe_end(failure.exitcode)
            count = self._places.num_ranks
            less = f"the run goes on without its place, on {count} rank{'' if count == 1 else 's'}"
            who = less if is_left_out else "all ranks start again"
            left = f"{self._remaining_restarts} more restart{'' if self._remaining_restarts == 1 else 's'} allowed"
            # Not by print: a terminal that is closed or not read must not keep ranks from starting again.
            say_last(f"lockstep: Rank {rank} {how}; {who} ({left}).")
        else:
            self._places.restore()
        worker_group.spec.local_world_size = self._places.num_ranks
        self._is_restarting = True
        super()._restart_workers(worker_group)
        self._is_restarting = False

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        has_lost = bool(self._monitor_workers(worker_group).failures)
        patience = STOP_S if not has_lost else RESTART_S if self._is_restarting else LAST_WORDS_S
        self._stop(worker_group, signal.SIGTERM, patience)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self._stop(self._worker_group, death_sig, STOP_S)

    def _stop(self, worker_group: WorkerGroup, asking: signal.Signals, patience_s: float) -> None:
        """Ask, wait, force."""
        pids = [worker.id for worker in worker_group.workers if worker.id is not None]
        for number, wait_s in ((asking, patience_s), (signal.SIGKILL, LAST_WORDS_S)):
            self._reap()
            for pid in pids:
                if pid not in self._ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            end = time.monotonic() + wait_s
            while not self._ended.keys() >= set(pids) and time.monotonic() < end:
                time.sleep(POLL_S)
                self._reap()

    def _reap(self) -> None:
        """Take note of every child that has ended: ranks, and orphans of theirs that this process has inherited."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended[found[0]] = os.waitstatus_to_exitcode(found[1])

    def _end_stopped(self, left: set[int]) -> None:
        """Once some have ended, nobody waits for a stopped rank (SIGSTOP) but this process, and it would for ever."""
        now = time.monotonic()
        # Time in which this process was stopped too, as by Ctrl-Z, does not count.
        gap, self._looked_s = now - self._looked_s, now
        since = {pid: start + max(0.0, gap - 1.0) for pid, start in self._stopped_since.items()}
        self._stopped_since = {pid: since.get(pid, now) for pid in left if _read_state(pid) == "T"}
        for pid, start in self._stopped_since.items():
            if now - start >= STOPPED_S:
                self.killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def describe_end(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"failed with status {code}"
    return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"


def _read_state(pid: int) -> str:
    """The system's letter for what a process does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
