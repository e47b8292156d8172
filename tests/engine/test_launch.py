"""Ranks started by our launcher, by torchrun and as Slurm would: real processes that meet in one world."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.bench.shared_gpu import describe_rank
from lockstep.engine.launch import choose_num_ranks
from lockstep.engine.owner import LOCK_FILE
from lockstep.errors import LockstepError
from lockstep.events import EpochDone, RunEnded, RunStarted
from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.ranks import Backend, find_port, over_nccl


def arguments(images: Path, *more: str) -> list[str]:
    settings = [*tiny_settings(images), "train.duration=3st", "optim.warmup=0st", *more]
    return ["train", "quickstart", *[f"--set={setting}" for setting in settings]]


def slurm_variables(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(port),
    }


def check_one_run_of_two_ranks(folder: Path) -> None:
    """One folder, one start of two ranks, one end; and a log that both ranks wrote to would hold each record twice."""
    (run,) = folder.iterdir()
    starts = [event for event in commands.events(run) if isinstance(event, RunStarted)]
    ends = [event for event in commands.events(run) if isinstance(event, RunEnded)]
    assert [start.world_size for start in starts] == [2]
    assert [(end.status, end.step) for end in ends] == [("finished", 3)]
    assert commands.summary(run)["world_size"] == 2
    assert (run / "checkpoints" / "step-00000003" / "manifest.json").exists()


def test_as_many_ranks_as_asked_for() -> None:
    assert choose_num_ranks("3") == (3, 3)


def test_a_range_is_all_of_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_num_ranks("2:8") == (2, 8)


@pytest.mark.parametrize(("num_gpus", "expected"), [(16, (2, 8)), (5, (2, 5)), (1, (2, 2))])
def test_a_range_is_as_many_as_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose_num_ranks("2:8") == expected


def test_one_rank_on_a_cpu_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_num_ranks(None) == (1, 1)


def test_one_rank_per_gpu_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_num_ranks(None) == (4, 4)


@pytest.mark.parametrize("asked", ["0", "-2", "8:2", "0:4", "two", "2:", "1:2:3", "", "9" * 5000])
def test_a_number_of_ranks_that_cannot_be_is_a_sentence(asked: str) -> None:
    with pytest.raises(LockstepError, match=f"--ranks {asked[:40]}"):
        choose_num_ranks(asked)


@pytest.mark.gpu
def test_under_torchrun_ranks_that_share_a_gpu_join_one_world_over_nccl(images: Path, tmp_path: Path) -> None:
    process = commands.start_on_one_gpu(2, *arguments(images), cwd=tmp_path, TMPDIR=str(tmp_path))
    status, out, err = commands.finish(process)
    assert status == 0, out + err
    check_one_run_of_two_ranks(tmp_path / "runs")


def test_under_torchrun_the_program_joins_that_world_and_leaves_one_run(images: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*torchrun, "-m", "lockstep", *arguments(images)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    check_one_run_of_two_ranks(tmp_path / "runs")


def run_by_agent(tmp_path: Path, script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """A shell with this script as each of two ranks under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--monitor-interval=0.1"]
    return subprocess.run(
        [*torchrun, *options, "--no-python", "sh", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(commands.ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def leave_older_run(tmp_path: Path, wanted: list[str]) -> tuple[Path, dict[Path, bytes]]:
    """Another run of the recipe, which one that is longer could go on with; and its files."""
    folder = tmp_path / "runs" / "quickstart-20200101-000000"
    assert commands.run(*wanted, f"--out={folder}")[0] == 0
    return folder, read_files(folder)


def read_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_under_torchrun_ranks_that_are_started_again_find_their_own_run_and_no_other(
    images: Path, tmp_path: Path
) -> None:
    """Lost before the run's configuration is there, then after its last word: it is trained once, in its own folder."""
    old, files = leave_older_run(tmp_path, arguments(images))
    program = shlex.join([sys.executable, "-m", "lockstep", *arguments(images, "train.duration=2ep")])
    script = f"case $TORCHELASTIC_RESTART_COUNT in 0) exit 9;; 1) {program}; exit 9;; *) {program};; esac"
    result = run_by_agent(tmp_path, script, "--standalone", "--max-restarts=2")
    assert result.returncode == 0, result.stderr
    (run,) = set((tmp_path / "runs").iterdir()) - {old}
    assert run.name.startswith("quickstart-job-")
    assert [event.start_step for event in commands.events(run) if isinstance(event, RunStarted)] == [0]
    assert commands.summary(run)["status"] == "finished"
    assert read_files(old) == files


def test_under_torchrun_a_run_that_nothing_tells_from_others_is_not_gone_on_with(images: Path, tmp_path: Path) -> None:
    old, files = leave_older_run(tmp_path, arguments(images))
    program = shlex.join([sys.executable, "-m", "lockstep", *arguments(images, "train.duration=2ep")])
    script = f"[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 9; {program}"
    result = run_by_agent(tmp_path, script, f"--master-port={find_port()}", "--max-restarts=1")
    assert result.returncode != 0
    assert "lockstep: This run of quickstart was started again" in result.stderr
    assert list((tmp_path / "runs").iterdir()) == [old]
    assert read_files(old) == files


def test_under_torchrun_a_folder_that_is_refused_is_refused_again_when_ranks_are_started_again(
    images: Path, tmp_path: Path
) -> None:
    old, files = leave_older_run(tmp_path, arguments(images))
    os.utime(old / "config.toml", (1e9, 1e9))
    program = shlex.join([sys.executable, "-m", "lockstep", *arguments(images, "train.duration=2ep"), f"--out={old}"])
    result = run_by_agent(tmp_path, f"exec {program}", "--standalone", "--max-restarts=1")
    assert result.returncode != 0
    assert result.stderr.count(f"lockstep: {old} already holds a run; add --resume") == 2  # by rank 0 each time
    lock = {old / LOCK_FILE: b""}  # which names who had it last
    assert read_files(old) | lock == files | lock


def test_a_slurm_job_that_is_requeued_finds_its_own_run_and_no_other(images: Path, tmp_path: Path) -> None:
    old, files = leave_older_run(tmp_path, arguments(images))
    longer = arguments(images, "train.duration=2ep")
    status, _, err = commands.run(*longer, cwd=tmp_path, SLURM_RESTART_COUNT="1")
    assert status == 1
    assert "give --out" in err
    for _ in range(2):
        status, _, err = commands.run(*longer, cwd=tmp_path, SLURM_RESTART_COUNT="1", SLURM_JOB_ID="12")
        assert status == 0, err
    run = tmp_path / "runs" / "quickstart-slurm-12"
    assert set((tmp_path / "runs").iterdir()) == {old, run}
    assert sum(event.kind == "RunStarted" for event in commands.events(run)) == 1
    assert read_files(old) == files


@pytest.mark.parametrize("backend", ["gloo", over_nccl()])
def test_with_slurm_variables_the_program_joins_that_world_and_leaves_one_run(
    images: Path, tmp_path: Path, backend: Backend
) -> None:
    port = find_port()
    variables = [slurm_variables(rank, port) for rank in range(2)]
    if backend == "nccl":  # each rank on a node of its own
        alone = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
        variables = [v | describe_rank(r) | alone | {"SLURM_NODEID": str(r)} for r, v in enumerate(variables)]
    wanted = arguments(images, f"comm.backend={backend}")
    late = commands.start(*wanted, cwd=tmp_path, **variables[1])
    time.sleep(1.1)  # ranks that start in different seconds would each name a folder of their own
    first = commands.start(*wanted, cwd=tmp_path, **variables[0])
    for process in (first, late):
        status, out, err = commands.finish(process)
        assert status == 0, out + err
    check_one_run_of_two_ranks(tmp_path / "runs")


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_meeting_point_that_is_taken_is_a_sentence(images: Path, tmp_path: Path, busy_port: int) -> None:
    status, out, err = commands.run(*arguments(images), cwd=tmp_path, **slurm_variables(0, busy_port))
    assert status == 1
    assert "Traceback" not in out + err
    assert f"localhost:{busy_port}" in err
    assert "MASTER_PORT" in err


def test_asking_for_another_count_than_the_world_has_is_a_sentence(images: Path, tmp_path: Path) -> None:
    status, out, err = commands.run(*arguments(images), "--ranks=3", cwd=tmp_path, **slurm_variables(0, 1))
    assert status == 1
    assert "Traceback" not in out + err
    assert "--ranks 3 was given, but this world was started with 2 ranks" in err


def test_a_range_that_the_world_is_in_is_no_mistake(images: Path, tmp_path: Path) -> None:
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    status, _, err = commands.run(*arguments(images), "--ranks=1:8", cwd=tmp_path, **one)
    assert status == 0, err
    status, _, err = commands.run(*arguments(images), "--ranks=2:8", cwd=tmp_path, **one)
    assert status == 1
    assert "--ranks 2:8 was given, but this world was started with 1 ranks" in err


def test_slurms_early_warning_reaches_the_ranks_of_our_own_launcher(images: Path, tmp_path: Path) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    endless = arguments(images, "train.duration=4000st", "train.checkpoint_every=0st", "train.eval_every=0st")
    process = commands.start(*endless, "--ranks=2", f"--out={run}", TMPDIR=str(scratch))
    commands.wait_for_step(run, 2, process)
    process.send_signal(signal.SIGUSR1)
    status, out, err = commands.finish(process)
    assert status == 128 + signal.SIGUSR1, out + err
    assert "Traceback" not in out + err
    ended = commands.events(run)[-1]
    assert isinstance(ended, RunEnded)
    assert ended.status == "interrupted"
    assert (run / "checkpoints" / f"step-{ended.step:08d}" / "manifest.json").exists()
    assert list(scratch.glob("torchelastic*")) == [], "the launcher leaves folders behind at every start"


def test_a_lost_rank_is_started_again_with_all_and_the_run_ends_as_if_nothing_had_happened(
    images: Path, tmp_path: Path
) -> None:
    settings = [f"--set={setting}" for setting in [*tiny_settings(images), "train.duration=6ep"]]
    plain, folder = tmp_path / "plain", tmp_path / "run"
    assert commands.run("train", "quickstart", "--ranks=2", f"--out={plain}", *settings)[0] == 0
    process = commands.start("train", "quickstart", "--ranks=2", "--restarts=2", f"--out={folder}", *settings)
    commands.wait_for_step(folder, 5, process)
    os.kill(commands.list_children(process.pid)[0], signal.SIGKILL)
    status, out, err = commands.finish(process)
    assert status == 0, err
    assert "Traceback" not in out + err
    assert "Going on from step" in out
    mine, theirs = commands.last_weights(folder), commands.last_weights(plain)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_run_that_is_asked_to_stop_is_not_started_again(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [f"--set={setting}" for setting in [*tiny_settings(images), "train.duration=40ep"]]
    process = commands.start("train", "quickstart", "--ranks=2", "--restarts=2", f"--out={folder}", *settings)
    commands.wait_for_step(folder, 3, process)
    os.kill(commands.list_children(process.pid)[0], signal.SIGTERM)
    status, _, err = commands.finish(process)
    assert status == 130, err
    assert sum(event.kind == "RunStarted" for event in commands.events(folder)) == 1


def test_what_would_fail_again_is_not_tried_again(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hot = [*tiny_settings(images), "optim.lr=1e30", "optim.warmup=0st"]
    settings = [f"--set={setting}" for setting in hot]
    status, _, err = commands.run("train", "quickstart", "--ranks=2", "--restarts=2", f"--out={folder}", *settings)
    assert status == 1
    assert err.count("lockstep: ") == 1
    assert sum(event.kind == "RunStarted" for event in commands.events(folder)) == 1


def run_network(name: str, images: Path, folder: Path, ranks: int = 2) -> tuple[int, str, list[str]]:
    """Status, all that was said, and the sentences of ranks that train a network of `own_networks.py`."""
    own = [*tiny_settings(images), f"model={{name = 'tests.engine.own_networks:{name}'}}", "comm.tune_s=0"]
    settings = [f"--set={setting}" for setting in own]
    status, out, err = commands.run("train", "quickstart", f"--ranks={ranks}", f"--out={folder}", *settings)
    return status, out + err, sorted(line for line in err.splitlines() if line.startswith("lockstep: "))


def test_why_one_rank_could_not_go_on_is_told_by_the_run_and_said_once_more_on_each_node(
    images: Path, tmp_path: Path
) -> None:
    """And not that it stopped answering, which is all that the others see."""
    folder = tmp_path / "run"
    status, said, sentences = run_network("Failing", images, folder, ranks=3)
    why = "The disk of nobody’s images is full; free some."
    followed = f"Rank 1 could not go on, and rank 0 stopped with it: {why}"
    assert (status, "Traceback" in said) == (1, False), said
    assert sentences == [f"lockstep: {followed}", f"lockstep: {why}"]
    (ended,) = (event for event in commands.events(folder) if isinstance(event, RunEnded))
    assert ended.reason == followed


def test_a_network_that_one_rank_alone_cannot_build_is_said(images: Path, tmp_path: Path) -> None:
    """By rank 0, which speaks for all where it is a mistake that every rank finds."""
    status, said, sentences = run_network("Unbuilt", images, tmp_path / "run")
    assert (status, "Traceback" in said) == (1, False), said
    assert len(sentences) == 1
    assert sentences[0].startswith("lockstep: Rank 1 could not go on, and rank 0 stopped with it: model.name = ")
    assert "FileNotFoundError: no backbone.pth" in sentences[0]


def test_of_a_mistake_in_a_users_network_the_others_say_the_last_line(images: Path, tmp_path: Path) -> None:
    status, said, sentences = run_network("Mistaken", images, tmp_path / "run")
    assert (status, "Traceback" in said) == (1, True), said
    assert sentences == ["lockstep: Rank 1 could not go on, and rank 0 stopped with it: KeyError: 'backbone'"]


def test_ranks_of_other_settings_are_refused_by_one_sentence_that_names_them(images: Path, tmp_path: Path) -> None:
    port = find_port()
    ranks = [
        commands.start(*arguments(images, f"train.seed={rank}"), cwd=tmp_path, **slurm_variables(rank, port))
        for rank in range(2)
    ]
    ends = [commands.finish(process) for process in ranks]
    why = "Rank 1 was started with other settings than rank 0 (train.seed); start all ranks with the same command."
    assert [(status, err) for status, _, err in ends] == [(1, f"lockstep: {why}\n"), (1, "")]


def test_ranks_that_are_lost_after_the_last_step_leave_a_finished_run(images: Path, tmp_path: Path) -> None:
    """Started again, they find nothing to do, or the last word still to say; by hand it is a sentence."""
    folder = tmp_path / "run"
    assert commands.run(*arguments(images), f"--out={folder}")[0] == 0
    log = (folder / "events.jsonl").read_text()
    again = ["train", str(folder), "--resume"]
    status, _, err = commands.run(*again)
    assert status == 1
    assert "is finished (step 3 of 3)" in err
    assert commands.run(*again, TORCHELASTIC_RESTART_COUNT="1")[0] == 0
    assert (folder / "events.jsonl").read_text() == log
    without_end = [line for line in log.splitlines(keepends=True) if not line.startswith('{"kind":"RunEnded"')]
    (folder / "events.jsonl").write_text("".join(without_end))
    (folder / "summary.json").unlink()
    for variables in ({"TORCHELASTIC_RESTART_COUNT": "1"}, {}):
        status, out, err = commands.run(*again, **variables)
        assert status == 0, err
        assert commands.summary(folder)["status"] == "finished"
        assert "Traceback" not in out + err
        (folder / "summary.json").unlink()


def start_node(name: str, port: int, arguments: list[str]) -> "subprocess.Popen[str]":
    """torchrun's agent as on a node of its own, with one rank; node "a" is where they meet."""
    rendezvous = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5,is_host={int(name == 'a')}"
    elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--monitor-interval=0.1", "--rdzv-id=test"]
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *elastic,
            *place,
            f"--rdzv-conf={rendezvous}",
            "-m",
            "lockstep",
            *arguments,
        ],
        env=os.environ
        # Otherwise torch lets a newcomer wait in vain for the address of a store that the others know already.
        | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LOCKSTEP_NODE": name, "PYTHONPATH": str(commands.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_node_that_leaves_is_done_without_and_taken_in_again_when_it_comes_back(images: Path, tmp_path: Path) -> None:
    """The second of two nodes comes later than the first, is killed with its rank, and is started again."""
    folder, port = tmp_path / "run", find_port()
    endless = arguments(images, "train.duration=9000ep", "comm.timeout_s=20", "train.eval_every=0st")

    def list_epochs() -> list[EpochDone]:
        return [event for event in commands.events(folder) if isinstance(event, EpochDone)]

    def wait_for_starts(*sizes: int) -> None:
        def has_begun() -> bool:
            starts = [event for event in commands.events(folder) if isinstance(event, RunStarted)]
            return [start.world_size for start in starts] == list(sizes)

        commands.wait_until(has_begun, nodes[0])
        num_epochs = len(list_epochs())
        commands.wait_until(lambda: len(list_epochs()) > num_epochs + 1, nodes[0])

    nodes = [start_node("a", port, [*endless, f"--out={folder}"])]
    try:
        wait_for_starts(1)
        nodes.append(start_node("b", port, [*endless, f"--out={folder}"]))
        wait_for_starts(1, 2)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        nodes[1].communicate()
        wait_for_starts(1, 2, 1)
        nodes[1] = start_node("b", port, [*endless, f"--out={folder}"])
        wait_for_starts(1, 2, 1, 2)
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        outputs = [node.communicate(timeout=60)[0] for node in nodes]
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.communicate()
    assert "on 1 rank; 2 wrote" in outputs[0]
    assert not any("lockstep/engine" in output for output in outputs), "a traceback"
    assert not any("already holds a run" in output for output in outputs), "not known to be their own at once"
    assert all(event.ledger_ok for event in list_epochs())
    assert {event.epoch for event in list_epochs()} == set(range(list_epochs()[-1].epoch + 1))
