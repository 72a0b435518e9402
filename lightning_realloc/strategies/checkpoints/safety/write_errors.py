"""Convert errors from writing a checkpoint into one line that names the cause, the disk and the way out."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import PicklingError

from lightning_realloc.errors import CheckpointError, UnwrittenCheckpoint, describe_error
from lightning_realloc.realloc.plan import format_bytes
from lightning_realloc.remote_path import AnyPath, RemotePath
from lightning_realloc.retries.causes import error_number, way_out
from lightning_realloc.strategies.checkpoints.checkpoint_files import DamagedCheckpoint

_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
"""Error numbers of a disk that is full, read-only or broken, of a quota, and of a limit on the size of files."""
_MISTAKES = (TypeError, AttributeError, ValueError, LookupError, NotImplementedError, ImportError, PicklingError)
_CHANGED_BY_OTHERS = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}
"""Error numbers of files that come and go while a checkpoint is written."""


@contextmanager
def name_write_errors(folder: AnyPath, *, needed_bytes: int = 0) -> Iterator[None]:
    """Convert errors from writing a checkpoint into one that names the cause and the disk.

    Args:
        needed_bytes: Bytes of all tensors of the checkpoint; 0 if they are not known.

    Raises:
        UnwrittenCheckpoint: for an error of a disk or store.
        CheckpointError: for an error that another save would meet, such as of an object that cannot be pickled.
    """
    try:
        yield
    except DamagedCheckpoint as error:
        raise UnwrittenCheckpoint(f"{error}; earlier checkpoints are unchanged") from error
    except CheckpointError:
        raise
    except Exception as error:
        kind = CheckpointError if isinstance(error, _MISTAKES) else UnwrittenCheckpoint
        raise kind(_describe_write_error(folder, error, needed_bytes)) from error


def _describe_write_error(folder: AnyPath, error: BaseException, needed_bytes: int) -> str:
    if isinstance(folder, RemotePath):
        advice = f"; {way_out(error)}" if way_out(error) else ""
        return f"{folder} cannot be written: {describe_error(error)}{advice}; earlier checkpoints are unchanged"
    place = folder.absolute()
    while not os.path.exists(place):
        place = place.parent
    free = shutil.disk_usage(place).free
    while not os.path.ismount(place):
        place = place.parent
    number = error_number(error)
    problem = f"{folder} cannot be written: {describe_error(error) if number is None else os.strerror(number)}"
    if free < needed_bytes or number in _STORAGE_ERRORS:
        needs = f"its tensors need {format_bytes(needed_bytes)}, and " if needed_bytes else ""
        problem += (
            f"; {needs}the disk at {place} has {format_bytes(free)} free: make room there (a quota counts, too), keep "
            f"fewer with ModelCheckpoint(save_top_k=...), or save to another disk"
        )
    elif number in _CHANGED_BY_OTHERS:
        problem += "; another run seems to write to the same path: give each run a folder of its own"
    elif advice := way_out(error):
        problem += f"; {advice}"
    return f"{problem}; earlier checkpoints are unchanged"
