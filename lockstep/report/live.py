"""A run in a browser while it goes on: a small server for this machine alone.

It listens on 127.0.0.1, answers two addresses and no other, and only who asks for it by that name: a page from
elsewhere whose name was made to point here is turned away.
"""

import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lockstep.errors import LockstepError
from lockstep.events import CheckpointSaved, Evaluated, Event, Notice, RunEnded, RunStarted, StepDone
from lockstep.report.follow import Follower, has_ended
from lockstep.report.page.document import encode_data
from lockstep.report.page.live_page import build_live_page, build_state

HOST = "127.0.0.1"
SHOWN = (RunStarted, StepDone, Evaluated, CheckpointSaved, Notice, RunEnded)
MOST_STEPS = 20_000  # step records kept: a run of weeks is drawn as quickly as one of hours
LOOK_S = 0.5  # the folder may be on a slow disk that many read
ANSWER_S = 20.0  # for a reader that stops in the middle of a request


class Watched:
    """What is known of a run, and its page's state; looks at the folder when asked, not too often."""

    def __init__(self, source: Path) -> None:
        self._follower = Follower(source)
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._looked_s = -LOOK_S
        self._revision = 0
        self._state = json.dumps({"revision": 0})

    def read_state(self, known: int) -> str:
        """The state as JSON; only its number, and why it is old, where the asker has it already."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._look()
                self._looked_s = time.monotonic()
            if known != self._revision:
                return self._state
            silence = self._describe_silence()
            return json.dumps({"revision": self._revision} | ({"problem": silence} if silence else {}))

    def _describe_silence(self) -> str:
        """Told apart from the state, as it goes on growing while nothing else is new."""
        if not self._revision or has_ended(self._events):
            return ""
        return self._follower.describe_silence(max(event.time_s for event in self._events))

    def close(self) -> None:
        self._follower.close()

    def _look(self) -> None:
        new = [event for event in self._follower.poll() if isinstance(event, SHOWN)]
        if not new:
            return
        self._events += new
        steps = [event for event in self._events if isinstance(event, StepDone)]
        if len(steps) > MOST_STEPS:
            dropped = {id(event) for event in steps[:-1:2]}
            self._events = [event for event in self._events if id(event) not in dropped]
        if any(isinstance(event, RunStarted) for event in self._events):
            self._revision += 1
            self._state = encode_data({"revision": self._revision, **build_state(self._events)})


class Server(ThreadingHTTPServer):
    """Serves one run."""

    daemon_threads = True  # a browser that keeps a line open does not hold up the end

    def __init__(self, watched: Watched, port: int) -> None:
        self.watched = watched
        self.page = build_live_page().encode()
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise LockstepError(f"Port {port} cannot be had ({reason}); leave --port out for any free one.") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is nothing to report."""


class Handler(BaseHTTPRequestHandler):
    """Answers the page, and its state."""

    server: Server
    server_version = "lockstep"
    sys_version = ""
    timeout = ANSWER_S

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"This page is for this machine alone.\n")
            return
        asked = urlsplit(self.path)
        if asked.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.page)
        elif asked.path == "/state":
            self._answer_state(asked.query)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")

    def _answer_state(self, query: str) -> None:
        known = parse_qs(query).get("revision", ["0"])[0]
        number = int(known) if known.isascii() and known.isdecimal() and len(known) < 10 else 0
        try:
            state = self.server.watched.read_state(number)
        except LockstepError as error:
            state = json.dumps({"revision": number, "problem": str(error)})
        except Exception as error:  # said in the page: who watches has no other place to see it
            problem = f"This cannot be shown, because of a fault in Lockstep ({type(error).__name__}: {error})."
            state = json.dumps({"revision": number, "problem": problem})
        self._answer(HTTPStatus.OK, "application/json", state.encode(errors="backslashreplace"))

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not for people."""


def watch_web(source: Path, port: int, say: Callable[[str], None] = print) -> None:
    """Serve live curves of a run until Ctrl-C."""
    watched = Watched(source)
    try:
        with Server(watched, port) as server:
            say(f"Live at {server.address}, for this machine alone; Ctrl-C ends it, and not the run.")
            try:
                server.serve_forever(poll_interval=0.2)
            except KeyboardInterrupt:
                say("")  # the terminal shows ^C in this line
    finally:
        watched.close()
