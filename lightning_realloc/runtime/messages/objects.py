"""Exchange small Python values, such as a plan's digest, among the ranks of a group, as plain data.

Torch's own collectives of objects unpickle what they receive, so a message could run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import DataError
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value

_LENGTH_BYTES = 8
_FRAME_BYTES = 4096 - _LENGTH_BYTES
"""Bytes of an encoded value that the first message holds; most values are shorter."""
Group = dist.ProcessGroup | None


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Return the values of all ranks, in the group's order. Collective over ``group``.

    A small value takes one message.

    Raises:
        DataError: on every rank, if the value of one is no plain data.
    """
    if not dist.is_initialized():
        return [value]
    content = _encode(value)
    frames = _gather(_frame(content[:_FRAME_BYTES], len(content), _FRAME_BYTES, group), group)
    rest = max(map(_length, frames)) - _FRAME_BYTES
    tails = _gather(_frame(content[_FRAME_BYTES:], 0, rest, group), group) if rest > 0 else [b""] * len(frames)
    return [_decode(frame, tail) for frame, tail in zip(frames, tails, strict=True)]


def gather_on_first(value: Any) -> list[Any]:
    """Return the values of all ranks on the first one, [] elsewhere. Collective over all ranks.

    For values that grow with the number of ranks, which `gather_objects` would send to every rank.

    Raises:
        DataError: on the first rank, if the value of one is no plain data.
    """
    if not dist.is_initialized():
        return [value]
    content = _encode(value)
    size = max(map(_length, _gather(_frame(b"", len(content), 0, None), None)))
    mine = _frame(content, len(content), size, None)
    if dist.get_rank() != 0:
        dist.gather(mine, dst=0)
        return []
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.gather(mine, everyone, dst=0)
    return [_decode(frame) for frame in map(_to_bytes, everyone)]


def broadcast_object(value: Any, source: int, group: Group = None) -> Any:
    """Return the value of the rank ``source`` on every rank. Collective over ``group``.

    Raises:
        DataError: on every rank, if the value is no plain data.
    """
    if not dist.is_initialized():
        return value
    is_source = dist.get_rank() == source
    content = _encode(value) if is_source else b""
    first = _frame(content[:_FRAME_BYTES], len(content), _FRAME_BYTES, group)
    dist.broadcast(first, source, group=group)
    frame, tail = _to_bytes(first), b""
    if (rest := _length(frame) - _FRAME_BYTES) > 0:
        second = _frame(content[_FRAME_BYTES:], 0, rest, group)
        dist.broadcast(second, source, group=group)
        tail = _to_bytes(second)
    received = _decode(frame, tail)
    return value if is_source else received


def scatter_objects(values: Sequence[Any]) -> Any:
    """Return this rank's value from the list of the first rank; other ranks give (). Collective over all ranks.

    Raises:
        DataError: on the ranks whose value is no plain data.
    """
    if not dist.is_initialized():
        return values[0]
    contents = list(map(_encode, values))
    size = broadcast_object(max(map(len, contents), default=0), 0)
    mine = _frame(b"", 0, size, None)
    dist.scatter(mine, [_frame(content, len(content), size, None) for content in contents] or None, src=0)
    return _decode(_to_bytes(mine))


def _encode(value: Any) -> bytes:
    """Return a value as bytes; in place of one that cannot be sent, its error, which every reader raises."""
    try:
        return b"v" + encode_value(value)
    except DataError as error:  # raised here alone, it would leave the other ranks in the collective
        return b"e" + encode_value(str(error))


def _decode(frame: bytes, tail: bytes = b"") -> Any:
    content = (frame[_LENGTH_BYTES:] + tail[_LENGTH_BYTES:])[: _length(frame)]
    value = decode_value(content[1:])
    if content[:1] == b"e":
        raise DataError(value)
    return value


def _length(frame: bytes) -> int:
    return int.from_bytes(frame[:_LENGTH_BYTES], "big")


def _frame(content: bytes, length: int, size: int, group: Group) -> Tensor:
    """Return a length, and content padded to ``size`` bytes, as a tensor that the group's backend can send."""
    frame = torch.zeros(_LENGTH_BYTES + size, dtype=torch.uint8)
    filled = bytearray(length.to_bytes(_LENGTH_BYTES, "big") + content)
    frame[: len(filled)] = torch.frombuffer(filled, dtype=torch.uint8)
    if dist.get_backend(group) == "gloo":
        return frame
    return frame.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")


def _gather(mine: Tensor, group: Group) -> list[bytes]:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return list(map(_to_bytes, everyone))


def _to_bytes(frame: Tensor) -> bytes:
    return frame.cpu().numpy().tobytes()
