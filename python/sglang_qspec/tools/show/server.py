"""The web server of `qspec show`: the page's files, and questions to one QSPEC server."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
from collections.abc import Generator, Sequence
from email.message import Message
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from sglang_qspec.errors import ClientError, QSpecError
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.guesses.earlier import EarlierAnswers
from sglang_qspec.tools.guesses.guess import limits_in
from sglang_qspec.tools.show.document import SOURCES_MODULE, document, read
from sglang_qspec.tools.show.question import Event, Question, ask

LOGGER = logging.getLogger(__name__)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MAX_BODY = 1 << 20
"""Maximum size of a question, in bytes."""
IDLE_S = 30.0
"""Maximum wait for the rest of a browser's request, in seconds."""
VIEW = (
    "dom.js",
    "charts.js",
    SOURCES_MODULE,
    "answer.js",
    "details.js",
    "tokens.js",
    "timeline.js",
    "view.js",
)
"""Modules that show an answer, each after those that it imports."""
PAGE = (*VIEW, "stream.js", "saving.js", "page.js")
SAVED = (*VIEW, "saved.js")
"""Modules of a saved page."""
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class ShowServer(ThreadingHTTPServer):
    """Serves the page on `host` and `port`, and asks only the server of `client`."""

    def __init__(
        self,
        host: str,
        port: int,
        client: Client,
        prompts: Sequence[str],
        earlier: EarlierAnswers | None = None,
    ) -> None:
        """`earlier` are answers that become guesses.

        Raises ClientError if the server of `client` does not answer or does not use QSPEC, or if
        the address cannot be used.
        """
        self.client = client
        self.host = host
        model, (state, *_) = client.info()
        self.guesses = partial((earlier or EarlierAnswers()).texts, limits=limits_in(state))
        self.about = {"url": client.url, "model": model, "prompts": list(prompts)}
        self.files = {f"/{name}": _file(name) for name in ("page.css", *PAGE)}
        self.files["/"] = _file("index.html")
        saved = document("An answer of qspec show", SAVED, "HERE").encode()
        self.files["/saved.html"] = (saved, "text/plain; charset=utf-8")
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded
            raise ClientError(f"the address {host}:{port} cannot be used: {error}") from None

    def answer(self, body: bytes) -> Generator[Event, None, None]:
        """The events of the answer to a question in JSON. Raises QSpecError."""
        return ask(self.client, Question.read(body), self.guesses)

    @property
    def url(self) -> str:
        """The address of the page."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def allows(self, headers: Message) -> bool:
        """Whether a request comes from this page."""
        return is_own(headers.get("Host", ""), headers.get("Origin"), self.host)


def is_own(host: str, origin: str | None, own: str = "localhost") -> bool:
    """Whether a request with these headers comes from the page of a server, or from no page.

    A page of another site can make its own name resolve to this address (DNS rebinding). So the
    host must be an address, `localhost`, or the name `own` that the user gave. Its port may be that
    of a forwarded connection. A request of another site's page has another origin.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    known = name in ("localhost", own.lower()) or _is_address(name)
    return known and origin in (None, f"http://{host}")


def _file(name: str) -> tuple[bytes, str]:
    return read(name).encode(), f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    """Answers one request of the browser, and closes the connection."""

    server: ShowServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        path = self.path.partition("?")[0]
        if path == "/server":
            self._send(200, json.dumps(self.server.about).encode(), "application/json")
        elif path in self.server.files:
            self._send(200, *self.server.files[path])
        else:
            self._refuse(404, f"there is no {path} here")

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/ask":
            self._refuse(404, f"there is no {self.path} here")
        elif not length.isdecimal():
            self._refuse(411, "the request has no Content-Length")
        elif len(length) > 20 or int(length) > MAX_BODY:
            size = length if len(length) <= 20 else "very many"
            self._refuse(413, f"the question has {size} bytes; at most {MAX_BODY} are allowed")
        else:
            self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        """Stream the events of an answer, one line of JSON each; the last one may have `error`."""
        self._begin(200, "application/x-ndjson")
        # A browser that leaves ends the request to the server too.
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                with contextlib.closing(self.server.answer(body)) as events:
                    for event in events:
                        self._line(event)
            except QSpecError as error:
                self._line({"error": str(error)})

    def _line(self, event: object) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")

    def _is_allowed(self) -> bool:
        allowed = self.server.allows(self.headers)
        if not allowed:
            host = self.headers.get("Host", "")
            self._refuse(403, f"the host {host!r} is not the address of this page")
        return allowed

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, why.encode(), "text/plain; charset=utf-8")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self._begin(status, kind)
        self.wfile.write(body)

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log requests only for a developer who asks for it."""
        LOGGER.debug(format, *args)
