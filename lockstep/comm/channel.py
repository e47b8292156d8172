"""Runs communication strictly in the order it is submitted, beside the computation (step 7 on the walk).

One thread for a CPU, one side stream for a GPU. All ranks submit the same work in the same order, so they also run it
in the same order, and what is summed does not depend on timing.

    compute stream   | forward | backward ... buffer 0 full ... buffer 1 full ... | waits | update |
                                        \\ event            \\ event               / event
    channel's stream                     | all-reduce 0 |    | all-reduce 1 | ---'

The channel's stream waits for the event that marks a buffer as full, never for the whole compute stream where there is
such an event; a recorded step has its events inside the recording (`engine/recorded.py`).
"""

import queue
import threading
from collections.abc import Callable

import torch

from lockstep.comm.moment import Moment, take_moment
from lockstep.errors import LockstepError

CLOSE_S = 1.0


class Pending:
    """Work submitted to a channel."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._event: torch.cuda.Event | None = None
        self.begun: Moment | None = None  # where the channel is told to time its work
        self.done: Moment | None = None

    def run(self, stream: torch.cuda.Stream | None, *, timed: bool = False) -> BaseException | None:
        """Do the work, on `stream` where there is one; what it raises is returned and comes out of `wait`."""
        try:
            if stream is None:
                self.begun = take_moment(on_gpu=False) if timed else None
                self._function()
                self.done = take_moment(on_gpu=False) if timed else None
            else:
                with torch.cuda.stream(stream):
                    self.begun = take_moment(on_gpu=True) if timed else None
                    self._function()
                    self.done = take_moment(on_gpu=True) if timed else None
                    self._event = stream.record_event()
        except BaseException as error:
            self._error = error
        self._is_over.set()
        return self._error

    @property
    def is_done(self) -> bool:
        """Whether the device is through with it, too; asks and does not wait."""
        return self._is_over.is_set() and (self._event is None or self._event.query())

    def fail(self, error: BaseException) -> None:
        """Give up the work before it began."""
        self._error = error
        self._is_over.set()

    def wait(self) -> None:
        """Return when the work is done, or raise what it raised; on a GPU the current stream waits, not the host."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            self._event.wait()


class Channel:
    """One lane for communication. After an error it runs nothing more: the ranks are no longer in step."""

    def __init__(self, device: torch.device) -> None:
        # First in line whenever the device has room for another kernel: all ranks wait for what is sent. None on a CPU.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.times = False  # whether work notes when it began and ended, on a GPU by the device's clock
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, function: Callable[[], None], after: torch.cuda.Event | None = None) -> Pending:
        """Run `function` after all that was submitted before, and on a GPU after an event.

        Without one it runs after all that the current stream was given so far: that is what writes the gradients.
        """
        pending = Pending(function)
        if self.stream is not None:
            if after is None:
                self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            else:
                self.stream.wait_event(after)
            self._run(pending)
            return pending
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lockstep-channel", daemon=True)
            self._thread.start()
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        """Let go of the thread; work that has not begun fails, and a thread that is stuck dies with the process."""
        self._error = self._error or LockstepError("The communication channel was closed before this work began.")
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)
            self._thread = None

    def _run(self, pending: Pending) -> None:
        if self._error is not None:
            pending.fail(self._error)
        else:
            # close() may have set its error meanwhile: the first one stays.
            error = pending.run(self.stream, timed=self.times)
            self._error = self._error or error

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            self._run(pending)
