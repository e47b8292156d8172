"""How a process ends: with the one that started it, and at once for whoever asks twice. Torch-free.

A rank ends with its launcher, so that none trains on unseen. The launcher leaves its number in the environment
(`engine/launch.py`); `cli.py` reads it before anything else. The kernel does the rest: it needs no thread, and it also
reaches a rank that is stuck.
"""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

LAUNCHER = "LOCKSTEP_LAUNCHER"  # the process that started this rank
# What torchrun and srun leave in the environment. A rank started by hand may outlive its shell, as after `nohup`.
STARTERS = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID")
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
# One Ctrl-C may come twice, from the terminal and from whoever passes it on; nobody asks again so soon.
APART_S = 0.3
# What a shell or `nohup` has a program in the background ignore. Whoever started it so wants it to stay so.
SPARED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
LAST_S = 1.0  # that a process which ends gives a terminal to take its last words
_stops: list[int] = []  # signals that have asked this process to stop
IMPORTING = "<frozen importlib._bootstrap>"  # the file, as Python calls it, of the code that reads modules


def follow_launcher(environment: MutableMapping[str, str]) -> None:
    """In a rank started by our launcher, torchrun or srun: its end is the end of this process too."""
    launcher = environment.pop(LAUNCHER, "")  # not for the processes that this one starts
    if launcher.isdecimal():
        follow_parent(int(launcher))
    elif any(name in environment for name in STARTERS):
        follow_parent(os.getppid())


def follow_parent(parent: int) -> None:
    """Be killed when the parent ends, however it ends; without a word where the system has no such thing."""
    import ctypes

    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError, TypeError):
        return
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def name_process(name: str) -> None:
    """What `ps` and `top` call this process, 15 letters at most; without a word where the system has no such thing."""
    import ctypes

    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, os.fsencode(name), 0, 0, 0)


@contextmanager
def quit_on_interrupt() -> Iterator[None]:
    """While inside, Ctrl-C ends the process with a word: for imports, which an exception would leave half done."""
    with _answer_interrupts(lambda number, _frame: _quit(number)):
        yield


@contextmanager
def spare_imports() -> Iterator[None]:
    """While inside, Ctrl-C amid an import, wherever it is made, ends the process with a word; else it is an exception.

    An exception out of a module half read may be swallowed by another, or come out as one, with a traceback.
    """

    def answer(number: int, frame: FrameType | None) -> None:
        if is_importing(frame):
            _quit(number)
        signal.default_int_handler(number, frame)

    with _answer_interrupts(answer):
        yield


def is_importing(frame: FrameType | None) -> bool:
    """Whether Python is reading a module, for this frame or one that waits for it."""
    while frame is not None and frame.f_code.co_filename != IMPORTING:
        frame = frame.f_back
    return frame is not None


def say_interrupted() -> None:
    """The word on Ctrl-C, once for all ranks."""
    if speaks_for_all(os.environ):
        say_last("lockstep: interrupted.")


def speaks_for_all(environment: Mapping[str, str]) -> bool:
    """Whether this process says what all ranks would say alike: rank 0, or one that is no rank."""
    return environment.get("RANK", environment.get("SLURM_PROCID", "0")) == "0"


def speaks_for_node(environment: Mapping[str, str]) -> bool:
    """Whether this process says what all ranks of its node would say alike."""
    return environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")) == "0"


def say_last(text: str) -> None:
    """A line on stderr, past Python's stream, which a stuck thread may hold; a second later it is given up.

    A terminal that nobody reads (Ctrl-S) would hold the end of the process for ever. Safe in a signal's handler.
    """
    is_said = _thread.allocate_lock()
    is_said.acquire()

    def write() -> None:
        with suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))
        is_said.release()

    with suppress(RuntimeError):  # no room for another thread
        _thread.start_new_thread(write, ())
        is_said.acquire(timeout=LAST_S)


def _quit(number: int) -> NoReturn:
    say_interrupted()
    os._exit(128 + number)


@contextmanager
def _answer_interrupts(answer: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    with answer_signals((signal.SIGINT,), answer):
        yield


@contextmanager
def answer_signals(numbers: Collection[int], answer: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While inside, `answer` is the handler of these signals, less those that the process was started to ignore."""
    before = {number: signal.signal(number, answer) for number in numbers if not is_spared(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_spared(number: int) -> bool:
    """Whether whoever started this process had it ignore the signal."""
    return number in SPARED and signal.getsignal(number) is signal.SIG_IGN


def start_hearing() -> None:
    """Let the programs that this process starts hear what it was itself started to ignore; it goes on ignoring it.

    A signal that is ignored stays so in them, one with a handler does not.
    """
    for number in filter(is_spared, SPARED):
        signal.signal(number, lambda _number, _frame: None)


def ignore_interrupts() -> None:
    """From here on there is nothing left to interrupt: an exception amid the interpreter's own end is only noise."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def note_stop(number: int) -> None:
    """Keep the first signal that has asked this process to stop, for its exit status."""
    _stops.append(number)


def stop_status() -> int:
    """The exit status of a process that has stopped as asked: by a signal of its own, or by the word of other ranks."""
    return 128 + (_stops[0] if _stops else signal.SIGINT)


@contextmanager
def end_on_second(numbers: Collection[int], leave: Callable[[int], int] = lambda status: status) -> Iterator[None]:
    """While inside, one of these signals that comes a second time ends the process, with what `leave` says of a status.

    Handlers run in the main thread, which may be stuck in a read that never returns. The number of every signal also
    goes down a pipe, from the handler in C, and a thread waits at its end.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_wait_for_second, args=(reader, numbers, leave), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # which ends the thread
        thread.join()
        os.close(reader)


def _wait_for_second(reader: int, numbers: Collection[int], leave: Callable[[int], int]) -> None:
    firsts: dict[int, float] = {}
    while heard := os.read(reader, 64):
        for number in heard:
            now = time.monotonic()
            if number in numbers and now - firsts.setdefault(number, now) > APART_S:
                say_last("lockstep: stopped at once, as asked; go on from the last checkpoint with --resume.")
                os._exit(leave(128 + number))


@contextmanager
def stopping_by_exception() -> Iterator[None]:
    """While inside, SIGTERM is a KeyboardInterrupt too, so that what was begun is ended; a run sees to both itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
