"""Run the command ``dashboard``, and ask it for content."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_realloc.commands.dashboard_command import run_dashboard

_PROGRAM = f"""
import sys
from {run_dashboard.__module__} import run_dashboard
run_dashboard(sys.argv[1:], lambda text: print(text, flush=True))
"""
"""The command without the imports of others."""


@contextmanager
def dashboard(*arguments: str) -> Iterator[tuple[int, str]]:
    """Run the command on a free port; yield the port and what it wrote."""
    written: list[str] = []
    stop = threading.Event()
    thread = threading.Thread(target=run_dashboard, args=([*arguments, "--port=0"], written.append, stop))
    thread.start()
    try:
        give_up_at = time.monotonic() + 30
        while not written and time.monotonic() < give_up_at:
            time.sleep(0.05)
        found = re.search(r":(\d+)/", written[0])
        assert found is not None
        yield int(found[1]), written[0]
    finally:
        stop.set()
        thread.join(10)


@contextmanager
def dashboard_process(*arguments: str) -> Iterator[str]:
    """Run the command in a process of its own, which ends with all its connections; yield the address."""
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait(10)


def get(port: int, path: str) -> tuple[int, str]:
    """Return status and content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content
