"""A real headless Chromium for tests of pages, spoken to by WebDriver's JSON over chromedriver.

It makes no connection but those that a page asks for. Scripts of pages are switched off; what the
browser said on its console and what it asked for is kept.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FLAGS = (
    *("--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--disable-default-apps"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


def why_no_browser() -> str:
    """Why there is no browser here; empty where there is one."""
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    return f"{' and '.join(missing)} not installed" if missing else ""


class Browser:
    """One window."""

    def __init__(self, port: int) -> None:
        self._port = port
        flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        options = {"args": flags, "perfLoggingPrefs": {"enableNetwork": True}}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"
        self.command("Emulation.setScriptExecutionDisabled", value=True)

    def open(self, url: str) -> None:
        """Load a page, with all that it needs."""
        self._post(f"{self._session}/url", {"url": url})

    def resize(self, width: int, height: int = 900, *, dark: bool = False, scale: int = 1) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        shade = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[shade])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression of ours, which runs though scripts of pages do not."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, *, whole: bool = False) -> bytes:
        answer = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def said(self) -> list[str]:
        """What is new on the console."""
        return [entry["message"] for entry in self._log("browser")]

    def asked(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def command(self, name: str, **parameters: Any) -> Any:
        """One command of the Chrome DevTools Protocol."""
        words = {"cmd": name, "params": parameters}
        return self._post(f"{self._session}/goog/cdp/execute", words)

    def close(self) -> None:
        self._ask("DELETE", self._session, None)

    def _log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._post(f"{self._session}/se/log", {"type": kind})
        return found

    def _post(self, path: str, body: Any) -> Any:
        return self._ask("POST", path, json.dumps(body))

    def _ask(self, method: str, path: str, body: str | None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            answer = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{path}: {answer['message']}")
        return answer


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile; both are gone after the block."""
    with tempfile.TemporaryDirectory(prefix="browser-") as home:
        environment = {**os.environ, "HOME": home, "TMPDIR": home}
        words = ["chromedriver", "--port=0"]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        ) as driver:
            try:
                assert driver.stdout is not None
                lines = iter(driver.stdout.readline, b"")
                ports = (re.search(rb"successfully on port (\d+)", line) for line in lines)
                port = next(int(found[1]) for found in ports if found)
                opened = Browser(port)
                try:
                    yield opened
                finally:
                    opened.close()
            finally:
                driver.terminate()
