"""The server answers reading requests for its own host, and others only with the token."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from lightning_realloc.errors import ConfigError
from lightning_realloc.report.live.server import DashboardServer, ServedContent, is_loopback


class Counter:
    """Source whose content changes when it is told to."""

    def __init__(self) -> None:
        self.value = 1

    def __call__(self) -> ServedContent:
        if self.value < 0:
            raise ValueError("the run's folder is gone")
        return ServedContent(f"value {self.value}".encode(), "text/plain", str(self.value))


@contextmanager
def serving(sources: Mapping[str, Counter], *, token: str | None = None) -> Iterator[int]:
    """Serve on a free port of the loopback address, and yield it."""
    server = DashboardServer(sources, host="127.0.0.1", port=0, token=token)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.port
    finally:
        server.close()
        thread.join(10)


def ask(port: int, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str, Mapping[str, str]]:
    """Return status, content and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content, dict(answer.headers)


def test_content_is_sent_once_until_it_changes() -> None:
    source = Counter()
    with serving({"/data.json": source}) as port:
        status, content, headers = ask(port, "/data.json")
        assert (status, content) == (200, "value 1")
        assert ask(port, "/data.json", If_None_Match=headers["ETag"])[:2] == (304, "")
        source.value = 2
        assert ask(port, "/data.json", If_None_Match=headers["ETag"])[:2] == (200, "value 2")
        assert ask(port, "/data.json", method="HEAD")[:2] == (200, "")


def test_nothing_can_be_written_and_other_paths_do_not_exist() -> None:
    with serving({"/": Counter()}) as port:
        assert ask(port, "/../../etc/passwd")[0] == 404
        assert all(ask(port, "/", method=method)[0] == 501 for method in ("POST", "PUT", "DELETE"))


def test_requests_for_another_host_are_refused() -> None:
    with serving({"/": Counter()}) as port:
        assert ask(port, "/", Host=f"localhost:{port}")[0] == 200
        assert ask(port, "/", Host="evil.example")[0] == 403


def test_a_token_protects_every_path_and_stays_in_a_cookie() -> None:
    with serving({"/": Counter()}, token="secret") as port:
        assert ask(port, "/")[0] == 401
        assert ask(port, "/missing")[0] == 401
        assert ask(port, "/?token=guess")[0] == 401
        status, _, headers = ask(port, "/?token=secret")
        assert status == 200 and "HttpOnly" in headers["Set-Cookie"]
        assert ask(port, "/", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200


def test_cookies_of_other_programs_and_broken_hosts_are_no_errors() -> None:
    with serving({"/": Counter()}, token="secret") as port:
        own = f"lightning_realloc_token_{port}=secret"
        for other in ("a/b=1", "{x}", 'prefs={"a":1}', '"', "x=;;=", "lightning_realloc_token_1=guess"):
            assert ask(port, "/", Cookie=f"{other}; {own}")[0] == 200
            assert ask(port, "/", Cookie=f"{own}; {other}")[0] == 200
            assert ask(port, "/", Cookie=other)[0] == 401
        assert ask(port, "/", Cookie=f"x{own}")[0] == 401
        assert ask(port, "/", Host="[")[0] == 400
        assert ask(port, "http://[/", Host="localhost")[0] == 400
    with serving({"/": Counter()}) as port:
        assert ask(port, "/", Host="[")[0] == 400


def test_the_cookies_of_two_servers_on_one_host_differ() -> None:
    with serving({"/": Counter()}, token="first") as one, serving({"/": Counter()}, token="second") as other:
        cookies = [
            ask(port, f"/?token={token}")[2]["Set-Cookie"].partition(";")[0]
            for port, token in ((one, "first"), (other, "second"))
        ]
        assert all(ask(port, "/", Cookie="; ".join(cookies))[0] == 200 for port in (one, other))
        assert ask(other, "/", Cookie=cookies[0])[0] == 401


def test_an_error_of_a_source_is_told_and_the_server_goes_on() -> None:
    source = Counter()
    with serving({"/": source}) as port:
        source.value = -1
        assert ask(port, "/")[:2] == (500, "ValueError: the run's folder is gone\n")
        source.value = 3
        assert ask(port, "/")[:2] == (200, "value 3")


def test_other_machines_need_a_token_and_a_taken_port_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host=0.0.0.0 can be reached from other machines.*give --token SECRET"):
        DashboardServer({}, host="0.0.0.0", port=0, token=None)
    with serving({}) as port, pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
        DashboardServer({}, host="127.0.0.1", port=port, token=None)
    assert is_loopback("127.0.0.9") and is_loopback("::1") and not is_loopback("example.com")
