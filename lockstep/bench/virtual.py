"""A cluster on one machine: nodes are Linux network namespaces joined by a switch, links are as slow as asked for.

The real program runs in it as real processes over a real network. Nothing is laid out in the machine's own network:
the switch, too, lives in a namespace, so two clusters never meet. Without the rights to lay one out, the same ranks
run on one host and only pretend to be on several nodes.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from lockstep.bench import leftovers
from lockstep.comm.meeting import INTERFACES, find_loopback
from lockstep.comm.seal import SECRET, make_secret
from lockstep.errors import LockstepError

INTERFACE = "eth0"
FIRST_PORT = 29500
# A queue that never overflows: buffers of all connections fit, so that the network is slow but loses nothing.
QUEUE_BYTES = 256 << 20
# Of the kinds every kernel has and allows in a namespace, the one that fills such a queue steadily; no pause slows it.
SETTINGS = "cd /proc/sys/net/ipv4 && echo reno >tcp_congestion_control; echo 0 >tcp_slow_start_after_idle"
# Nodes have addresses but no names, of which torch warns once for every connection.
DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

Process = subprocess.Popen[Any]


class VirtualCluster:
    """`num_nodes` nodes of `ranks_per_node` ranks; leaving the context ends every rank and removes every trace."""

    def __init__(
        self,
        num_nodes: int,
        ranks_per_node: int,
        gbit_per_s: float | None = None,
        delay_ms: float | None = None,
        slow: Mapping[int, float] | None = None,
        *,
        pretend: bool = False,
    ) -> None:
        """Links carry `gbit_per_s` in each direction, those of nodes in `slow` their own; None is without limit."""
        if num_nodes < 1 or ranks_per_node < 1:
            raise LockstepError(f"{num_nodes} nodes of {ranks_per_node} ranks are not possible; ask for 1 or more.")
        if unknown := [node for node in slow or {} if not 0 <= node < num_nodes]:
            raise LockstepError(f"Node {unknown[0]} cannot be slow: the nodes are numbered 0 to {num_nodes - 1}.")
        limits: dict[int, float | None] = {**dict.fromkeys(range(num_nodes), gbit_per_s), **(slow or {})}
        if any(limit is not None and limit <= 0 for limit in limits.values()) or (delay_ms or 0) < 0:
            raise LockstepError("A link's limit must be above 0 Gbit/s and its delay not below 0 ms.")
        self.num_nodes = num_nodes
        self.ranks_per_node = ranks_per_node
        self.limits = limits
        self.delay_ms = delay_ms
        self.is_pretended = pretend
        self.notices: list[str] = []  # what was asked for and cannot be had, a sentence each
        self.name = leftovers.name_cluster()
        self._processes: list[Process] = []
        self._watcher: Process | None = None  # removes what is left if this process dies first
        self._next_port = FIRST_PORT
        self._has_handler = False

    @classmethod
    def open(
        cls,
        num_nodes: int,
        ranks_per_node: int,
        gbit_per_s: float | None = None,
        delay_ms: float | None = None,
        slow: Mapping[int, float] | None = None,
    ) -> Self:
        """A cluster to enter: of namespaces where this machine allows them, of pretended nodes where not."""
        try:
            with cls(1, 1, gbit_per_s=1.0):
                pass
        except LockstepError as error:
            cluster = cls(num_nodes, ranks_per_node, gbit_per_s, delay_ms, slow, pretend=True)
            reason = str(error).split("; ")[0]
            cluster.notices.append(
                f"{reason}, so all ranks run on one host without limits and only pretend to be apart."
            )
            return cluster
        return cls(num_nodes, ranks_per_node, gbit_per_s, delay_ms, slow)

    def __enter__(self) -> Self:
        try:
            self._handle_termination()
            leftovers.remove_leftovers()
            self._watcher = leftovers.start_watcher(self.name)
            if not self.is_pretended:
                self._lay_out()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every rank and remove the network; may be called again."""
        for process in self._processes:
            _kill_group(process.pid)
        for process in self._processes:
            process.wait()
        leftovers.remove_cluster(self.name)
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None
        if self._has_handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._has_handler = False

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        one_per_node: bool = False,
        **options: Any,
    ) -> list[Process]:
        """Start every rank as a process in its node, with torchrun's variables; `options` are Popen's.

        With `one_per_node`, one process starts in each node and is to become its ranks by `fork_ranks`.
        """
        port, secret = self._choose_port(), make_secret()
        started = []
        for rank in range(0, self.num_nodes * self.ranks_per_node, self.ranks_per_node if one_per_node else 1):
            node = rank // self.ranks_per_node
            prefix = [] if self.is_pretended else ["ip", "netns", "exec", self._namespace(node)]
            variables = DEFAULTS | dict(env or {}) | self._describe_rank(rank, port) | {SECRET: secret}
            # A group of its own, so that a rank takes its own children along, and Ctrl-C reaches only the parent.
            process = subprocess.Popen(
                [*prefix, *argv], env=_clean_environment() | variables, process_group=0, **options
            )
            self._processes.append(process)
            started.append(process)
        return started

    def wait(self, processes: Sequence[Process], timeout_s: float | None = None) -> None:
        """Return when all have ended well; as soon as one has not, end the others and say which it was."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pending = list(processes)
        while pending:
            for process in list(pending):
                status = process.poll()
                if status is None:
                    continue
                pending.remove(process)
                if status:
                    _kill_groups(pending)
                    raise LockstepError(self._explain(process, processes, status))
            if deadline is not None and time.monotonic() > deadline:
                _kill_groups(pending)
                raise LockstepError(f"The ranks of the virtual cluster did not end within {timeout_s:g} s.")
            time.sleep(0.02)

    def limit_node(self, node: int, gbit_per_s: float | None) -> None:
        """Set a node's link, in both directions; ranks may be running."""
        self.limits[node] = gbit_per_s
        if not self.is_pretended:
            self._shape(self._namespace(node), INTERFACE, gbit_per_s)
            self._shape(self._switch, f"node{node}", gbit_per_s)

    def cut(self, node: int) -> None:
        """Pull a node's cable out of the switch; ranks may be running."""
        _run_batch("ip", [f"link set node{node} down"], self._switch)

    def mend(self, node: int) -> None:
        """Put it back."""
        _run_batch("ip", [f"link set node{node} up"], self._switch)

    def address(self, node: int) -> str:
        """A node's address, known inside the cluster only."""
        return "127.0.0.1" if self.is_pretended else f"10.213.{node // 250}.{node % 250 + 1}"

    def describe(self) -> str:
        """What was laid out, and a sentence for each thing that was asked for and cannot be had."""
        links = {f"{limit:g} Gbit/s" if limit else "no limit" for limit in self.limits.values()}
        kind = "pretended on one host" if self.is_pretended else f"with links of {', '.join(sorted(links))}"
        return "\n".join([f"{self.num_nodes} nodes of {self.ranks_per_node} ranks, {kind}.", *self.notices])

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _namespace(self, node: int) -> str:
        return f"{self.name}-node{node}"

    def _lay_out(self) -> None:
        """A namespace for each node, one for the switch, and a cable from each node to the switch."""
        names = [self._namespace(node) for node in range(self.num_nodes)]
        _run_batch("ip", [f"netns add {name}" for name in (self._switch, *names)])
        lines = ["link add switch type bridge", "link set switch up"]
        for node, name in enumerate(names):
            lines.append(f"link add node{node} type veth peer name {INTERFACE} netns {name}")
            lines.append(f"link set node{node} master switch addrgenmode none up")
        _run_batch("ip", lines, self._switch)
        for node, name in enumerate(names):
            _run_batch(
                "ip",
                [
                    "link set lo up",
                    # Gloo takes the interface's first address: let there be only one.
                    f"link set {INTERFACE} addrgenmode none up",
                    f"address add {self.address(node)}/16 dev {INTERFACE}",
                ],
                name,
            )
            subprocess.run(["ip", "netns", "exec", name, "sh", "-c", SETTINGS], capture_output=True, check=False)
            self.limit_node(node, self.limits[node])

    def _shape(self, namespace: str, interface: str, gbit_per_s: float | None) -> None:
        """Limit what `interface` sends; delay it on a node's side, so that it counts once on each way."""
        with contextlib.suppress(LockstepError):  # there may be nothing to remove
            _run_batch("tc", [f"qdisc del dev {interface} root"], namespace)
        parent = "root"
        if gbit_per_s is not None:
            # What may pass at once: a millisecond's worth, so that short messages meet the limit too.
            burst = max(16 << 10, int(gbit_per_s * 1e9 / 8 / 1e3))
            rate = f"rate {int(gbit_per_s * 1e9)}bit burst {burst} limit {QUEUE_BYTES}"
            _run_batch("tc", [f"qdisc add dev {interface} root handle 1: tbf {rate}"], namespace)
            parent = "parent 1:1"
        if self.delay_ms and interface == INTERFACE and not self.notices:
            delay = f"delay {int(self.delay_ms * 1e3)}us limit {1 << 20}"
            try:
                _run_batch("tc", [f"qdisc add dev {interface} {parent} handle 2: netem {delay}"], namespace)
            except LockstepError:
                self.notices.append(
                    f"This kernel has no netem, so links are not delayed by {self.delay_ms:g} ms; bandwidth is limited."
                )

    def _choose_port(self) -> int:
        """Where the ranks of one start meet: namespaces are ours alone, a host's ports are not."""
        if self.is_pretended:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                return int(probe.getsockname()[1])
        self._next_port += 1
        return self._next_port

    def _describe_rank(self, rank: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_nodes * self.ranks_per_node),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            **dict.fromkeys(INTERFACES, find_loopback() if self.is_pretended else INTERFACE),
            "LOCKSTEP_NODE": str(rank // self.ranks_per_node),
            "NODE_ADDRESS": self.address(rank // self.ranks_per_node),
            leftovers.MARKER: self.name,
        }

    def _explain(self, process: Process, processes: Sequence[Process], status: int) -> str:
        number = processes.index(process)
        is_whole_node = len(processes) == self.num_nodes
        who = f"Node {number}" if is_whole_node else f"Rank {number} on node {number // self.ranks_per_node}"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{who} of the virtual cluster {how}, so the others were stopped; see what it printed above."

    def _handle_termination(self) -> None:
        """Leave in order on SIGTERM, unless the program has a handler of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit_on_signal)
            self._has_handler = True


def fork_ranks(function: Callable[[], None]) -> int:
    """Be every rank of this node: fork one child for each, which loads no module again, and wait for all.

    For a process that was started with `one_per_node`; returns its exit status.
    """
    first = int(os.environ["RANK"])
    children: set[int] = set()
    for local_rank in range(int(os.environ["LOCAL_WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank)}
            _run_and_exit(function)
        children.add(pid)
    while children:
        pid, status = os.wait()
        children.discard(pid)
        if status:
            for child in children:
                os.kill(child, signal.SIGKILL)
            return 1
    return 0


def _run_and_exit(function: Callable[[], None]) -> None:
    status = 1
    try:
        function()
        status = 0
    except LockstepError as error:
        print(f"lockstep: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _kill_groups(processes: Sequence[Process]) -> None:
    for process in processes:
        _kill_group(process.pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _clean_environment() -> dict[str, str]:
    """This process's own, less what says that it is itself a rank."""
    ours = ("TORCHELASTIC_", leftovers.MARKER)
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)}


def _run_batch(program: str, lines: Sequence[str], namespace: str | None = None) -> None:
    """Run lines of `ip` or `tc` in one process."""
    if shutil.which(program) is None:
        raise LockstepError(f"A virtual cluster needs the program {program}; install iproute2.")
    argv = [program, *(["-n", namespace] if namespace else []), "-batch", "-"]
    done = subprocess.run(argv, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise LockstepError(
            f"The virtual cluster could not be laid out ({shlex.join(argv[:-2])} said: {said[0]}); run as root."
        )
