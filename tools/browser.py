"""Drives a headless Chromium through chromedriver, by the WebDriver protocol and nothing else.

Both come with the system (`apt install chromium chromium-driver`); `missing` says which is not
there. Used by the tests of pages, and by what takes pictures of them.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_PROGRAMS = "chromium", "chromedriver"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # of the protocol: what names an element
_LONGEST = 60.0  # seconds that anything may take, on a machine with other work
KEYS = {"Tab": "\ue004", "Space": "\ue00d", "Left": "\ue012", "Right": "\ue014", "Enter": "\ue007"}

_PALE = """
const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(part);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const of = (e) => getComputedStyle(e).backgroundColor;
const isSeen = (e) => /^rgb\\(/.test(of(e)) || e === document.body;
const behind = (e) => isSeen(e) ? of(e) : behind(e.parentElement);
const words = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
const all = [...document.querySelectorAll('body *')];
const shown = all.filter((e) => e.checkVisibility());
return shown.filter((e) => !e.closest('svg') && words(e)).map((e) => {
  const both = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
  return [(both[0] + 0.05) / (both[1] + 0.05), e.textContent.slice(0, 40)];
}).filter(([ratio]) => ratio < 4.5);
"""


def missing() -> str:
    """Returns the programs that are not installed, with commas between them."""
    return ", ".join(name for name in _PROGRAMS if shutil.which(name) is None)


class Browser:
    """A window of a browser."""

    def __init__(self, base: str, session: str) -> None:
        self._base = f"{base}/session/{session}"

    def open(self, url: str) -> None:
        """Opens a page."""
        self._ask("POST", "/url", {"url": url})

    def new_tab(self) -> str:
        """Opens a tab and goes to it; returns what names it."""
        tab: str = self._ask("POST", "/window/new", {"type": "tab"})["handle"]
        self.go_to(tab)
        return tab

    def go_to(self, tab: str) -> None:
        """Goes to a tab: everything else is about the one that was gone to last."""
        self._ask("POST", "/window", {"handle": tab})

    def run(self, script: str, *given: object) -> Any:
        """Returns what a script returns, which finds what it is given in `arguments`."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(given)})

    def wait(self, script: str, *given: object) -> Any:
        """Waits until a script returns something that is true, and returns it."""
        until = time.monotonic() + _LONGEST
        while not (found := self.run(script, *given)):
            if time.monotonic() > until:
                raise TimeoutError(f"it never came about: {script}")
            time.sleep(0.05)
        return found

    def press(self, *keys: str) -> None:
        """Presses keys one after the other: names of `KEYS`, or letters."""
        actions = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        self._ask("POST", "/actions", {"actions": [keyboard]})

    def errors(self) -> list[str]:
        """Returns what the page has complained about since this was last asked."""
        found = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] == "SEVERE"]

    def look(self, width: int, height: int, *, dark: bool = False, whole: bool = False) -> None:
        """Sets the size of the page, and whether it is dark; `whole` takes its own height."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "deviceScaleFactor": 1, "mobile": width < 600}
        self._tell("Emulation.setDeviceMetricsOverride", {**size, "height": height})
        if whole:
            tall = self.run("return document.documentElement.scrollHeight")
            self._tell("Emulation.setDeviceMetricsOverride", {**size, "height": tall})

    def picture(self) -> bytes:
        """Returns what is shown, as PNG."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def pale(self) -> list[tuple[float, str]]:
        """Returns the texts whose contrast with what is behind them is below 4.5, with it."""
        return [(ratio, text) for ratio, text in self.run(_PALE)]

    def names(self) -> list[tuple[str, str]]:
        """Returns role and name of everything that a screen reader meets, in order."""
        tree = self._tell("Accessibility.getFullAXTree", {})["nodes"]
        told = [node for node in tree if not node.get("ignored")]
        return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in told]

    def _tell(self, command: str, params: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        return _ask(method, self._base + path, body)


def _ask(method: str, url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_LONGEST) as answer:  # loopback  # nosec B310
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from error


@contextmanager
def browser(flags: Sequence[str] = ()) -> Iterator[Browser]:
    """A browser without a window, as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="browser-") as home:
        command = [_PROGRAMS[1], "--port=0"]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert driver.stdout is not None
            base = _base_of(driver.stdout.readline)
            options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}"]
            options += [
                "--disable-dev-shm-usage",
                "--force-color-profile=srgb",
                "--hide-scrollbars",
                *flags,
            ]
            wanted = {
                "goog:chromeOptions": {"args": options},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            made = _ask("POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
            try:
                yield Browser(base, made["sessionId"])
            finally:
                _ask("DELETE", f"{base}/session/{made['sessionId']}")
        finally:
            driver.terminate()
            driver.wait()
            driver.stdout.close()


def _base_of(readline: Callable[[], str]) -> str:
    """Where the driver listens, as it says."""
    while line := readline():
        if "started successfully on port" in line:
            port = line.strip().rstrip(".").rsplit(" ", 1)[1]
            return f"http://127.0.0.1:{port}"
    raise RuntimeError("chromedriver does not start")
