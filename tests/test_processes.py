"""How processes end: at once when asked twice, and without a traceback when asked early."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.events import RunEnded
from lockstep.processes import APART_S, spare_imports, speaks_for_all, speaks_for_node
from tests.engine import commands
from tests.engine.conftest import spell_small_run, tiny_settings
from tests.terminals import fill, open_terminal

# A first signal is noted and the read goes on; so it did with the second.
STUCK = (
    "import os; from lockstep.engine.run import watch_signals\n"
    "with watch_signals() as stop:\n"
    "    print('reading', flush=True)\n"
    "    os.read(os.pipe()[0], 1)\n"
)


def start(line: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(commands.ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_process_stuck_in_a_read(number: signal.Signals) -> None:
    process = start(STUCK)
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):  # the first one is only noted
        process.wait(2 * APART_S)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == "lockstep: stopped at once, as asked; go on from the last checkpoint with --resume.\n"


def test_one_signal_that_comes_twice_at_once_is_one() -> None:
    process = start(STUCK)
    process.send_signal(signal.SIGINT)
    time.sleep(APART_S / 10)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.kill()
    process.communicate()


def test_two_different_signals_are_not_one_that_came_twice() -> None:
    process = start(STUCK)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(1.5 * APART_S)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_a_second_control_c_ends_launcher_and_ranks_though_one_is_stuck(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*tiny_settings(tmp_path), "data.source=generated", 'data.path=""', "data.train_images=64"]
    settings += ["data.val_images=20", "train.duration=4000ep", "train.eval_every=0st"]
    process = commands.start(
        "train",
        "quickstart",
        "--ranks=2",
        f"--out={run}",
        *[f"--set={s}" for s in settings],
        LOCKSTEP_CACHE=str(tmp_path),
    )
    commands.wait_for_step(run, 2, process)
    ranks = commands.list_children(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(2 * APART_S)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    status, out, err = commands.finish(process, timeout_s=60)
    assert status == 130
    assert "stopped at once" in err
    assert "Traceback" not in out + err
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < end
        time.sleep(0.02)


# The program, with a Ctrl-C just as it begins to read a module.
EARLY = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[0]:
            os.kill(os.getpid(), signal.SIGINT)
sys.argv.pop(0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where these tests run in the background
sys.meta_path.insert(0, Interrupt())
from lockstep.__main__ import main
main()
"""


TRAIN = "train quickstart --ranks=1"


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        *(
            (module, TRAIN)
            for module in [
                "typer",
                "pydantic",
                "lockstep.recipes.read",
                "lockstep.api",
                "torch",
                "lockstep.engine.run",
                "lockstep.engine.owner",
                "lockstep.engine.snapshot",
            ]
        ),
        ("lockstep.data.pack", "data pack from to"),
        ("numpy", "data verify nowhere"),
        ("rich.table", "recipes list"),
        ("lockstep.report.page", "report nowhere"),
        ("lockstep.bench.fuzz", "bench fuzz"),
    ],
)
def test_control_c_while_modules_are_read_prints_no_traceback(module: str, arguments: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", EARLY, module, *arguments.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(commands.ROOT), "LOCKSTEP_CACHE": str(tmp_path)},
    )
    assert (result.returncode, result.stderr) == (130, "lockstep: interrupted.\n")


def test_control_c_amid_a_command_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.data.inventory.take_inventory", interrupt)
    assert CliRunner().invoke(app, ["data", "info", "somewhere"]).exit_code == 130
    assert capfd.readouterr().err == "lockstep: interrupted.\n"


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_outside_imports_control_c_is_an_exception_unless_it_was_ignored(before: "signal._HANDLER") -> None:
    old = signal.signal(signal.SIGINT, before)
    try:
        with nullcontext() if before is signal.SIG_IGN else pytest.raises(KeyboardInterrupt), spare_imports():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, old)


def test_control_c_amid_the_interpreters_own_end_is_no_traceback() -> None:
    """A handler at exit that takes a while stands for all that is done there."""
    script = (
        "import atexit, sys, time; sys.argv = ['lockstep', '--version']\n"
        "atexit.register(lambda: (print('ending', flush=True), time.sleep(1)))\n"
        "import lockstep.__main__ as program; program.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while "ending" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err == ""


def start_ignoring(number: int, arguments: list[str], cache: Path) -> "subprocess.Popen[str]":
    """A command as `nohup` or a shell's background starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | commands.MODULES | {"LOCKSTEP_CACHE": str(cache)},
        start_new_session=True,
        preexec_fn=partial(signal.signal, number, signal.SIG_IGN),
    )


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGHUP), (2, signal.SIGHUP), (2, signal.SIGINT)])
def test_a_signal_that_the_command_was_started_to_ignore_does_not_stop_the_run(
    tmp_path: Path, ranks: int, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start_ignoring(number, spell_small_run(run, ranks, "60st"), tmp_path)
    commands.wait_for_step(run, 2, process)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert [event.status for event in commands.events(run) if isinstance(event, RunEnded)] == ["finished"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_one_rank_that_is_stopped_says_by_its_status_which_signal_it_was(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = commands.start(*spell_small_run(run, 1, "4000st"), LOCKSTEP_CACHE=str(tmp_path))
    commands.wait_for_step(run, 2, process)
    process.send_signal(number)
    status, _, err = commands.finish(process)
    assert status == 128 + number, err


STUCK_QUIETLY = STUCK.replace("print('reading', flush=True)", "os.write({ready}, b'.')")


def test_a_second_signal_ends_a_process_whose_terminal_is_not_read() -> None:
    ready, writer = os.pipe()
    with open_terminal() as (_, file):
        fill(file)
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK_QUIETLY.format(ready=writer)],
            stderr=file,
            pass_fds=[writer],
            env=os.environ | commands.MODULES,
        )
        os.close(writer)
        os.read(ready, 1)
        os.close(ready)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(2 * APART_S)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_a_rank_that_is_no_text_is_no_traceback() -> None:
    status, out, err = commands.finish(commands.start_new("--version", RANK="\udcff"))
    assert (status, err) == (0, ""), out


@pytest.mark.parametrize(
    ("environment", "for_all", "for_node"),
    [
        ({}, True, True),
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}, True, True),
        ({"RANK": "8", "LOCAL_RANK": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, False, True),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True, True),
        ({"SLURM_PROCID": "8", "SLURM_LOCALID": "0"}, False, True),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, False, False),
    ],
)
def test_who_says_what_several_would_say(environment: dict[str, str], for_all: bool, for_node: bool) -> None:
    assert (speaks_for_all(environment), speaks_for_node(environment)) == (for_all, for_node)
