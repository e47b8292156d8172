"""Sides of a benchmark that take turns, each in a process of its own: one that dies takes nobody along.

Sides are prepared one after the other and only one runs at a time, so that they disturb neither each other's clocks nor
each other's choice of kernels. On a GPU whose memory grows short, a side that waits holds only what it cannot give
back.
"""

import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from lockstep.data.workers import follow_parent

Step = Callable[[], object]

LIMIT_S = 240.0  # for any answer; compiling is the longest a side is waited for
END_S = 5.0  # for a process to end by itself
TURN_S = 0.25
FIRST_STEPS = 6  # choose, compile and record
STEADY_STEPS = 3
WARM_UP_STEPS = 2  # at the start of a turn: memory given back comes again, caches fill
ROOM = 1.5  # times what another side needs at most has to be free when a turn ends, or memory is given back for it


class Entry(NamedTuple):
    """Who takes part: a module's function that gives a word on how its step runs, and the step."""

    name: str
    build: Callable[..., tuple[str, Step]]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Ready:
    """What a side says when it has taken its first steps.

    `memory_bytes` is what a step needs in the long run: the most that was allocated at once during a few steps, or, if
    that is more, what stays reserved after them when all cached memory has been given back. The first is right for
    kernels launched one by one, whose cached memory others may have; the second for a CUDA graph, whose memory looks
    free between two replays and is not. `peak_bytes` is the most since the process began, preparation included.
    """

    setting: str
    prepare_s: float  # building, compiling and recording; not the start of the process
    step_s: float
    memory_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Outcome:
    """A side that took all its turns: seconds per step in each."""

    name: str
    ready: Ready
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Failure:
    """What a process answers instead of what it was asked for."""

    reason: str


class _LeftOut(Exception):
    """Why a side takes no further part."""


def take_turns(
    entries: Sequence[Entry],
    *,
    rounds: int,
    turn_s: float = TURN_S,
    limit_s: float = LIMIT_S,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Prepare every side, then let all take turns of about `turn_s`; those that fail are named and left out."""
    sides: list[_Side] = []
    try:
        for entry in entries:
            try:
                sides.append(_Side(entry, limit_s))
                say(f"  {entry.name} ready after {sides[-1].outcome.ready.prepare_s:.0f} s")
            except _LeftOut as reason:
                say(f"left out: {entry.name}: {reason}")
        for _ in range(rounds):
            for side in list(sides):
                try:
                    side.take_turn(turn_s, count_room([other.outcome for other in sides if other is not side]))
                except _LeftOut as reason:
                    say(f"left out: {side.outcome.name}: {reason}")
                    sides.remove(side)
                    side.end()
        return [side.outcome for side in sides]
    finally:
        for side in sides:
            side.end()


def count_room(others: Sequence[Outcome]) -> float:
    """Bytes that have to be free, so that any other side may take its turn."""
    return ROOM * max((other.ready.peak_bytes for other in others), default=0)


class _Side:
    """A side as the parent sees it: a process that answers."""

    outcome: Outcome

    def __init__(self, entry: Entry, limit_s: float) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit the parent's threads and device
        self._limit_s = limit_s
        self._connection, theirs = context.Pipe()
        # No daemon, which may have no processes of its own, as a DataLoader has; it follows its parent by itself.
        self._process = context.Process(target=_serve, args=(theirs, entry.build, entry.arguments), daemon=False)
        self._process.start()
        theirs.close()  # so that the process's end is the pipe's end
        try:
            self.outcome = Outcome(entry.name, self._wait())
        except BaseException:
            self.end()
            raise

    def take_turn(self, turn_s: float, room: float) -> None:
        """Let it take as many steps as fit, but more than one, and leave that many bytes free afterwards."""
        with suppress(OSError):  # if its process has ended, waiting says so
            self._connection.send((max(2, int(turn_s / self.outcome.ready.step_s)), room))
        self.outcome.times.append(self._wait())

    def _wait(self) -> Any:
        """Its answer."""
        try:
            if not self._connection.poll(self._limit_s):
                self._process.kill()
                raise _LeftOut(f"no answer within {self._limit_s:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(END_S)
            raise _LeftOut(f"its process ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, _Failure):
            raise _LeftOut(answer.reason)
        return answer

    def end(self) -> None:
        """End its process, by force if it does not see that nobody asks any more."""
        self._connection.close()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, build: Callable[..., tuple[str, Step]], arguments: tuple[Any, ...]) -> None:
    """A side's process: prepare, then take turns until nobody asks."""
    follow_parent()
    try:
        ready, step = _prepare(build, arguments)
        connection.send(ready)
        while True:
            count, room = connection.recv()
            for _ in range(WARM_UP_STEPS):
                step()
            connection.send(time_steps(step, count))
            # Only where it must be: having it given back and allotted again takes seconds a turn.
            if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < room:
                torch.cuda.empty_cache()
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # compilers and drivers raise nearly anything
        connection.send(_Failure(first_line(error)))


def _prepare(build: Callable[..., tuple[str, Step]], arguments: tuple[Any, ...]) -> tuple[Ready, Step]:
    has_gpu = torch.cuda.is_available()
    _synchronize()  # starts the device, which is no side's merit or fault
    start = time.perf_counter()
    setting, step = build(*arguments)
    for _ in range(FIRST_STEPS):
        step()
    _synchronize()
    prepare_s = time.perf_counter() - start
    gc.collect()
    peak = torch.cuda.max_memory_allocated() if has_gpu else 0
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    step_s = time_steps(step, STEADY_STEPS)
    memory = _steady_memory() if has_gpu else 0
    return Ready(setting, prepare_s, step_s, memory, max(peak, memory)), step


def _steady_memory() -> int:
    """As `Ready` has it, after a few steps with a fresh peak."""
    allocated = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return max(allocated, torch.cuda.memory_reserved())


def time_steps(step: Step, count: int) -> float:
    """Seconds per step, from an idle device to an idle device."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    _synchronize()
    return (time.perf_counter() - start) / count


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_line(error: Exception) -> str:
    """The error's first line, and the second where the first only announces it; 160 characters at most."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:160]
