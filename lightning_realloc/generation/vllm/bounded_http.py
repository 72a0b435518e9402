"""HTTP requests with one bound on the time and on the size of a whole answer, and without redirects."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit


def fetch(
    address: str, route: str, data: bytes | None, *, timeout_s: float, most_bytes: int = 256 << 20
) -> tuple[int, bytes]:
    """Return status and content of a GET, or of a POST of JSON ``data``.

    Raises:
        OSError: if nothing answers, or if the whole answer has not come in time.
        ValueError: for an address without a host, and an answer that is no HTTP or too large.
    """
    parts = urlsplit(address)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    clock = _Deadline(timeout_s)
    try:
        connection.connect()
        clock.connection = connection.sock  # which the connection forgets before the end of some answers
        clock.check()
        method = "GET" if data is None else "POST"
        connection.request(method, f"{parts.path}/{route}", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read(most_bytes + 1)
    except (HTTPException, OSError) as error:
        clock.check()
        if isinstance(error, HTTPException):
            raise ValueError(f"no HTTP: {type(error).__name__}") from error
        raise
    finally:
        clock.stop()
        connection.close()
    clock.check()  # an answer of unknown length ends with its connection
    if len(content) > most_bytes:
        raise ValueError(f"more than {most_bytes >> 20} MiB")
    return answer.status, content


class _Deadline:
    """Ends a connection after some seconds: a socket's own time-out begins anew with every byte."""

    def __init__(self, seconds: float) -> None:
        self.connection: socket.socket | None = None
        """The connection; None until it is made, and then only `check` ends it."""
        self._seconds, self._is_over = seconds, False
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        self._is_over = True
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise TimeoutError after the deadline."""
        if self._is_over:
            raise TimeoutError(f"no whole answer within {self._seconds:g} s")

    def stop(self) -> None:
        """Cancel the timer."""
        self._timer.cancel()
