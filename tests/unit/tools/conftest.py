"""A headless Chromium driven over the WebDriver protocol; makes ``synthetic_runs`` of the diagnostics tests importable."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "diagnostics"))

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1400,1000",
)


class Browser:
    """One Chromium session. Raises RuntimeError with the driver's answer when a command fails."""

    def __init__(self, driver: str, chromium: str) -> None:
        self._profile = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._address = f"http://127.0.0.1:{self._port()}"
        options = {"args": [*FLAGS, f"--user-data-dir={self._profile.name}"], "binary": chromium}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        try:
            answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except Exception:
            self._end_process()
            raise
        self._session = f"/session/{answer['sessionId']}"

    def _port(self) -> int:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return int(found[1])
        raise RuntimeError("chromedriver ended before it named its port")

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._address + path, data=data, method=method, headers={"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=120) as response:
                return json.load(response)["value"]
        except HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:600]}") from error

    def open(self, page: Path) -> None:
        self._send("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Value of a script that returns something."""
        return self._send("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        """Messages since the last call."""
        return [entry["message"] for entry in self._send("POST", f"{self._session}/se/log", {"type": "browser"})]

    def command(self, name: str, **parameters: Any) -> Any:
        """A DevTools command."""
        return self._send("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def media(self, *, scheme: str = "light", kind: str = "screen") -> None:
        """Pretend the reader's colour scheme and medium."""
        self.command("Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, *, width: int = 1400) -> None:
        """The whole page as PNG."""
        height = self.run("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        """The page as printed."""
        return base64.b64decode(self.command("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])

    def close(self) -> None:
        try:
            self._send("DELETE", self._session)
        finally:
            self._end_process()

    def _end_process(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        for _ in range(20):  # the browser's last writes may still be on their way
            try:
                self._profile.cleanup()
                return
            except OSError:
                time.sleep(0.1)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Skipped, with the reason, where Chromium or its driver is absent."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        missing = "chromedriver" if driver is None else "chromium"
        pytest.skip(f"{missing} is not installed (Debian packages chromium and chromium-driver)")
    session = Browser(driver, chromium)
    yield session
    session.close()
