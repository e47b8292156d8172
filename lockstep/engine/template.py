"""A process that has imported everything and becomes ranks: a rank starts in milliseconds instead of seconds.

    launcher ── fork, before it has threads or a GPU ──▶ template ── fork ──▶ (gone at once) ── fork ──▶ rank
       ▲                                                                                                 │
       └───────────────── the kernel makes the rank, an orphan, the launcher's own child ────────────────┘

So the launcher waits for a rank, and a rank follows its launcher, as if it had been started from a shell. The template
itself never trains, opens nothing and has one thread: what it forks is as clean as a program that has just started.
Where there are GPUs it also imports what a GPU's first step would import, while the launcher looks at the data.
Where there is no such thing (not Linux), or the template is gone, ranks start the plain way, in a new interpreter.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from lockstep import kernels
from lockstep.kernels import has_triton
from lockstep.processes import follow_parent, is_spared, name_process

NAME = "lockstep-ready"
PACKAGE = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
# What launchers and terminals send. The template leaves all of them to the launcher and the ranks.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
Main = Callable[[], None]
ANSWER_S = 60.0  # for the template to import and fork; a machine that swaps is slow
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))  # asking CUDA itself would spoil it for what is forked
# What PyTorch imports in a rank's first step, in the middle of it: when a gradient is given to `backward`.
FIRST_STEP = ("torch.nested._internal.nested_tensor", "torch.fx.experimental.symbolic_shapes")


def run_program() -> None:
    """What `python -m lockstep` does."""
    sys.modules.pop("lockstep.__main__", None)  # the `lockstep` command has it by that name, which runpy would warn of
    runpy.run_module("lockstep", run_name="__main__")


class Template:
    """Starts ranks, which are children of this process. To be opened before threads start and before a GPU is used.

    `main` is the program, as it runs when `sys.argv` has its arguments.
    """

    def __init__(self, main: Main = run_program) -> None:
        self._line: socket.socket | None = None
        self._process = 0
        if sys.platform != "linux":
            return
        self._adopted_before = _adopts_orphans()
        if not _adopt_orphans(True):
            return
        ours, theirs = socket.socketpair()
        launcher = os.getpid()
        _flush()
        try:
            self._process = os.fork()
        except OSError:  # no room for another process: ranks will start the plain way, or say so themselves
            ours.close()
            theirs.close()
            _adopt_orphans(self._adopted_before)
            return
        if not self._process:
            try:
                ours.close()
                _serve(theirs, launcher, main)
            finally:
                os._exit(1)
        theirs.close()
        ours.settimeout(ANSWER_S)
        self._line = ours

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run `lockstep ARGUMENTS` as a child of this process with that environment; returns its number."""
        with contextlib.suppress(OSError, ValueError):
            if self._line is not None:
                _send(self._line, {"arguments": list(arguments), "environment": dict(environment)})
                if process := int(_receive(self._line) or 0):  # none where it could not fork, or has ended
                    return process
        self.close()  # so that it does not answer later, with a second such rank
        # Not by `subprocess`, which would wait for its children itself. This very package, also where it runs from its
        # source tree; a module that happens to lie in the current folder is none of Python's own (-P).
        modules = os.pathsep.join(filter(None, (str(PACKAGE.parent), environment.get("PYTHONPATH"))))
        command = [sys.executable, "-P", "-m", PACKAGE.name, *arguments]
        return os.posix_spawn(sys.executable, command, {**environment, "PYTHONPATH": modules})

    def close(self) -> None:
        """Let the template end; ranks go on."""
        if self._line is not None:
            self._line.close()
            self._line = None
            # It may be amid its imports, for seconds; it has opened nothing, and what it has forked is not its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._process, 0)
            # Ranks are children by now. A program that goes on would otherwise get every orphan of whatever it starts,
            # and wait for none.
            _adopt_orphans(self._adopted_before)

    def __enter__(self) -> "Template":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _adopt_orphans(does: bool) -> bool:
    """Let orphans among this process's descendants become its children from now on, or not; whether that works."""
    try:
        return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False


def _adopts_orphans() -> bool:
    """Whether orphans among this process's descendants become its children."""
    answer = ctypes.c_int(0)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


def _serve(line: socket.socket, launcher: int, main: Main) -> NoReturn:
    """What the template does, to its end: one rank for each message, and its number in return."""
    follow_parent(launcher)
    # Held back rather than ignored: a rank that has just been forked gets what is meant for it once it can act on it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    name_process(NAME)
    if any(driver.exists() for driver in GPU_DRIVERS):
        import_ahead()
    gc.freeze()  # what is there now is never collected, so that ranks go on sharing its memory
    while message := _receive(line):
        _send(line, _fork_orphan(line, main, **message))
    os._exit(0)


def import_ahead() -> None:
    """Import what ranks with GPUs need in their first step, once for all of them; none of it asks for a GPU."""
    modules = list(FIRST_STEP)
    if has_triton():
        modules += [f"{kernels.__name__}.{found.name}" for found in pkgutil.iter_modules(kernels.__path__)]
    for module in modules:
        with contextlib.suppress(Exception):  # a rank that needs it will say what is wrong
            importlib.import_module(module)
    with contextlib.suppress(Exception):  # Triton reads all of itself to name its cache, and remembers the name
        importlib.import_module("triton.runtime.cache").triton_key()


def _fork_orphan(line: socket.socket, main: Main, arguments: list[str], environment: dict[str, str]) -> int:
    """Fork twice; the one in between ends at once, and what it has forked is the launcher's."""
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        try:
            parent = os.getpid()
            rank = os.fork()
            if rank:
                os.write(writer, str(rank).encode())
                os._exit(0)
            for file in (reader, writer):
                os.close(file)
            line.close()
            _become_rank(parent, main, arguments, environment)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as answer:
        number = int(answer.read() or 0)
    os.waitpid(between, 0)
    return number


def _become_rank(parent: int, main: Main, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Be what `lockstep ARGUMENTS` would have been in an interpreter of its own, to the end."""
    while os.getppid() == parent:  # the launcher's in a moment
        time.sleep(0.001)
    os.environ.clear()
    os.environ.update(environment)
    for number in SIGNALS:
        if is_spared(number):  # by `nohup`, for the whole command
            continue
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    status = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        sys.argv = ["lockstep", *arguments]
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    # Not by the usual way out, which leads through what the launcher was about when it forked the template.
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    _flush()
    os._exit(status & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _send(line: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    line.sendall(len(data).to_bytes(8, "big") + data)


def _receive(line: socket.socket) -> Any:
    """The next value; None at the end."""
    size = int.from_bytes(_receive_bytes(line, 8), "big")
    return json.loads(_receive_bytes(line, size)) if size else None


def _receive_bytes(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := line.recv(count - len(data))):
        data += more
    return data
