"""Headless Chromium, spoken to over a pipe by the DevTools protocol: no driver, no port, no
package.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0
LOCAL = ("file:", "data:", "about:", "chrome:")


def browser() -> str | None:
    """The program, where it is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of a browser.

    Attributes:
        requests: what was asked for beyond the file itself. complaints: errors of the console, of
            scripts, of policies.
    """

    def __init__(self, to: int, out: int) -> None:
        self._to = to
        self._out = out
        self._rest = b""
        self._last = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; events that come before it are noted."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found
        raise TimeoutError(method)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._out, 1 << 20)
            if not data:
                raise EOFError("the browser ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent" and not values["request"]["url"].startswith(LOCAL):
            self.requests.append(values["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(values["exceptionDetails"].get("text")))
        elif event == "Runtime.consoleAPICalled" and values["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(str(values["args"]))
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(values["entry"]["text"])

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file at a width, as a phone does below 500."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + SECONDS
        while self.evaluate("location.protocol + document.readyState") != "file:complete":
            assert time.monotonic() < end, "the page is not loaded"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """A PNG of the whole page, not only of what the window shows."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        printed = self.call(
            "Page.printToPDF",
            printBackground=True,
            paperWidth=8.27,
            paperHeight=11.69,
            preferCSSPageSize=True,
        )
        return base64.b64decode(printed["data"])


@contextmanager
def page() -> Iterator[Page]:
    """A page of a browser that has nothing of its user's and reaches no network."""
    program = browser()
    assert program is not None
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
            "--no-proxy-server",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={home}",
            "--remote-debugging-pipe",
        ]

        def place() -> None:  # the protocol is spoken on descriptors 3 and 4
            os.dup2(os.dup(to_browser), 3)
            os.dup2(os.dup(from_browser), 4)

        process = subprocess.Popen(
            ["sh", "-c", 'exec "$0" "$@"', *command],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": home},
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(from_us, to_us)
        finally:
            os.close(from_us)
            os.close(to_us)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()
