"""The live view as a read-only web page, which server-sent events update.

The path ``/`` returns the page. The path ``/live?run=NAME&rank=K`` sends the content of the page as
JSON, once per second. The server has no other paths.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import sys
import threading
import time
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from motley.errors import MotleyError
from motley.live.runs import GLANCE_S, Collector, Runs
from motley.text import typed_command

_PAGE = Path(__file__).with_name("watch.html")
_MOST_VIEWERS, _REQUEST_S = 32, 30.0
_CURVES = 8  # newest runs whose curves are drawn; the page has as many colours
_NAMES = ("localhost", "127.0.0.1", "::1")  # host names of a browser's requests to loopback


def serve(runs: Runs, where: str, collector: Collector) -> int:
    """Serve the page until it is interrupted, and return the exit code."""
    host, port = parse_address(where)
    with open_server(host, port) as server:
        server.live = Live(runs, collector)
        server.token = "" if is_loopback(host) else secrets.token_urlsafe(16)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{server.server_address[1]}/"
        print(f"{address}?token={server.token}" if server.token else address)
        if not server.token:
            print("of this machine alone; from elsewhere: "
                  f"ssh -L {server.server_address[1]}:{shown}:{server.server_address[1]} "
                  f"{socket.gethostname()}")  # fmt: skip
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def parse_address(where: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[::1]:PORT`` or ``PORT``.

    Raises:
        MotleyError: the text is none of these.
    """
    result = re.fullmatch(r"(?:(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+)):)?([0-9]{1,5})", where.strip())
    if result is None or int(result[3]) > 65535:
        raise MotleyError(
            f"--serve {where} is not an address; write HOST:PORT, as in --serve 127.0.0.1:8080"
        )
    return result[1] or result[2] or "127.0.0.1", int(result[3])


def is_loopback(host: str) -> bool:
    """Return True if only this machine's users can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_server(host: str, port: int) -> "Server":
    """Return a listening server.

    Raises:
        MotleyError: the server cannot listen at this host and port.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        Server.address_family = family
        return Server(address[:2], Handler)
    except OSError as error:
        free = f"another port, for example: --serve {host}:{port + 1 if port < 65535 else 8080}"
        fix = f"choose {free}" if port else "choose a port"
        raise MotleyError(f"cannot serve on {host}:{port}: {error.strerror}; {fix}") from None


class Live:
    """A reader of the runs' records while pages are open. All pages share each reading."""

    def __init__(self, runs: Runs, collector: Collector) -> None:
        self._runs, self._collector = runs, collector
        self._lock = threading.Lock()

    def await_look(self, seen: int) -> int:
        """Wait for a new reading of the records, and return the number of readings so far.

        Args:
            seen: number of readings that the caller has seen.
        """
        while True:
            with self._lock:
                if self._runs.look_if_due(time.monotonic(), time.time()):
                    self._collector.start(self._runs.running_followers())
                if self._runs.looks != seen:
                    return self._runs.looks
            time.sleep(GLANCE_S)

    def render(self, name: str, rank: int | None) -> str:
        """Return a page's content as JSON: all runs with their curves, and one run in full.

        The run in full is the run of the given name. If the name is empty, the run in full is the
        only run, or the only running one.

        Args:
            name: name of the run; may be empty.
            rank: number of the rank whose history is shown; None: no history.
        """
        with self._lock:
            wall, runs = time.time(), self._runs
            names, running = runs.names, runs.running()
            # Only the list of runs draws curves, and a page that asks for a run shows no list.
            curves = 0 if name in names else _CURVES
            if name not in names:
                alone = names if len(names) == 1 else running if len(running) == 1 else []
                name = "" if name or not alone else alone[0]
            brief = ("status", "mood", "headline", "step", "last_step", "left_s", "rate", "unit")
            known = [(each, runs.snapshot(each, wall)) for each in names]
            listed = [
                {"id": each, **{field: getattr(now, field) for field in brief},
                 **({"losses": now.losses, "metrics": now.metrics} if number < curves else {})}
                for number, (each, now) in enumerate(known) if now is not None
            ]  # fmt: skip
            shown = runs.snapshot(name, wall, rank=rank)
            run = shown and {"id": name, **shown.as_json()}
            return json.dumps({"time": wall, "runs": listed, "older": runs.hidden, "run": run})


class Server(ThreadingHTTPServer):
    """An HTTP server whose threads end with the server.

    Attributes:
        live: the source of the content.
        token: text that each request must contain; empty: no text is needed.
    """

    daemon_threads = True
    live: Live
    token = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.viewers = threading.BoundedSemaphore(_MOST_VIEWERS)
        self.page = typed_command(_PAGE.read_text()).encode()
        self.policy = _policy(self.page.decode())

    def server_bind(self) -> None:
        """Bind the socket. Do not look up the name of this machine, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an OSError, which only means that a browser has closed the connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _policy(page: str) -> str:
    """Return the Content-Security-Policy, which allows only the page's own script and style."""
    hashes = {}
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes[tag] = b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; "
        f"style-src 'sha256-{hashes['style']}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Handler(BaseHTTPRequestHandler):
    """A handler of GET requests for the page and for its content."""

    server: Server
    server_version, sys_version = "motley", ""
    protocol_version = "HTTP/1.0"  # an answer ends with its connection
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        """Answer a GET request with the page, or with the page's content as JSON."""
        if refusal := self._refusal():
            self._answer(403, refusal.encode())
            return
        requested = urlsplit(self.path)
        if requested.path == "/":
            self._answer(200, self.server.page, "text/html; charset=utf-8")
        elif requested.path == "/live":
            self._stream(self._asked("run"), self._asked("rank"))
        else:
            self._answer(404, b"there is only /\n")

    def _asked(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query).get(name, [""])[0]

    def _refusal(self) -> str:
        """Return the reason to refuse the request; empty if the request is allowed."""
        token = self.server.token
        if token:  # any host name is allowed, because the token proves the request
            given = self._asked("token").encode()
            right = hmac.compare_digest(given, token.encode())
            return "" if right else "wrong token: watch.py has printed the whole address\n"
        # A foreign page whose name resolves to this address is recognised by that name.
        host = (self.headers.get("Host") or "").strip()
        named = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        own = str(self.server.server_address[0])
        return "" if named in (*_NAMES, own) else "ask for it as localhost or 127.0.0.1\n"

    def _stream(self, run: str, rank: str) -> None:
        if not self.server.viewers.acquire(blocking=False):
            self._answer(503, b"too many viewers\n")
            return
        try:
            self._head(200, "text/event-stream")
            number = int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 9 else None
            looks = -1
            while True:
                looks = self.server.live.await_look(looks)
                content = self.server.live.render(run, number)
                self.wfile.write(f"data: {content}\n\n".encode())
        except OSError:  # the browser has left
            pass
        finally:
            self.server.viewers.release()

    def _answer(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self._head(code, kind)
        self.wfile.write(body)

    def _head(self, code: int, kind: str) -> None:
        self.send_response(code)
        for name, value in (
            ("Content-Type", kind), ("Cache-Control", "no-store"),
            ("Content-Security-Policy", self.server.policy), ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"), ("Cross-Origin-Resource-Policy", "same-origin"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing, so that requests are not logged."""
