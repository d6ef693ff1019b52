"""A real Chromium without a window, driven over a pair of pipes (its DevTools protocol)."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from jobs import needs
from project import LIMIT_S

_LIMIT_S = 30.0
_ASK_AXE = """axe.run().then(found => found.violations
  .filter(each => ["serious", "critical"].includes(each.impact))
  .map(each => each.id + ": " + each.nodes.map(node => node.html).join(", ")))"""


class Chromium:
    """One page in a browser of its own; a context manager.

    Attributes:
        said: what the page wrote to the console, and its errors.
    """

    def __init__(self) -> None:
        needs("chromium", "a page in a real browser")
        self._folder = tempfile.mkdtemp(prefix="motley-chromium-")
        ours, theirs = os.pipe(), os.pipe()  # what we say, and what it does
        # It reads from descriptor 3 and writes to 4, whatever numbers these pipes have here.
        start = (
            f"exec chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage "
            f'--no-first-run --remote-debugging-pipe --user-data-dir="$1" about:blank '
            f"3<&{ours[0]} 4>&{theirs[1]}"
        )
        self._job = subprocess.Popen(
            ["bash", "-c", start, "bash", self._folder], pass_fds=(ours[0], theirs[1]),
            start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read, self._rest, self._number = ours[1], theirs[0], b"", 0
        self.said: list[str] = []
        self._session = ""

    def __enter__(self) -> "Chromium":
        made = self._ask("Target.createTarget", url="about:blank")
        attached = self._ask("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._job.kill()
        self._job.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, address: str, width: int, height: int, dark: bool = False) -> None:
        """Show a page on a screen of some size, in CSS pixels."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=width < 600,
            deviceScaleFactor=1,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """What an expression of JavaScript is, on the page."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def accessibility_faults(self) -> list[str]:
        """What axe-core finds serious or worse on the page: rule, and where."""
        self.run((files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
        found = self._ask(
            "Runtime.evaluate", expression=_ASK_AXE, awaitPromise=True, returnByValue=True
        )
        return list(found["result"]["value"])

    def paper(self) -> bytes:
        """The page as a PDF."""
        made = self._ask("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(made["data"])

    def text(self) -> str:
        """What somebody reads on the page."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def await_text(self, said: str, limit: float = LIMIT_S) -> str:
        """Wait until it is on the page, which has come as a whole; all that is there."""
        deadline = time.monotonic() + limit
        while said not in (text := self.text()) or not self.run("document.readyState=='complete'"):
            assert time.monotonic() < deadline, (text, self.said)
            time.sleep(0.1)
        return text

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        found = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(json.dumps(told["params"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _LIMIT_S
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], "no answer"
            data = os.read(self._read, 2**16)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
