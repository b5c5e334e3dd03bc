"""Debian's chromium without a screen, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import websocket

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 60.0  # seconds
PAUSE = 0.05
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-allow-origins=*", "--remote-debugging-port=0", "--force-color-profile=srgb",
    "--lang=en-US",
)  # fmt: skip


@functools.cache
def _axe() -> str:
    package = importlib.util.find_spec("axe_playwright_python")  # of which only this file is used
    assert package is not None and package.origin is not None
    return Path(package.origin).with_name("axe.min.js").read_text()


class Browser:
    """One page of a browser.

    Attributes:
        console: errors and exceptions that the page has reported.
        received: bytes that the network has brought.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = websocket.create_connection(address, timeout=PATIENCE, suppress_origin=True)
        self._last = 0
        self.console: list[str] = []
        self.received = 0
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What a method of the protocol returns."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._last:
                assert "error" not in message, f"{method}: {message['error']}"
                found: dict[str, Any] = message["result"]
                return found
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, details: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.console.append(json.dumps(details["exceptionDetails"])[:1000])
        elif (
            event == "Log.entryAdded"
            and details["entry"]["level"] == "error"
            and details["entry"]["source"] != "network"
        ):
            self.console.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        elif event == "Network.dataReceived":
            self.received += details["encodedDataLength"]

    def reset(self) -> None:
        """Forget what was there before."""
        self.open("about:blank")
        for method in ("Network.clearBrowserCookies", "Emulation.clearDeviceMetricsOverride"):
            self.call(method)
        self.emulate()
        self.console.clear()
        self.received = 0

    @contextlib.contextmanager
    def tab(self, url: str) -> Iterator[Browser]:
        """Another tab, which hides this one until it is closed."""
        target = self.call("Target.createTarget", url=url)["targetId"]
        address = self._address.rpartition("/")[0]
        page = Browser(f"{address}/{target}")
        try:
            yield page
        finally:
            page.close()
            self.call("Target.closeTarget", targetId=target)

    def open(self, url: str) -> None:
        """Go to an address, and wait until its page has loaded: before that it takes no keys."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in done, f"{code}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def until(self, code: str, seconds: float = PATIENCE) -> Any:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # the page is being replaced
                if found := self.run(code):
                    return found
            assert time.monotonic() < deadline, f"never true: {code}\n{self.text()[:3000]}\n{self.console}"
            time.sleep(PAUSE)

    def text(self) -> str:
        """What the page shows."""
        return str(self.run("document.body.innerText"))

    def shows(self, text: str) -> None:
        """Wait until the page shows this text."""
        self.until(f"document.body.innerText.includes({json.dumps(text)})")

    def click(self, selector: str, text: str = "") -> None:
        """Click on the first such element, with this text in it; wait for it."""
        all_such = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found = f"{all_such}.find(e => e.textContent.includes({json.dumps(text)}) && !e.disabled)"
        self.until(f"!!{found}")
        self.run(f"{found}.click()")

    def fill(self, selector: str, text: str, event: str = "input") -> None:
        """Put a text into a field."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.until(f"!!{field}")
        self.run(f"{field}.value = {json.dumps(text)}; {field}.dispatchEvent(new Event('{event}', {{bubbles: true}}))")

    def press(self, key: str) -> None:
        """Press a key."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38}
        details: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        if key == "Enter":
            details["text"] = "\r"
        elif len(key) == 1:
            details["text"] = key
        self.call("Input.dispatchKeyEvent", type="keyDown", **details)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Give the page another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def emulate(self, **features: str) -> None:
        """Set media features, such as `prefers_color_scheme="dark"`."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def barriers(self) -> list[str]:
        """What axe finds serious: what people without a mouse, or without sight, cannot use."""
        self.call("Runtime.evaluate", expression=_axe())  # the page's own policy would not let it in
        found = self.run("axe.run({resultTypes: ['violations']}).then(it => it.violations)")
        return [
            f"{it['id']}: {[node['html'][:200] for node in it['nodes']]}"
            for it in found
            if it["impact"] in {"serious", "critical"}
        ]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what the page shows as a picture; or the whole page, also what is below."""
        more = {}
        if whole:
            more = {
                "captureBeyondViewport": True,
                "clip": {**self.call("Page.getLayoutMetrics")["cssContentSize"], "scale": 1},
            }
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a new profile, which ends with this context."""
    folder = tempfile.mkdtemp(prefix="paceline-browser-")
    program = shutil.which("chromium")
    assert program is not None
    environment = {**os.environ, "HOME": folder, "LANG": "en_US.UTF-8", "TZ": "UTC"}
    process = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    try:
        port_file, deadline = Path(folder, "DevToolsActivePort"), time.monotonic() + PATIENCE
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < deadline and process.poll() is None, "chromium does not start"
            time.sleep(PAUSE)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            pages = [it for it in json.load(answer) if it["type"] == "page"]
        page = Browser(pages[0]["webSocketDebuggerUrl"])
        yield page
        page.close()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
