"""Command ``lightning-realloc dashboard``: serve the report of running runs, and follow them."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_realloc.commands.command_parser import CommandParser
from lightning_realloc.errors import ConfigError
from lightning_realloc.remote_path import expand_home, is_remote
from lightning_realloc.report.live.live_runs import sources_of
from lightning_realloc.report.live.server import DashboardServer, is_loopback

PORT = 8899
"""Default of ``--port``."""


def _local_run(text: str) -> Path:
    if is_remote(text):
        raise ConfigError(
            f"{text} is an address, and the dashboard follows files on a disk; copy the run to one, or see it by "
            f"`lightning-realloc report {text}`"
        )
    return expand_home(Path(text))


def run_dashboard(arguments: Sequence[str], write: Callable[[str], object], stop: threading.Event | None = None) -> int:
    """Serve until Ctrl-C, or until ``stop`` is set; return the exit code.

    Raises:
        ConfigError: for a wrong flag, a folder without a run, and an address that cannot be served.
    """
    parser = CommandParser("dashboard", epilog="Nothing can be changed through it.")
    parser.add_argument(
        "runs", type=str, nargs="+", help="folders of runs; the first one's report, compared with others"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a token")
    parser.add_argument("--port", type=int, default=PORT, help="default: %(default)s; 0 takes a free one")
    parser.add_argument("--token", help="secret of letters, digits, - and _ that browsers must bring; auto makes one")
    parser.add_argument("--prometheus", action="store_true", help="serve figures for Prometheus at /metrics")
    chosen = parser.parse(arguments)
    token = _token(chosen.token)
    if not 0 <= chosen.port < 2**16:
        raise ConfigError(f"--port={chosen.port} must lie between 0 and {2**16 - 1}")
    sources = sources_of([_local_run(run) for run in chosen.runs], with_prometheus=chosen.prometheus)
    server = DashboardServer(sources, host=chosen.host, port=chosen.port, token=token)
    name = "localhost" if is_loopback(chosen.host) else chosen.host
    secret = "" if token is None else f"?token={token}"
    write(f"http://{name}:{server.port}/{secret}   Ctrl-C ends it\n")
    thread = threading.Thread(target=server.serve, name="dashboard", daemon=True)
    thread.start()
    try:
        (stop or threading.Event()).wait()
    except KeyboardInterrupt:
        write("\n")
    finally:
        server.close()
        thread.join()
    return 0


def _token(given: str | None) -> str | None:
    if given == "auto":
        return secrets.token_urlsafe(16)
    if given is not None and not re.fullmatch(r"[\w-]{8,}", given, re.ASCII):
        raise ConfigError("--token must be at least 8 letters, digits, - or _; --token auto makes one")
    return given
