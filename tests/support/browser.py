"""A headless Chromium, driven over its own debugging protocol through two pipes."""

import base64
import json
import os
import select
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

BINARY = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_ANSWER_S = 120.0


class Browser:
    """One page of one browser. A scope: the browser ends with it."""

    def __init__(self, folder: Path) -> None:
        assert BINARY is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--no-first-run", "--disable-background-networking", "--disable-sync"]
        flags += ["--disable-component-update", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={folder / 'profile'}", "about:blank"]
        joined = shlex.join([BINARY, *flags])
        self._log = folder / "browser.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["/bin/bash", "-c", f"exec {joined} 3<&{to_browser} 4>&{from_browser}"],
                pass_fds=(to_browser, from_browser),
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(folder)},
            )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._raw = b""
        self._session = ""
        self.events: list[dict[str, Any]] = []
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # it ends when the pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol, and its answer. What happens meanwhile goes to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self.events.append(found)

    def evaluate(self, script: str) -> Any:
        """What a script on the page comes to; a promise is waited for."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def view(self, width: int, height: int, *, dark: bool = False) -> None:
        """How wide the window is, and which colours are preferred."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def complaints(self) -> list[str]:
        """Errors and warnings in the console so far, and exceptions."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters))
            elif event.get("method") == "Log.entryAdded":
                if parameters["entry"]["level"] in ("error", "warning"):
                    found.append(parameters["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(json.dumps(parameters["args"]))
        return found

    def requested(self) -> set[str]:
        """Addresses that the page asked for so far."""
        sent = [
            event for event in self.events if event.get("method") == "Network.requestWillBeSent"
        ]
        return {event["params"]["request"]["url"] for event in sent}

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._raw:
            ready, _, _ = select.select([self._in], [], [], _ANSWER_S)
            part = os.read(self._in, 1 << 20) if ready else b""
            assert part, f"the browser does not answer: {self._log.read_text()[-2000:]}"
            self._raw += part
        line, _, self._raw = self._raw.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found
