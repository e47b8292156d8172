"""The program in a process forked from the ranks' server: what it imports is there already, two seconds of every start.

The process is what `python -m lockstep` would have been: a session, a folder, an environment, standard streams and
signals of its own. What a fork cannot have (variables for the interpreter, limits of whoever starts it) is for
`commands.start_new`.
"""

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn

from lockstep.engine.template import SIGNALS
from tests.ranks import context


class Forked:
    """A process as `subprocess.Popen` would show it, as far as tests ask.

    It is `python -m lockstep ARGUMENTS`, or where there is `code`, `python -c CODE ARGUMENTS`.
    """

    def __init__(
        self, arguments: Sequence[str], cwd: Path | None, environment: dict[str, str], code: str | None = None
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._output: dict[str, str] = {}
        self._readers: list[threading.Thread] = []
        ends = [os.pipe() for _ in range(3)]  # standard output, standard error, and the word that it has begun
        self._process = context.Process(
            target=_become,
            args=(_Handles([writer for _, writer in ends]), self.args, str(cwd or Path.cwd()), environment, code),
            daemon=True,  # whatever a test that failed has left is ended with the tests
        )
        self._process.start()
        for _, writer in ends:
            os.close(writer)
        out, err, ready = (reader for reader, _ in ends)
        self.stdout, self.stderr = os.fdopen(out, encoding="utf-8"), os.fdopen(err, encoding="utf-8")
        with open(ready, "rb") as word:
            word.read()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in ("stdout", "stderr")]
            for reader in self._readers:
                reader.start()
        end = None if timeout is None else time.monotonic() + timeout
        for reader in self._readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self._output["stdout"], self._output["stderr"]

    def _read(self, name: str) -> None:
        with getattr(self, name) as stream:
            self._output[name] = stream.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Handles:
    """Open files on their way to a process that is about to start."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _take, tuple(map(DupFd, self._numbers))


def _take(*handles: Any) -> list[int]:
    return [handle.detach() for handle in handles]


def _become(
    handles: list[int], arguments: list[str], cwd: str, environment: dict[str, str], code: str | None
) -> NoReturn:
    """Be what a program in an interpreter of its own is, to the end."""
    out, err, ready = handles
    os.setsid()
    os.chdir(cwd)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    sys.path.insert(0, cwd)
    sys.argv = ["lockstep" if code is None else "-c", *arguments]
    os.close(ready)
    status = 0
    try:
        if code is None:
            runpy.run_module("lockstep", run_name="__main__", alter_sys=True)
        else:
            exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    # As an interpreter ends, and not by way of what multiprocessing would still do for its own.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
