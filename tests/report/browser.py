"""A real browser for tests: chromium without a window, driven over its DevTools protocol."""

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

websocket = pytest.importorskip("websocket", reason="websocket-client is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio"),
    *("--disable-dev-shm-usage", "--disable-default-apps", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*"),
]


class Page:
    """One tab: opens addresses, and keeps what it asked the network for and what it complained of."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=60)
        self._count = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer, noting what happens meanwhile."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._count:
                assert "error" not in message, message["error"]
                return dict(message["result"])
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(told["args"])[:600])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}"[:600])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {told['message']}")
            self._socket.send(
                json.dumps({"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}})
            )

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises awaited; spaces that break no line are spaces."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        value = told["result"].get("value")
        return value.replace("\xa0", " ") if isinstance(value, str) else value

    def wait(self, expression: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true."""
        end_s = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < end_s, f"{expression} did not come true in {seconds} s; {self.complaints}"
            time.sleep(0.03)
        return value

    def show(self, address: str, *, width: int = 1400, scheme: str = "light") -> float:
        """Open an address at a width in a colour scheme; seconds until every chart is drawn."""
        self.resize(width)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        begun_s = time.monotonic()
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && !!document.documentElement.dataset.drawn")
        return time.monotonic() - begun_s

    def measure_work(self) -> float:
        """Seconds that the page's own thread has computed: its time where other work does not count."""
        metrics = self.send("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime"))

    def resize(self, width: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def save_picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        height = self.run("document.documentElement.scrollHeight")
        width = self.run("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        told = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own, gone at the end."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium here; install Debian's with: apt-get install chromium")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if found := re.search(r"DevTools listening on ws://([^/]+)/", line):
                address = found[1]
                break
        assert address, "chromium did not start"
        page = Page(_find_tab(address))
        yield page
        page.close()
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stderr is not None
        process.stderr.close()


def _find_tab(address: str) -> str:
    import urllib.request

    end_s = time.monotonic() + 90
    while time.monotonic() < end_s:
        with urllib.request.urlopen(f"http://{address}/json/list", timeout=10) as answer:
            tabs = json.load(answer)
        for tab in tabs:
            if tab["type"] == "page":
                return str(tab["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise AssertionError("chromium has no tab")
