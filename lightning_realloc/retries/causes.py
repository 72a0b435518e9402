"""Tell errors of disks, object stores and servers that may pass from those that last, with the way out of the latter.

Lost connections, timeouts and busy servers may pass. A missing permission, a full disk and a missing bucket last.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from lightning_realloc.errors import ReallocError

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP status codes after which a repeated request may succeed; others report an error of the request itself."""
_FORBIDDEN_STATUSES = frozenset({401, 403})
_MISSING_STATUSES = frozenset({404, 410})
_FULL_STATUS = 507
_STATUS_NAMES = ("status_code", "status", "code")
"""Attributes in which the packages of object stores (azure, aiohttp, gcsfs) keep the status of an answer."""
_PASSING_NAMES = (
    "EAGAIN EBUSY ECONNABORTED ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH EINTR EIO ENETDOWN ENETRESET ENETUNREACH "
    "ENOBUFS ENOLCK ENOTCONN EPIPE EREMOTEIO ESHUTDOWN ESTALE ETIMEDOUT"
)
_PASSING = frozenset(getattr(errno, name) for name in _PASSING_NAMES.split() if hasattr(errno, name))
"""Error numbers of network disks that lost their server or a file's handle for a while."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_REFUSALS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ReallocError)
_MISTAKES = (NotImplementedError, TypeError, ValueError, LookupError, AttributeError, ImportError)
"""With `_REFUSALS`, errors that another attempt meets again."""
_CREDENTIALS = "Credential"
"""Part of the names of errors about missing keys (botocore, google.auth), which have no common class."""
_NUMBER_IN_TEXT = re.compile(r"\(os error (\d+)\)")
"""Number of a system's error in messages of packages written in Rust, such as safetensors."""


def may_pass(error: BaseException, *, is_remote: bool) -> bool:
    """Return whether another attempt may succeed.

    Args:
        is_remote: Whether an object store raised the error. Each store has classes of its own, so unknown ones count
            as passing. On a disk, only errors of a network disk do.
    """
    if isinstance(error, (*_REFUSALS, *_MISTAKES)) or not isinstance(error, Exception):
        return False
    if any(_CREDENTIALS in type(one).__name__ for one in _chain(error)):
        return False
    if (status := http_status(error)) is not None:
        return status in RETRYABLE_STATUSES
    if (number := error_number(error)) is not None:
        return number in _PASSING
    return is_remote or isinstance(error, ConnectionError | TimeoutError)


def way_out(error: BaseException) -> str:
    """Return how to end an error that lasts, as the end of a sentence; empty if it may pass or is not known."""
    number, status = error_number(error), http_status(error)
    names = [type(one).__name__ for one in _chain(error)]
    is_forbidden = isinstance(error, PermissionError) or number in _FORBIDDEN or status in _FORBIDDEN_STATUSES
    if is_forbidden or any(_CREDENTIALS in name for name in names):
        return "check the permissions and access keys"
    if isinstance(error, FileNotFoundError) or status in _MISSING_STATUSES:
        return "make that bucket or folder, or correct the address"
    if number in _FULL or status == _FULL_STATUS:
        return "make room there (a quota counts, too)"
    return "its disk is mounted for reading alone: give another" if number == errno.EROFS else ""


def error_number(error: BaseException) -> int | None:
    """Return the number of the system's error from which ``error`` follows; None without one."""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno is not None:
            return one.errno
        if found := _NUMBER_IN_TEXT.search(str(one)):
            return int(found[1])
    return None


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of an object store; None without one."""
    for one in _chain(error):
        answer = getattr(one, "response", None)  # of botocore: a mapping
        found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
        for status in (found, *(getattr(one, name, None) for name in _STATUS_NAMES)):
            if isinstance(status, int) and 400 <= status < 600:
                return status
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it follows from; packages raise errors of their own after the system's."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
