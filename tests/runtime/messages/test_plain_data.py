"""Values survive a message unchanged, and a message from anyone else runs no code."""

from __future__ import annotations

import datetime
import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

from lightning_realloc.errors import CheckpointError, DataError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.remote_path import RemotePath
from lightning_realloc.runtime.messages.mailbox import Frame, FrameKind
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value


def test_plain_values_and_the_values_of_this_package_survive_a_message() -> None:
    value = {
        1: [None, True, -3, 0.1, float("inf"), "a\ud800\n", b"\x00\xff"],
        ("tuple", torch.bfloat16): ({1, 2}, frozenset({"a"}), (), [], {}),
        "dates": [datetime.date(2026, 2, 3), datetime.datetime(2026, 2, 3, 4, 5), Decimal("0.10")],
        "times": [datetime.time(4, 5, 6, 7), datetime.timedelta(-1, 2, 3), UUID(int=7)],
        "paths": [Path("/a/b"), RemotePath("s3", "bucket/x")],
        "own": [Layout.parse("fsdp2@0-1"), Frame(FrameKind.ROWS, 1, 2, 3)],
        "numpy": [np.float64(0.5), np.int64(7), torch.Size((2, 3))],
    }
    received = decode_value(encode_value(value))

    assert received == value | {"numpy": [0.5, 7, (2, 3)]}
    assert type(received["own"][1]) is Frame and received["own"][1].kind is FrameKind.ROWS
    for tensor in (torch.randn(2, 0, 3), torch.randn(3, 4).bfloat16().T, torch.tensor(True), torch.tensor(7)):
        again = decode_value(encode_value([b"x", tensor]))[1]
        assert torch.equal(again, tensor) and again.dtype == tensor.dtype and again.shape == tensor.shape
    texts, days = np.array([["a", "b\ud800"]]), np.array(["2026-02-03"], "M8[ns]")
    for array in (np.arange(6, dtype=">i2").reshape(2, 3).T, texts, days, days - days, np.array([b"x"])):
        again = decode_value(encode_value(array))
        assert np.array_equal(again, array) and again.dtype == array.dtype


def test_an_error_keeps_its_class_and_message() -> None:
    error = decode_value(encode_value(CheckpointError("disk full")))
    assert type(error) is CheckpointError and str(error) == "disk full"


def test_other_objects_are_refused_with_their_class() -> None:
    for value in (object(), {"a": [torch.nn.Linear(1, 1)]}, lambda: None, ArithmeticError("x")):
        with pytest.raises(DataError, match="ranks exchange plain data, and a"):
            encode_value(value)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('code of a message ran')",)


def _message(value: object) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "big") + text


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_Bomb()),
        b"",
        _message({"object": ["subprocess:Popen", ["true"]]}),
        _message({"object": ["os:system", ["true"]]}),
        _message({"object": ["lightning_realloc.errors:annotations", []]}),
        _message({"object": ["lightning_realloc.runtime.messages.mailbox:Mailbox", [0, 1, None]]}),  # no value
        _message({"object": ["lightning_realloc.runtime.messages.mailbox:dist.Work", []]}),
        _message({"object": ["lightning_realloc.__main__:main", []]}),
        _message({"dtype": "load"}),
        _message({"tensor": ["float32", [9], 4]}),
        _message({"a": 1, "b": 2}),
        _message({"object": ["lightning_realloc.layout.dims:Layout"]}),
        _message({"tensor": ["float32", [9], 0]}),
        _message({"decimal": "x"}),
        _message({"timedelta": "9999999999 0 0"}),
    ],
)
def test_a_message_of_another_program_runs_no_code(content: bytes) -> None:
    with pytest.raises(DataError, match="a message between ranks holds no plain data"):
        decode_value(content)
