"""Ranks that are forked: as clean as new programs, children of the launcher, gone with it."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.engine.template import FIRST_STEP
from lockstep.kernels import has_triton

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import json, os, signal, subprocess, sys, threading, time
from lockstep.engine.template import Template
from lockstep.processes import LAUNCHER, follow_launcher, name_process

def main():
    follow_launcher(os.environ)
    name_process("lockstep:" + os.environ["RANK"])
    kind = sys.argv[1]
    if kind == "tell":
        handlers = {name: signal.getsignal(getattr(signal, name)) is signal.SIG_DFL for name in ("SIGTERM", "SIGUSR1")}
        told = {"parent": os.getppid(), "rank": os.environ["RANK"], "home": os.environ.get("HOME"), "argv": sys.argv,
            "threads": threading.active_count(), "default": handlers, "blocked": len(signal.pthread_sigmask(0, []))}
        os.write(1, (json.dumps(told) + "\\n").encode())  # at once: others write too
    elif kind == "sleep":
        os.write(1, b"sleeping\\n")
        time.sleep(600)
    elif kind == "fail":
        raise ValueError("a defect")
    elif kind == "exit":
        sys.exit(int(sys.argv[2]))
    elif kind == "has":
        os.write(1, json.dumps([name in sys.modules for name in sys.argv[2:]]).encode() + b"\\n")

def start(template, *arguments, rank=0, **more):
    environment = {"RANK": str(rank), LAUNCHER: str(os.getpid()), "PATH": os.environ["PATH"], **more}
    return template.start(arguments, environment)

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(script: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", f"{LAUNCHER}\n{script}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def finish(script: str) -> tuple[str, str]:
    process = run(script)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def test_a_rank_is_a_child_of_the_launcher_with_its_own_environment_and_nothing_of_the_launchers() -> None:
    out, _ = finish(
        "with Template(main) as t:\n"
        " signal.signal(signal.SIGTERM, lambda *_: None)\n"
        " pids = [start(t, 'tell', 'me', rank=r) for r in range(3)]\n"
        " print(json.dumps([os.getpid(), [wait(pid) for pid in pids]]))"
    )
    *ranks, (launcher, codes) = sorted(map(json.loads, out.splitlines()), key=lambda line: isinstance(line, list))
    told: list[dict[str, Any]] = sorted(ranks, key=lambda rank: rank["rank"])
    assert codes == [0, 0, 0]
    assert [rank["rank"] for rank in told] == ["0", "1", "2"]
    for rank in told:
        assert rank["parent"] == launcher
        assert rank["home"] is None
        assert rank["argv"] == ["lockstep", "tell", "me"]
        assert rank["threads"] == 1
        assert rank["default"] == {"SIGTERM": True, "SIGUSR1": True}
        assert rank["blocked"] == 0


def test_how_a_rank_ends_is_what_the_launcher_hears() -> None:
    out, err = finish(
        "with Template(main) as t:\n"
        " print([wait(start(t, 'exit', str(code))) for code in (0, 1, 130)], wait(start(t, 'fail')))\n"
        " pid = start(t, 'sleep')\n"
        " os.kill(pid, signal.SIGKILL)\n"
        " print(wait(pid))"
    )
    assert "[0, 1, 130] 1\n" in out
    assert out.endswith("-9\n")
    assert "ValueError: a defect" in err


def test_a_signal_that_comes_before_a_rank_can_act_on_it_is_not_lost() -> None:
    out, _ = finish(
        "with Template(main) as t:\n"
        " for _ in range(20):\n"
        "  pid = start(t, 'sleep')\n"
        "  os.kill(pid, signal.SIGTERM)\n"
        "  assert wait(pid) == -signal.SIGTERM\n"
        " print('all')"
    )
    assert out.endswith("all\n")


def test_control_c_at_a_terminal_leaves_the_template_alone() -> None:
    out, _ = finish(
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "with Template(main) as t:\n"
        " os.killpg(0, signal.SIGINT)\n"
        " print(wait(start(t, 'exit', '5')), t._line is not None)"
    )
    assert out == "5 True\n"


def test_without_the_template_ranks_start_the_plain_way() -> None:
    out, _ = finish(
        "with Template(main) as t:\n"
        " os.kill(t._process, signal.SIGKILL)\n"
        " print(wait(start(t, '--version', PYTHONPATH=os.environ['PYTHONPATH'])))"
    )
    assert out.splitlines()[-1] == "0"
    assert len(out.splitlines()) == 2, "the version, from a new interpreter"


def test_a_template_that_cannot_fork_is_done_without() -> None:
    """Its answer is no process, or none at all; the rank must not be taken for process 0, which is everybody."""
    out, _ = finish(
        "import lockstep.engine.template as template\n"
        "for answer in (lambda *_, **__: 0, lambda *_, **__: os._exit(1)):\n"
        " template._fork_orphan = answer\n"
        " with Template(main) as t:\n"
        "  print(wait(start(t, '--version', PYTHONPATH=os.environ['PYTHONPATH'])), flush=True)"
    )
    assert [line for line in out.splitlines() if len(line) == 1] == ["0", "0"]


def test_where_nothing_can_be_forked_there_is_no_template() -> None:
    out, _ = finish(
        "def fail(): raise BlockingIOError(11, 'no more processes')\n"
        "fork, os.fork = os.fork, fail\n"
        "with Template(main) as t:\n"
        " os.fork = fork\n"
        " print(wait(start(t, '--version', PYTHONPATH=os.environ['PYTHONPATH'])), flush=True)"
    )
    assert out.splitlines()[-1] == "0"


WITH_GPUS = "import pathlib, lockstep.engine.template as template\ntemplate.GPU_DRIVERS = (pathlib.Path('/'),)\n"


def test_where_there_are_gpus_ranks_have_what_a_first_step_would_import() -> None:
    modules = "'torch.fx.experimental.symbolic_shapes', 'lockstep.kernels.crop'"
    out, _ = finish(
        f"{WITH_GPUS}import torch\n"
        f"with Template(main) as t: wait(start(t, 'has', {modules}))\n"
        f"print([name in sys.modules for name in ({modules})], torch.cuda.is_initialized())"
    )
    assert out.splitlines() == ["[true, true]", "[False, False] False"], "in the ranks, and not in the launcher"


def test_what_is_read_ahead_has_these_names() -> None:
    """Whatever fails there is left to the ranks, in silence."""
    for module in FIRST_STEP:
        importlib.import_module(module)
    if has_triton():
        assert callable(importlib.import_module("triton.runtime.cache").triton_key)


def test_a_template_that_is_still_importing_holds_nobody_up() -> None:
    out, _ = finish(
        f"{WITH_GPUS}template.import_ahead = lambda: time.sleep(600)\n"
        "begun = time.monotonic()\n"
        "with Template(main): pass\n"
        "print(time.monotonic() - begun < 20)"
    )
    assert out == "True\n"


def test_orphans_are_adopted_no_longer_than_the_template_is_open() -> None:
    out, _ = finish(
        "import ctypes\n"
        "def adopts():\n"
        " answer = ctypes.c_int(7)\n"
        " ctypes.CDLL(None).prctl(37, ctypes.byref(answer), 0, 0, 0)\n"
        " return answer.value\n"
        "with Template(main) as t:\n"
        " inside = adopts()\n"
        " rank = start(t, 'exit', '5')\n"
        "print(json.dumps([inside, adopts(), wait(rank)]), flush=True)"
    )
    assert json.loads(out.splitlines()[-1]) == [1, 0, 5]


def test_ranks_and_template_end_with_a_killed_launcher() -> None:
    process = run(
        "t = Template(main)\n"
        "pids = [t._process, *(start(t, 'sleep', rank=r) for r in range(2))]\n"
        "print(json.dumps(pids), flush=True)\n"
        "time.sleep(600)"
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    (pids,) = [json.loads(line) for line in lines if line.startswith("[")]
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < end, "somebody outlives the launcher"
        time.sleep(0.02)
    process.communicate()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_signal_numbers_are_those_that_launchers_send() -> None:
    from lockstep.engine.launch import PASSED_ON
    from lockstep.engine.template import SIGNALS

    assert set(PASSED_ON) <= set(SIGNALS)
    assert signal.SIGINT in SIGNALS


def test_the_command_starts_its_ranks_without_a_word() -> None:
    """`lockstep`, unlike `python -m lockstep`, has imported the module that its ranks run."""
    program = "import sys, lockstep.__main__; from lockstep.engine.template import run_program; run_program()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__
    assert done.stderr == ""
