"""A local reward server whose failures a test controls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """A response to one request; ``content`` None returns the lengths of the completions."""

    status: int = 200
    content: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


@dataclass
class Log:
    """Requests that a server received."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    most_at_a_time: int = 0


@contextmanager
def reward_server(answer: Callable[[int, dict[str, Any]], Answer] = lambda number, asked: Answer()) -> Iterator[Log]:
    """Serve until the block ends; ``answer`` receives a request's number, from 0, and its body."""
    lock = threading.Lock()
    at_a_time = 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal at_a_time
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(log.requests)
                log.requests.append(asked)
                log.headers.append(dict(self.headers))
                log.times.append(time.monotonic())
                at_a_time += 1
                log.most_at_a_time = max(log.most_at_a_time, at_a_time)
            reply = answer(number, asked)
            ended.wait(reply.delay_s)
            with lock:
                at_a_time -= 1
            lengths = {"rewards": [float(len(text)) for text in asked["completions"]]}
            content = lengths if reply.content is None else reply.content
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            try:
                self.send_response(reply.status)
                for name, value in {**reply.headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # the client has closed the connection
                pass

        def log_message(self, *arguments: object) -> None:
            pass

    ended = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    log = Log(f"http://127.0.0.1:{server.server_address[1]}/judge")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield log
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
