"""Chromium without a window, driven by ChromeDriver in the W3C's WebDriver protocol."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import wait_until

REQUIRED = "SPARSEPACK_REQUIRE_BROWSER"
"""With this variable a machine without a browser fails the tests instead of skipping them."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which WebDriver gives an element


class Browser:
    """One window."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def call(self, path: str, **body: Any) -> Any:
        """Give a command of WebDriver; its value."""
        value = self._session.post(path, json=body).json()["value"]
        assert not (isinstance(value, dict) and "error" in value), value
        return value

    def script(self, code: str, *arguments: Any) -> Any:
        """What the body of a function in the page returns."""
        return self.call("execute/sync", script=code, args=list(arguments))

    def wait(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        wait_until(lambda: bool(self.script(f"return Boolean({condition})")))

    def text(self, css: str) -> str:
        """The text of the last element that a selector finds."""
        return str(self.script("return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''", css))

    def click(self, css: str) -> None:
        """Click an element, which must be seen."""
        self.call(f"element/{self._find(css)}/click")

    def type(self, css: str, text: str) -> None:
        """Type into an element; `\\ue007` is the Enter key."""
        self.call(f"element/{self._find(css)}/value", text=text)

    def complaints(self) -> list[str]:
        """What the console has said since the last call: errors, and what the page's policy forbade."""
        return [entry["message"] for entry in self.call("se/log", type="browser")]

    def requests(self) -> set[str]:
        """Addresses that the page has asked since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.call("se/log", type="performance")]
        return {it["params"]["request"]["url"] for it in events if it["method"] == "Network.requestWillBeSent"}

    def _find(self, css: str) -> str:
        return str(self.call("element", using="css selector", value=css)[_ELEMENT])


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile. Skips the test where there is none, unless `REQUIRED` is set."""
    driver, found = (shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome"))
    if not driver or not found:
        missing = "no Chromium and ChromeDriver here; apt-get install chromium chromium-driver"
        assert not os.environ.get(REQUIRED), missing
        pytest.skip(missing)
    options = {"binary": found, "args": [*FLAGS, f"--user-data-dir={profile}"]}
    capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = next(
                at[1] for line in process.stdout if (at := re.search(r"started successfully on port (\d+)", line))
            )
            url = f"http://127.0.0.1:{port}/session"
            made = httpx.post(url, json={"capabilities": {"alwaysMatch": capabilities}}, timeout=120).json()["value"]
            address = f"{url}/{made['sessionId']}"
            with httpx.Client(base_url=f"{address}/", timeout=60) as session:
                try:
                    yield Browser(session)
                finally:
                    httpx.delete(address, timeout=60).raise_for_status()  # ends the browser
        finally:
            process.terminate()
