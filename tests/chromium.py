"""A real Chromium for tests of pages, driven over its debugging pipe: no port, no other package."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.real import need_program


class Browser:
    """One headless Chromium with one page. ``errors`` collects console errors, exceptions and refused loads."""

    def __init__(self, process: subprocess.Popen[bytes], reading: int, writing: int) -> None:
        self.process = process
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        wanted = self._count
        while True:
            answer = self._receive()
            if answer.get("id") == wanted:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, width: int, dark: bool = False, media: str = "screen") -> None:
        """Show a file in a window of this width and wait until it has loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()

    def ask(self, expression: str) -> Any:
        """Return what a JavaScript expression comes to in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, to: Path) -> None:
        """Write what the whole page looks like as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        to.write_bytes(base64.b64decode(shot["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._reading, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._take(message)
        return message

    def _take(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, parameters = event["method"], event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start Chromium with an empty profile; it has ended when the block is left."""
    program = need_program("chromium")
    to_child, writing = os.pipe()
    reading, from_child = os.pipe()
    # The pipe's ends must be the file descriptors 3 and 4 of Chromium; the shell puts them there.
    shell = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}'
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        ["bash", "-c", shell, program, *options],
        pass_fds=(to_child, from_child),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_child)
    os.close(from_child)
    browser = None
    try:
        browser = Browser(process, reading, writing)
        yield browser
        browser._session = None
        browser.call("Browser.close")
        process.wait(10)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(reading)
        os.close(writing)
