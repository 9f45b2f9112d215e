"""The HTTP server of `resilientctl exporter`: metrics, health, and the page of this host's runs."""

import base64
import contextlib
import hmac
import http.server
import ipaddress
import json
import math
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

from resilient_run.ckpt.errors import DaemonError, WireError

from .history import History
from .metrics import CONTENT_TYPE, exposition

_PATIENCE_S: Final = 10.0
_CROWD: Final = 32
_HEALTH_S: Final = 1.0
_WATCH_S: Final = 10.0
_JSON: Final = "application/json"
_HOST: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z.-]+))(?::[0-9]*)?")

Ask = Callable[[], dict[str, Any]]
"""Returns the daemon's status; raises OSError, WireError or DaemonError when it gives none."""


class ExporterServer(http.server.ThreadingHTTPServer):
    """Answers `GET /metrics`, `/healthz`, `/status.json` and `/`; all but `/healthz` only to who knows the password.

    A client has 10 s for its request and the answer, of which there are 32 at a time.

    Args:
        address: Host and port to listen on; port 0 takes a free one (`server_address`).
        ask: The daemon's status.
        password: As password of basic authentication, with any user name, or as a bearer token; None lets everybody in.
        tls: Encrypts, None for plain HTTP.

    Raises:
        OSError: The address cannot be had.
    """

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], ask: Ask, *, password: str | None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.ask, self.password = ask, password
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(_CROWD)
        self._health_lock = threading.Lock()
        self._history, self._history_lock = History(), threading.Lock()
        self._health, self._health_until_s = (HTTPStatus.OK, b""), -math.inf
        super().__init__(address, _RequestHandler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def health(self) -> tuple[HTTPStatus, bytes]:
        """Return what `/healthz` answers, of the last second: strangers may ask, and the daemon has other work."""
        with self._health_lock:
            if time.monotonic() >= self._health_until_s:
                self._health = self._look()
                self._health_until_s = time.monotonic() + _HEALTH_S
            return self._health

    def status(self) -> tuple[dict[str, Any] | None, str]:
        """Return the daemon's status with the history of its runs, None if it gives none, and why."""
        try:
            status = self.ask()
            with self._history_lock:
                self._history.add_to(status, time.time())
            return status, ""
        except (OSError, WireError, DaemonError) as error:
            return None, str(error) or type(error).__name__

    def watch(self) -> None:
        """Look every 10 s, for ever, so that the page has a past when somebody opens it."""
        while True:
            self.status()
            time.sleep(_WATCH_S)

    def _look(self) -> tuple[HTTPStatus, bytes]:
        status, _ = self.status()
        # Who asks may be anybody, so names are not told.
        if status is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, b"no daemon answers\n"
        if any(job.get("failure") for job in status["jobs"]):
            return HTTPStatus.SERVICE_UNAVAILABLE, b"a run failed in the daemon\n"
        return HTTPStatus.OK, b"ok\n"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; hang up where too many wait already."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()  # there is no thread
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in time, and make room for the next."""
        deadline = threading.Timer(_PATIENCE_S, _hang_up, (request,))
        deadline.daemon = True
        try:
            deadline.start()
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what went wrong, unless the client broke off or speaks no TLS, which is nobody's trouble."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(request, socket.SHUT_RDWR)


class _RequestHandler(http.server.BaseHTTPRequestHandler):
    server: ExporterServer
    timeout = _PATIENCE_S
    protocol_version = "HTTP/1.0"
    server_version, sys_version = "resilient-run", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            code, body = self.server.health()
            self._answer(code, "text/plain", body)
        elif not self._is_meant():
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"call it localhost, or by its address\n")
        elif not self._is_admitted():
            self._answer(HTTPStatus.UNAUTHORIZED, "text/plain", b"a password is needed\n")
        elif path == "/metrics":
            status, _ = self.server.status()
            self._answer(HTTPStatus.OK, CONTENT_TYPE, exposition(status))
        elif path == "/status.json":
            status, trouble = self.server.status()
            code = HTTPStatus.SERVICE_UNAVAILABLE if status is None else HTTPStatus.OK
            self._answer(code, _JSON, json.dumps({"trouble": trouble} if status is None else status).encode())
        elif path == "/":
            self._answer(
                HTTPStatus.OK, "text/html; charset=utf-8", files(__package__).joinpath("page.html").read_bytes()
            )
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there are /, /metrics, /healthz and /status.json\n")

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""

    def _is_meant(self) -> bool:
        """Tell whether no web page made a browser ask here, by a name of its own that leads to the loopback address."""
        if self.server.password is not None:
            return True
        here = ipaddress.ip_address(self.connection.getsockname()[0])
        # A socket for both versions of IP calls 127.0.0.1 ::ffff:127.0.0.1.
        if not (getattr(here, "ipv4_mapped", None) or here).is_loopback:
            return True
        names = self.headers.get_all("Host", ["localhost"])
        match = _HOST.fullmatch(names[0])
        if match is None or len(names) > 1:
            return False
        # An address resolves to nothing else, so no web page has one of the exporter's for its own name.
        with contextlib.suppress(ValueError):
            ipaddress.IPv6Address(match["v6"]) if match["v6"] else ipaddress.IPv4Address(match["name"])
            return True
        return match["name"] is not None and match["name"].lower() == "localhost"

    def _is_admitted(self) -> bool:
        if self.server.password is None:
            return True
        scheme, _, text = self.headers.get("Authorization", "").partition(" ")
        # The parser of headers takes bytes for Latin-1.
        given = text.encode("latin-1")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given, self.server.password.encode())

    def _answer(self, code: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'")
        if code is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="resilient-run", charset="UTF-8"')
        self.end_headers()
        self.wfile.write(body)
