"""What is said in a terminal, a pipe or a file of output: real processes, real terminals."""

import errno
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.events import RunEnded
from lockstep.report.display import LiveDisplay, build_display
from lockstep.terminal import Aside, drop_failed, escape, say
from tests.engine import commands
from tests.engine.conftest import spell_small_run
from tests.report.records import ended, started, stepped
from tests.terminals import fill, open_terminal


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    with open_terminal() as ends:
        yield ends


def read_all(file: int) -> str:
    os.set_blocking(file, False)
    data = b""
    with suppress(BlockingIOError):
        while True:
            data += os.read(file, 65536)
    return data.decode()


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_a_stream_that_fails_is_no_error(number: int) -> None:
    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

    say("word", Failing())


def test_a_stream_that_is_closed_or_was_never_there_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    say("word", stream)
    say("word", None)


def test_what_a_failed_stream_holds_is_given_up() -> None:
    with open("/dev/full", "w") as stream:
        stream.write("word")
        assert drop_failed(stream)
        assert not drop_failed(stream)


def test_what_steers_a_terminal_is_spelt_out() -> None:
    assert escape("a\x1b]0;x\x07\x9b\u202e\u2028\udc80") == "a\\x1b]0;x\\x07\\x9b\\u202e\\u2028\\udc80"


@pytest.mark.parametrize("text", ["rïng 图", "👩\u200d🔬 ❤️", "two\nlines", "a\u00a0space"])
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert escape(text) == text


def test_a_terminal_gets_all_that_is_said_in_order(terminal: tuple[int, int]) -> None:
    reader, file = terminal
    with open(file, "w", closefd=False) as stream:
        aside = Aside(stream, "utf-8")
        for number in range(100):
            aside.write(f"{number}\n")
        aside.drain()
    assert read_all(reader).split() == [str(number) for number in range(100)]


def test_a_terminal_that_nobody_reads_holds_up_nobody_and_keeps_the_newest(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.terminal.MOST_WAITING", 10)
    reader, file = terminal
    with open(file, "w", closefd=False) as stream:
        fill(file)
        aside = Aside(stream, "utf-8")
        begun = time.monotonic()
        for number in range(1000):
            aside.write(f"line {number}\n")
        assert time.monotonic() - begun < 1
        aside.drain(0.1)
        said = read_all(reader)
        aside.drain()
        said += read_all(reader)
    assert said.endswith("line 999\r\n")
    assert "line 500\r\n" not in said


def test_the_live_display_goes_on_though_its_terminal_is_not_read(terminal: tuple[int, int]) -> None:
    _, file = terminal
    with open(file, "w", closefd=False) as stream:
        fill(file)
        display = build_display(Console(file=stream, force_terminal=True, _environ={"TERM": "xterm"}), Path("run"))
        assert isinstance(display, LiveDisplay)
        begun = time.monotonic()
        for event in (started(1000), *(stepped(step, 1000.0 + step) for step in range(1, 40))):
            display.emit(event)
        assert time.monotonic() - begun < 2
        display.close()
        assert time.monotonic() - begun < 5


def test_a_live_display_has_said_its_end_when_it_is_closed(terminal: tuple[int, int]) -> None:
    reader, file = terminal
    with open(file, "w", closefd=False) as stream:
        display = build_display(Console(file=stream, force_terminal=True, _environ={"TERM": "xterm"}), Path("run"))
        for event in (started(1000), stepped(1, 1001), ended(40, 1033, wall_s=33.0)):
            display.emit(event)
        display.close()
    assert "run folder" in read_all(reader)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_to_a_full_disk_is_a_status_and_no_traceback(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | commands.MODULES | {"PYTHONUNBUFFERED": unbuffered},
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_sentence_on_a_strange_name_does_not_steer_the_terminal(tmp_path: Path) -> None:
    recipe = tmp_path / "strange.toml"
    recipe.write_text('["a\\u001b]0;x\\u0007"]\nb = 1\n')
    status, _, err = commands.finish(commands.start("train", str(recipe)))
    assert status == 1
    assert "no key a\\x1b]0;x\\x07" in err
    assert "\x1b" not in err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_does_not_die_of_its_output(tmp_path: Path, ranks: int) -> None:
    run = tmp_path / "run"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *spell_small_run(run, ranks, "3st")],
            stdout=full,
            stderr=full,
            env=os.environ | commands.MODULES | {"LOCKSTEP_CACHE": str(tmp_path)},
            timeout=120,
        )
    assert done.returncode == 0
    assert [event.status for event in commands.events(run) if isinstance(event, RunEnded)] == ["finished"]
