"""End a rank after the process that started it: it would wait for ranks that no longer exist, and hold its device.

Every process that starts ranks outlives them, unless it is killed. The watch begins when a rank imports this package,
before torch, so that it also covers imports and the rendezvous. Standard library only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PARENT_WATCH_S = 1.0
"""Seconds between a rank's checks that the process that started it still exists."""
ORPHAN_GRACE_S = 3.0
"""Seconds that a rank gets to print its own error and exit, after the process that started it has ended."""
_VARIABLE = "LIGHTNING_REALLOC_PARENT"
_THREAD = "parent of this rank"


@contextmanager
def children_watch_this_process() -> Iterator[None]:
    """Make Python processes that are started inside end after this one, once they import this package."""
    os.environ[_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def watch_announced_parent() -> None:
    """Watch the process that started this one inside `children_watch_this_process`; do nothing in other processes."""
    parent = os.environ.pop(_VARIABLE, None)  # processes that this one starts are no ranks
    if parent is not None:
        end_with_parent(int(parent))


def end_with_parent(parent: int) -> None:
    """Start a thread that ends this process when the process ``parent`` ends. A second call does nothing.

    A parent that is killed, for example for lack of memory, reports nothing. A rank in the rendezvous, or one that
    waits to receive from any sender, does not notice, and would wait until the timeout.
    """
    if not any(thread.name == _THREAD for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(parent,), name=_THREAD, daemon=True).start()


def _watch(parent: int) -> None:
    is_child = os.getppid() == parent  # otherwise a wrapper lies between the two, or the parent has ended already
    while os.getppid() == parent if is_child else _exists(parent):
        time.sleep(PARENT_WATCH_S)
    sys.stderr.write(
        f"error: process {parent}, which started this rank, ended without it: a signal killed it, or it called "
        f"os._exit; see its log, and the system's log for an out-of-memory kill\n"
    )
    sys.stderr.flush()
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def _exists(process: int) -> bool:
    try:
        with suppress(PermissionError):
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
