"""Serve a page and its data over HTTP, read-only, on the loopback address unless a token protects it.

The page asks for its data again and again, with the tag of those that it has; unchanged data are not sent. Requests
that name another host are refused, so that no web page can read a run through a host name of its own (DNS rebinding).
"""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lightning_realloc.errors import ConfigError

log = logging.getLogger(__name__)

TOKEN_COOKIE = "lightning_realloc_token_{port}"
"""Cookie that keeps the token of an address, so that the page's own requests need none. Browsers share cookies between
the ports of a host, so each port has its own."""
_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class ServedContent:
    """Content of a path at a moment."""

    content: bytes
    content_type: str
    tag: str
    """Changes whenever the content does."""


Source = Callable[[], ServedContent]
"""Makes a path's content; called for every request, by several threads."""


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class DashboardServer:
    """Serves some paths.

    Args:
        sources: Path -> the source of its content.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        token: Secret that every request has to bring, as ``?token=`` or as the cookie that follows; None: none is
            needed, which loopback addresses alone allow.

    Raises:
        ConfigError: for an address that other machines reach without a token, and one that cannot be listened on.
    """

    def __init__(self, sources: Mapping[str, Source], *, host: str, port: int, token: str | None) -> None:
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"--host={host} can be reached from other machines, where a run's prompts would be open to all; give "
                f"--token SECRET, or leave --host out"
            )
        handler = type("Handler", (_Handler,), {"sources": dict(sources), "token": token, "hosts": _hosts(host)})
        server_class = _V6Server if ":" in host else _Server
        try:
            self._server = server_class((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror or error}; give another --port"
            ) from error
        self.port = int(self._server.server_address[1])
        """Port that the server listens on."""

    def serve(self) -> None:
        """Answer requests until `close` is called."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop answering; may be called by another thread than that of `serve`."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _V6Server(_Server):
    address_family = socket.AF_INET6


def _hosts(host: str) -> frozenset[str] | None:
    """Return the host names that requests may name; None where any is allowed, since a token protects the run."""
    return frozenset({"localhost", "127.0.0.1", "::1", host}) if is_loopback(host) else None


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; other methods get 501, as the base class does."""

    sources: Mapping[str, Source]
    token: str | None
    hosts: frozenset[str] | None
    protocol_version = "HTTP/1.1"
    server_version = "lightning-realloc"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer with a path's content."""
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        """Answer with the headers alone."""
        self._answer(with_content=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests for those who look for them."""
        log.debug(format, *args)

    def _answer(self, *, with_content: bool) -> None:
        try:
            address = urlsplit(self.path)
            refusal = self._refusal(address.query)
        except ValueError:  # an address or a host that is none, such as one with half a pair of brackets
            return self._send(HTTPStatus.BAD_REQUEST, "the request cannot be read\n", with_content=with_content)
        source = self.sources.get(address.path)
        if refusal is not None:
            return self._send(*refusal, with_content=with_content)
        if source is None:
            return self._send(HTTPStatus.NOT_FOUND, "there is no such page\n", with_content=with_content)
        try:
            answer = source()
        except Exception as error:  # the page shows it, and asks again
            log.exception("no answer for %s", address.path)
            text = f"{type(error).__name__}: {error}\n"
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, text, with_content=with_content)
        tag = f'"{answer.tag}"'
        if self.headers.get("If-None-Match") == tag:
            return self._send(HTTPStatus.NOT_MODIFIED, "", {"ETag": tag}, with_content=False)
        headers = {"Content-Type": answer.content_type, "ETag": tag} | self._cookie(address.query)
        return self._send(HTTPStatus.OK, answer.content, headers, with_content=with_content)

    def _refusal(self, query: str) -> tuple[HTTPStatus, str] | None:
        """Return why a request is not answered; None if it is."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.hosts is not None and host not in self.hosts:
            return HTTPStatus.FORBIDDEN, "requests must name this machine's loopback address as their host\n"
        if self.token is None:
            return None
        given = [*parse_qs(query).get("token", []), *self._own_cookies()]
        if any(hmac.compare_digest(one.encode(), self.token.encode()) for one in given):
            return None
        return HTTPStatus.UNAUTHORIZED, "this dashboard needs its token: open the address that the command printed\n"

    @property
    def _cookie_name(self) -> str:
        return TOKEN_COOKIE.format(port=self.connection.getsockname()[1])

    def _own_cookies(self) -> Iterator[str]:
        """Yield the values of the server's own cookie; those of other programs on the host may have any form."""
        for header in self.headers.get_all("Cookie", []):
            for one in header.split(";"):
                name, _, value = one.strip().partition("=")
                if name == self._cookie_name:
                    yield value.strip('"')

    def _cookie(self, query: str) -> dict[str, str]:
        if self.token is None or "token" not in parse_qs(query):
            return {}
        return {"Set-Cookie": f"{self._cookie_name}={self.token}; HttpOnly; SameSite=Strict; Path=/"}

    def _send(
        self, status: HTTPStatus, content: bytes | str, headers: Mapping[str, str] | None = None, *, with_content: bool
    ) -> None:
        body = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {"Content-Type": "text/plain; charset=utf-8", **_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_content:
            self.wfile.write(body)
