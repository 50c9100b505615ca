"""Headless Chromium, controlled by the DevTools protocol over pipes."""

import fcntl
import json
import os
import select
import subprocess
import tempfile
from typing import Any, Self

from tests.processes import HANG_SECONDS, wait_until

OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --remote-debugging-pipe"""


class Browser:
    """One page.

    Raises RuntimeError for a command that fails and for an exception of the page's script.
    """

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser, from_browser)]
        command = [program, *OPTIONS.split(), f"--user-data-dir={self._profile.name}"]
        # The browser reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", *command]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(shell, pass_fds=ends, **quiet)
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._buffer, self._count, self._session = b"", 0, {}
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280)

    def resize(self, width: int) -> None:
        sizes = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], HANG_SECONDS)[0]:
                raise RuntimeError("the browser does not answer")
            if not (block := os.read(self._read, 1 << 16)):
                raise RuntimeError("the browser has ended")
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, address: str) -> None:
        """Load a page, and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                raise RuntimeError(event["params"]["exceptionDetails"])

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key by its name in the DOM, such as Tab."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            names = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            self.call("Input.dispatchKeyEvent", type=kind, **names)

    def write(self, text: str) -> None:
        """Type text where the focus is."""
        self.call("Input.insertText", text=text)

    def wait_for(self, script: str) -> None:
        """Wait until an expression on the page is true."""
        wait_until(lambda: self.evaluate(script))

    def list_requests(self) -> list[str]:
        """Return the addresses that the page has requested."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]
