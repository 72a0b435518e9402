"""Errors that may pass and errors that last, of disks, of object stores' packages, and of servers."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from lightning_realloc.errors import CheckpointError
from lightning_realloc.retries.causes import error_number, http_status, may_pass, way_out


class ClientError(Exception):
    """As botocore raises it: the answer is a mapping."""

    def __init__(self, status: int) -> None:
        super().__init__(f"An error occurred ({status})")
        self.response = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """As gcsfs raises it: the status is an attribute."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


class NoCredentialsError(Exception):
    """As botocore raises it without keys."""


def _after(cause: Exception) -> Exception:
    error = RuntimeError("a package's own words")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "on_disk", "in_store"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), True, True),
        (ConnectionError("closed"), True, True),
        (TimeoutError("no answer"), True, True),
        (OSError(errno.ESTALE, "Stale file handle"), True, True),
        (OSError(errno.EIO, "Input/output error"), True, True),
        (_after(OSError(errno.ETIMEDOUT, "timed out")), True, True),
        (Exception("I/O error: Stale file handle (os error 116)"), True, True),
        (OSError(errno.ENOSPC, "No space left on device"), False, False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False, False),
        (_after(OSError(errno.ENOSPC, "No space left on device")), False, False),
        (OSError(errno.EROFS, "Read-only file system"), False, False),
        (PermissionError(errno.EACCES, "Permission denied"), False, False),
        (FileNotFoundError("The specified bucket does not exist"), False, False),
        (ClientError(503), True, True),
        (ClientError(403), False, False),
        (ClientError(404), False, False),
        (HttpError(429), True, True),
        (HttpError(500), True, True),
        (HttpError(401), False, False),
        (_after(HttpError(507)), False, False),
        (NoCredentialsError("Unable to locate credentials"), False, False),
        (Exception("of a class of its own"), False, True),
        (OSError("without a number"), False, True),
        (CheckpointError("a rule"), False, False),
        (ValueError("a mistake"), False, False),
        (NotImplementedError("no such operation"), False, False),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_errors_that_may_pass_are_told_from_those_that_last(error: Any, on_disk: bool, in_store: bool) -> None:
    assert (may_pass(error, is_remote=False), may_pass(error, is_remote=True)) == (on_disk, in_store)
    assert not (way_out(error) and in_store), "only errors that last have a way out"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError("Access Denied"), "check the permissions and access keys"),
        (_after(HttpError(403)), "check the permissions and access keys"),
        (NoCredentialsError("Unable to locate credentials"), "check the permissions and access keys"),
        (FileNotFoundError("The specified bucket does not exist"), "make that bucket"),
        (OSError(errno.ENOSPC, "No space left on device"), "make room there"),
        (HttpError(507), "make room there"),
        (OSError(errno.EROFS, "Read-only file system"), "give another"),
    ],
)
def test_an_error_that_lasts_names_its_way_out(error: Exception, told: str) -> None:
    assert told in way_out(error)


def test_numbers_and_statuses_are_those_of_the_first_cause_that_has_one() -> None:
    assert error_number(_after(OSError(errno.ENOSPC, "full"))) == errno.ENOSPC
    assert error_number(ValueError("of nothing")) is None
    assert http_status(_after(ClientError(502))) == 502
    assert http_status(OSError(errno.EIO, "status 200")) is None
