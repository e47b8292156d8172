"""Several ranks for a program that goes on living: `lockstep train` as a process of its own, heard through its log.

The process ends with the program, however that ends. Signals are passed on to it, so that one Ctrl-C writes a
checkpoint and a second one ends it. Torch-free: what the program itself does with PyTorch is no concern of the ranks.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from lockstep.engine.listener import Ear, OnEvent, warn_aside
from lockstep.engine.starting import has_finished
from lockstep.errors import Diverged, LockstepError
from lockstep.events import Event, RunEnded
from lockstep.processes import LAUNCHER, answer_signals
from lockstep.report.follow import Follower

Outcome = Literal["finished", "interrupted", "stopped"]
LOOK_S = 0.1  # between two looks at the log
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
INTERRUPTED = {128 + number for number in PASSED_ON}
PREFIX = "lockstep: "  # of what ranks and launcher have to say


def run_apart(arguments: list[str], folder: Path, on_event: OnEvent | None, *, quiet: bool) -> Outcome:
    """Run `lockstep ARGUMENTS` to its end; a failure is the first sentence that was said of it."""
    records = _Records(folder)
    process = _start(arguments, quiet=quiet)
    words: list[str] = []
    threads = [_pass_on(process.stderr, lambda: sys.stderr, words.append)]
    if process.stdout is not None:
        threads.append(_pass_on(process.stdout, lambda: sys.stdout))
    has_asked = has_diverged = False

    def ask() -> None:
        nonlocal has_asked
        if not has_asked:
            has_asked = True
            process.send_signal(signal.SIGTERM)

    ear = Ear(on_event, ask, warn_aside) if on_event else None
    with _ended_with(process), _passing_signals(process) as signals:
        while True:
            is_over = process.poll() is not None  # asked first: all that was written before is then heard below
            for event in records.poll() if ear or is_over else ():
                has_diverged = isinstance(event, RunEnded) and event.diverged
                if ear:
                    ear.hear(event)
            if is_over:
                break
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
    for thread in threads:
        thread.join()
    records.close()
    kind = Diverged if has_diverged else LockstepError
    return _judge(process.returncode, words, folder, was_signalled=bool(signals), was_asked=has_asked, kind=kind)


def _judge(
    status: int,
    words: list[str],
    folder: Path,
    *,
    was_signalled: bool,
    was_asked: bool,
    kind: type[LockstepError] = LockstepError,
) -> Outcome:
    if status == 0 or (status in INTERRUPTED and has_finished(folder)):  # a signal came amid its last words
        return "finished"
    if status in INTERRUPTED:
        return "stopped" if was_asked and not was_signalled else "interrupted"
    said = [line.removeprefix(PREFIX) for line in words if line.startswith(PREFIX)]
    # Whoever found the cause spoke first; what was said before ranks started again is another story.
    restarts = [place for place, line in enumerate(said) if "start again (" in line]
    said = said[restarts[-1] + 1 :] if restarts else said
    # But for a rank that cannot go on: the others may give its reason before it does itself.
    said = [line for line in said if " stopped with it: " not in line] or said
    raise kind(said[0] if said else f"The ranks ended with status {status}; see what they printed.")


def _start(arguments: list[str], *, quiet: bool) -> "subprocess.Popen[str]":
    places = [str(Path(place).absolute()) for place in sys.path]  # modules are found where the program finds them
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), LAUNCHER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None if _is_plain(sys.stdout) else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # In a session of its own: a Ctrl-C reaches the program, which passes it on, once.
        start_new_session=True,
    )


def _is_plain(stream: IO[str]) -> bool:
    """Whether it is this process's own output, and not what a notebook or a test has put in its place."""
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False


def _pass_on(
    source: IO[str] | None, target: Callable[[], IO[str]], keep: Callable[[str], None] = lambda line: None
) -> threading.Thread:
    """A thread that prints line after line of what a process says."""
    assert source is not None

    def work() -> None:
        with source:
            for line in source:
                keep(line.rstrip("\n"))
                with suppress(OSError, ValueError):
                    target().write(line)
                    target().flush()

    thread = threading.Thread(target=work, name="lockstep-output", daemon=True)
    thread.start()
    return thread


@contextmanager
def _ended_with(process: "subprocess.Popen[str]") -> Iterator[None]:
    """The process is over at the end, whatever comes up."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def _passing_signals(process: "subprocess.Popen[str]") -> Iterator[list[int]]:
    """While inside, signals go on to the process; yields those that came. They reach the main thread alone."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        process.send_signal(number)

    with answer_signals(PASSED_ON, pass_on):
        yield came


class _Records:
    """What a run says from now on; its folder may be yet to come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._follower: Follower | None = None
        if folder.is_dir():
            self.poll()

    def poll(self) -> list[Event]:
        if self._follower is None:
            if not self._folder.is_dir():
                return []
            self._follower = Follower(self._folder)
        return self._follower.poll()

    def close(self) -> None:
        if self._follower:
            self._follower.close()
