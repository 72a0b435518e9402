"""End a rank after the process that started it: it would wait for ranks that no longer exist, and hold its device.

Every process that starts ranks outlives them, unless it is killed. The watch begins when a rank imports this package,
before torch, so that it also covers imports and the rendezvous. Standard library only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PARENT_WATCH_S = 1.0
"""Seconds between a rank's checks that the process that started it still exists."""
ORPHAN_GRACE_S = 3.0
"""Seconds that a rank gets to print its own error and exit, after the process that started it has ended."""
LAST_WORDS_S = 5.0
"""Seconds that the last words of an orphaned rank may take; they may wait for an object store."""
_VARIABLE = "LIGHTNING_REALLOC_PARENT"


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
    if _watch() is None:
        _ParentWatch(parent).start()


def say_before_orphaned_end(last_words: Callable[[], object] | None) -> None:
    """Set the function that this rank calls before it ends because its parent has; None: none.

    A rank that computes for longer than its grace raises no error, and would end without a word of its own.
    """
    if (watch := _watch()) is not None:
        watch.last_words = last_words


def is_orphan() -> bool:
    """Return whether the process that started this rank, and that this rank watches, has ended."""
    watch = _watch()
    return watch is not None and watch.has_lost_parent()


def _watch() -> _ParentWatch | None:
    return next((thread for thread in threading.enumerate() if isinstance(thread, _ParentWatch)), None)


class _ParentWatch(threading.Thread):
    """Thread that ends this process after another one."""

    last_words: Callable[[], object] | None = None

    def __init__(self, parent: int) -> None:
        super().__init__(name="parent of this rank", daemon=True)
        self._parent = parent
        self._is_child = os.getppid() == parent  # otherwise a wrapper lies between, or the parent has ended already

    def has_lost_parent(self) -> bool:
        """Return whether the watched process has ended."""
        return os.getppid() != self._parent if self._is_child else not _exists(self._parent)

    def run(self) -> None:
        """Wait for the end of the watched process, and end this one."""
        while not self.has_lost_parent():
            time.sleep(PARENT_WATCH_S)
        sys.stderr.write(
            f"error: process {self._parent}, which started this rank, ended without it: a signal killed it, or it "
            f"called os._exit; see its log, and the system's log for an out-of-memory kill\n"
        )
        sys.stderr.flush()
        time.sleep(ORPHAN_GRACE_S)
        if self.last_words is not None:
            speaker = threading.Thread(target=self.last_words, daemon=True)
            speaker.start()
            speaker.join(LAST_WORDS_S)
        os._exit(1)


def _exists(process: int) -> bool:
    try:
        with suppress(PermissionError):
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
