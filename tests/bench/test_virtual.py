"""The virtual cluster: links are as slow as asked for, and nothing is left behind whatever happens."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.bench import leftovers
from lockstep.bench.virtual import VirtualCluster
from lockstep.errors import LockstepError

ROOT = str(Path(__file__).parents[2])
WRITE_VARIABLES = (
    'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $LOCKSTEP_NODE $OMP_NUM_THREADS $EXTRA" > "$FOLDER/$RANK"'
)
# Rank 0 takes bytes from rank 1, then gives as many back; each receiver writes what it measured in Gbit/s.
TRANSFER = """
import os, socket, sys, time
rank, address, size = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(sys.argv[1])
def receive(link):
    buffer, got, start = bytearray(1 << 20), 0, time.perf_counter()
    link.sendall(b"!")
    while got < size:
        got += link.recv_into(buffer, min(len(buffer), size - got))
    open(os.environ["FOLDER"] + f"/{rank}", "w").write(str(size * 8 / 1e9 / (time.perf_counter() - start)))
def send(link):
    link.recv(1)
    link.sendall(bytes(size))
if rank == 0:
    listener = socket.create_server((address, 5000))
    link, _ = listener.accept()
    receive(link)
    send(link)
else:
    while True:
        try:
            link = socket.create_connection((address, 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    send(link)
    receive(link)
"""
# A program that lays out a cluster, starts ranks, says so, and waits to be killed.
OWNER = """
import sys, time
from lockstep.bench.virtual import VirtualCluster
with VirtualCluster(2, 2, 0.1, pretend=sys.argv[1] == "pretend") as cluster:
    pids = [process.pid for process in cluster.start(["sleep", "120"])]
    print(cluster.name, cluster._watcher.pid, *pids, flush=True)
    time.sleep(120)
"""


@pytest.fixture(scope="module")
def rights() -> None:
    """Skip where namespaces cannot be made."""
    if VirtualCluster.open(1, 1).is_pretended:
        pytest.skip("needs the rights to create network namespaces")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def is_running(pid: int) -> bool:
    return leftovers._start_time(pid) != 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def start_owner(kind: str = "real") -> tuple["subprocess.Popen[str]", str, int, list[int]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": ROOT},
    )
    assert owner.stdout is not None
    name, watcher, *ranks = owner.stdout.readline().split()
    owner.stdout.close()
    return owner, name, int(watcher), [int(pid) for pid in ranks]


def transfer(cluster: VirtualCluster, folder: Path, size: int) -> tuple[float, float]:
    """Gbit/s from node 1 to node 0, and from node 0 to node 1."""
    argv = [sys.executable, "-I", "-S", "-c", TRANSFER, str(size)]
    cluster.wait(cluster.start(argv, {"FOLDER": str(folder)}), timeout_s=30)
    return float((folder / "0").read_text()), float((folder / "1").read_text())


@pytest.mark.usefixtures("rights")
def test_a_slow_nodes_link_is_limited_in_both_directions_and_a_free_one_is_not(tmp_path: Path) -> None:
    with VirtualCluster(2, 1, gbit_per_s=None, slow={1: 0.1}) as cluster:
        to_fast, to_slow = transfer(cluster, tmp_path, 5_000_000)
        assert 0.04 < to_fast < 0.13  # a machine that others use takes longer, and never less long
        assert 0.04 < to_slow < 0.13
        cluster.limit_node(1, None)
        assert min(transfer(cluster, tmp_path, 5_000_000)) > 0.3


@pytest.mark.usefixtures("rights")
def test_short_messages_meet_the_limit_too(tmp_path: Path) -> None:
    with VirtualCluster(2, 1, gbit_per_s=0.1) as cluster:
        assert max(transfer(cluster, tmp_path, 64 << 10)) < 0.15


@pytest.mark.parametrize("pretend", [False, True])
def test_every_rank_is_a_process_that_knows_its_place(tmp_path: Path, pretend: bool) -> None:
    if not pretend and VirtualCluster.open(1, 1).is_pretended:
        pytest.skip("needs the rights to create network namespaces")
    with VirtualCluster(2, 3, pretend=pretend) as cluster:
        processes = cluster.start(["sh", "-c", WRITE_VARIABLES], {"FOLDER": str(tmp_path), "EXTRA": "more"})
        assert len({process.pid for process in processes}) == 6
        cluster.wait(processes, timeout_s=60)
    found = {int(file.name): file.read_text().split() for file in tmp_path.iterdir()}
    assert found == {rank: [str(rank), "6", str(rank % 3), "3", str(rank // 3), "1", "more"] for rank in range(6)}


def test_one_process_in_each_node_becomes_its_ranks(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from lockstep.bench.virtual import fork_ranks\n"
        "def rank(): Path(os.environ['FOLDER'], os.environ['RANK']).write_text(os.environ['LOCAL_RANK'])\n"
        "sys.exit(fork_ranks(rank))"
    )
    with VirtualCluster(2, 3, pretend=True) as cluster:
        environment = {"FOLDER": str(tmp_path), "PYTHONPATH": ROOT}
        cluster.wait(cluster.start([sys.executable, "-c", program], environment, one_per_node=True), timeout_s=60)
    found = {int(file.name): int(file.read_text()) for file in tmp_path.iterdir()}
    assert found == {rank: rank % 3 for rank in range(6)}


@pytest.mark.usefixtures("rights")
def test_two_clusters_live_side_by_side_and_the_machines_own_network_sees_neither() -> None:
    own = ["ip", "-brief", "address"]
    before = subprocess.run(own, capture_output=True, text=True, check=True).stdout
    with VirtualCluster(2, 1) as one, VirtualCluster(2, 1) as other:
        assert one.name != other.name
        assert sum(name in namespaces() for name in (one.name, other.name)) == 2
        assert subprocess.run(own, capture_output=True, text=True, check=True).stdout == before
    assert one.name not in namespaces()
    assert other.name not in namespaces()


@pytest.mark.usefixtures("rights")
def test_an_exception_leaves_no_rank_and_no_namespace() -> None:
    cluster = VirtualCluster(2, 2, 1.0)
    processes = []

    def fail() -> None:
        with cluster:
            processes.extend(cluster.start(["sleep", "120"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert cluster.name not in namespaces()
    assert all(process.poll() == -signal.SIGKILL for process in processes)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("rights")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_owner_that_is_told_to_stop_has_cleaned_up_when_it_ends(number: signal.Signals) -> None:
    owner, name, watcher, ranks = start_owner()
    assert name in namespaces()
    owner.send_signal(number)
    assert owner.wait(60) != 0
    assert name not in namespaces()
    assert not any(is_running(pid) for pid in (watcher, *ranks))


@pytest.mark.usefixtures("rights")
def test_an_owner_that_is_killed_is_cleaned_up_after_by_its_watcher() -> None:
    owner, name, watcher, ranks = start_owner()
    owner.kill()
    owner.wait()
    assert wait_until(lambda: name not in namespaces() and not any(map(is_running, (watcher, *ranks))))


@pytest.mark.usefixtures("rights")
def test_what_an_owner_and_its_watcher_leave_when_both_are_killed_goes_with_the_next_cluster() -> None:
    owner, name, watcher, ranks = start_owner()
    os.kill(watcher, signal.SIGKILL)
    assert name in namespaces()
    owner.kill()
    owner.wait()
    with VirtualCluster(1, 1) as living:
        assert name not in namespaces()
        assert living.name in namespaces()
        leftovers.remove_leftovers()
        assert living.name in namespaces()
    assert wait_until(lambda: not any(map(is_running, ranks)))


def test_ranks_on_pretended_nodes_end_with_a_killed_owner_too() -> None:
    owner, _, watcher, ranks = start_owner("pretend")
    assert all(map(is_running, ranks))
    owner.kill()
    owner.wait()
    assert wait_until(lambda: not any(map(is_running, (watcher, *ranks))))


def test_a_rank_that_fails_ends_the_others_and_is_named() -> None:
    with VirtualCluster(2, 2, pretend=True) as cluster:
        processes = cluster.start(["sh", "-c", 'test "$RANK" = 2 && exit 3; sleep 120'])
        with pytest.raises(LockstepError, match=r"Rank 2 on node 1 .* status 3"):
            cluster.wait(processes, timeout_s=60)
        assert wait_until(lambda: all(process.poll() is not None for process in processes))


def test_ranks_that_do_not_end_in_time_are_ended() -> None:
    with VirtualCluster(1, 2, pretend=True) as cluster:
        processes = cluster.start(["sleep", "120"])
        with pytest.raises(LockstepError, match=r"did not end within 0\.1 s"):
            cluster.wait(processes, timeout_s=0.1)
        assert wait_until(lambda: all(process.poll() is not None for process in processes))


def test_without_the_programs_nodes_are_pretended_and_one_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = shutil.which("sh")
    assert shell is not None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with VirtualCluster.open(2, 1, gbit_per_s=0.1, slow={1: 0.01}) as cluster:
        assert cluster.is_pretended
        assert len(cluster.notices) == 1
        assert "needs the program ip" in cluster.notices[0]
        assert "pretend" in cluster.notices[0]
        cluster.wait(cluster.start([shell, "-c", WRITE_VARIABLES], {"FOLDER": str(tmp_path)}), timeout_s=60)
        assert cluster.notices[0] in cluster.describe()
    assert [(tmp_path / str(rank)).read_text().split()[4] for rank in range(2)] == ["0", "1"]


@pytest.mark.usefixtures("rights")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_without_the_rights_nodes_are_pretended_and_nothing_is_left() -> None:
    program = "from lockstep.bench.virtual import VirtualCluster; print(VirtualCluster.open(2, 1, 0.1).describe())"
    argv = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, env=os.environ | {"PYTHONPATH": ROOT}, **pipes) as process:  # type: ignore[call-overload]
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert "pretended on one host" in out
    assert "Operation not permitted" in out
    assert f"lockstep-{process.pid}-" not in namespaces()


@pytest.mark.usefixtures("rights")
def test_a_delay_is_either_there_or_its_absence_is_said_once() -> None:
    with VirtualCluster(3, 1, gbit_per_s=1.0, delay_ms=2) as cluster:
        shown = subprocess.run(
            ["tc", "-n", cluster._namespace(0), "qdisc", "show", "dev", "eth0"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "tbf" in shown
        assert ("netem" in shown) != (len(cluster.notices) == 1 and "netem" in cluster.notices[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "not possible"),
        ((2, 0), "not possible"),
        ((2, 1, 0.0), "above 0 Gbit/s"),
        ((2, 1, 1.0, -1.0), "not below 0 ms"),
        ((2, 1, 1.0, None, {2: 0.1}), "numbered 0 to 1"),
    ],
)
def test_impossible_clusters_are_a_sentence(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(LockstepError, match=message):
        VirtualCluster(*arguments)  # type: ignore[arg-type]
