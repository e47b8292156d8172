"""The program as a user starts it: real processes, real files."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from safetensors.torch import load_file
from torch import Tensor

from lockstep.bench.shared_gpu import describe_rank
from lockstep.engine import template
from lockstep.events import CheckpointSaved, Event, StepDone, read_events
from tests.engine.forked import Forked
from tests.ranks import Backend

ROOT = Path(__file__).parents[2]  # of the source tree
# Behind it whatever this process was given, which may hold what the program needs.
MODULES = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def start(*arguments: str, cwd: Path | None = None, **environment: str) -> "subprocess.Popen[str]":
    """`lockstep ARGUMENTS` in a process group of its own."""
    is_interpreters = any(name.startswith("PYTHON") for name in environment)
    if is_interpreters or os.environ.get("CUDA_VISIBLE_DEVICES") != "":  # a fork may not have what CUDA was used in
        return start_new(*arguments, cwd=cwd, **environment)
    return cast("subprocess.Popen[str]", Forked(arguments, cwd, os.environ | MODULES | environment))


def start_new(*arguments: str, cwd: Path | None = None, **environment: str) -> "subprocess.Popen[str]":
    """The same in an interpreter of its own, with the limits of this process."""
    return _start([sys.executable, "-m", "lockstep", *arguments], cwd, environment)


def _start(argv: Sequence[str], cwd: Path | None, environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | MODULES | dict(environment),
        start_new_session=True,
    )


def start_ranks(
    backend: Backend, num_ranks: int, *arguments: str, cwd: Path | None = None, **environment: str
) -> "subprocess.Popen[str]":
    """`lockstep ARGUMENTS` as so many ranks: by our launcher over Gloo, by torchrun on one GPU over NCCL."""
    if backend == "gloo":
        return start(*arguments, f"--ranks={num_ranks}", cwd=cwd, **environment)
    return start_on_one_gpu(num_ranks, *arguments, cwd=cwd, **environment)


def start_on_one_gpu(
    num_ranks: int, *arguments: str, cwd: Path | None = None, **environment: str
) -> "subprocess.Popen[str]":
    """`lockstep ARGUMENTS` as NCCL ranks that share a GPU; the ranks are the children of the process."""
    # The shell knows the rank and becomes the program, so that a signal to the rank reaches the program.
    variables = " ".join(f"{key}={value}" for key, value in describe_rank("$RANK").items())
    line = f'{variables} exec "{sys.executable}" -m lockstep "$@" --set=comm.backend=nccl'
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return _start(
        [*torchrun, "--no-python", "sh", "-c", line, "lockstep", *arguments],
        cwd,
        # A rank that waits in NCCL for one that is gone ends by force: not after torchrun's usual 30 s.
        {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"} | environment,
    )


def finish(process: "subprocess.Popen[str]", timeout_s: float = 120) -> tuple[int, str, str]:
    """Wait for the end: exit status, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_all(process)
        raise
    return process.returncode, out, err


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
    """Start and finish."""
    return finish(start(*arguments, cwd=cwd, **environment))


def list_children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, but for the template: the ranks of a launcher."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, rest = (folder / "stat").read_text().partition("(")[2].rsplit(")", 1)
        except OSError:
            continue
        fields = rest.split()
        if int(fields[1]) == pid and fields[0] != "Z" and name != template.NAME:
            children.append(int(folder.name))
    return children


def kill_all(process: "subprocess.Popen[str]") -> None:
    """SIGKILL to every rank and the launcher, with which its template ends."""
    for pid in [*list_children(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def events(folder: Path) -> list[Event]:
    """What the run has said so far."""
    return read_events(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []


def read_rank(pid: int) -> str:
    """The rank that a process is, by its name; empty for one that is none, or is not yet the program it will be."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
    return name.removeprefix("lockstep:") if name.startswith("lockstep:") else ""


def find_ranks(process: "subprocess.Popen[str]", count: int) -> dict[str, int]:
    """The processes of a launcher's ranks by their rank, once all are there."""

    def find() -> dict[str, int]:
        return {rank: pid for pid in list_children(process.pid) if (rank := read_rank(pid))}

    wait_until(lambda: len(find()) == count, process)
    return find()


def wait_for_step(folder: Path, step: int, process: "subprocess.Popen[str]", timeout_s: float = 90) -> None:
    """Return as soon as the run has reported `step`."""

    def is_reached() -> bool:
        return any(isinstance(event, StepDone) and event.step >= step for event in events(folder))

    wait_until(is_reached, process, timeout_s)


def wait_for_checkpoint(folder: Path, step: int, process: "subprocess.Popen[str]") -> None:
    """Return as soon as the run has a checkpoint of `step` or a later one on disk: steps go on while it is written."""

    def is_saved() -> bool:
        return any(isinstance(event, CheckpointSaved) and event.step >= step for event in events(folder))

    wait_until(is_saved, process)


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]", timeout_s: float = 90) -> None:
    """Poll; fail when the process ends first."""
    end = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"it ended too early: {finish(process)}")
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def summary(folder: Path) -> dict[str, object]:
    """The run's summary."""
    content: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return content


def last_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "model.safetensors") | load_file(newest / "optimizer.safetensors")
