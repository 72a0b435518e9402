"""Temporary folders that are removed with their owner, or by the next one if the owner was killed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from lightning_realloc.generation.vllm.child import remove_shared_memory
from lightning_realloc.remote_path import expand_home

_PREFIX, _LOCK = "lightning-realloc-vllm-", "owner.lock"


class OwnedFolder:
    """A folder, in that of temporary files by default, that this process holds a lock on until it ends.

    Where files cannot be locked, as on Lustre without the option flock, nobody removes the folder of a killed owner.
    """

    def __init__(self, parent: str | Path | None = None) -> None:
        parent = expand_home(Path(gettempdir() if parent is None else parent))
        _remove_leftovers(parent)
        self._folder = TemporaryDirectory(prefix=_PREFIX, dir=parent)
        self.path = Path(self._folder.name)
        """The folder."""
        self._lock = (self.path / _LOCK).open("wb")
        import fcntl  # vLLM runs on Linux, and the package elsewhere, too

        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:
            (self.path / _LOCK).unlink()  # without it, no other process takes the folder for an abandoned one

    def cleanup(self) -> None:
        """Remove the folder."""
        remove_shared_memory(self.path)
        self._lock.close()
        self._folder.cleanup()


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders whose owners have ended: the kernel has released their locks."""
    import fcntl

    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if time.time() - lock.stat().st_mtime < 60.0:  # its owner may be about to lock it
                continue
            with lock.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_shared_memory(lock.parent)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # in use, another user's, or removed meanwhile
            continue
