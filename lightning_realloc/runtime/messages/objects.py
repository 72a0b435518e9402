"""Gather small Python objects, such as a plan's digest, from every rank of a group."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

_LENGTH_BYTES = 8
_FRAME_BYTES = 4096 - _LENGTH_BYTES
"""Bytes of a pickled value that the first message holds; most values are shorter."""


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in the group's order. Collective over ``group``.

    Over gloo a small value takes one message, while ``all_gather_object`` sends the lengths first.
    """
    if not dist.is_initialized():
        return [value]
    if dist.get_backend(group) != "gloo":
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values
    packed = pickle.dumps(value)
    frames = _gather_bytes(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed[:_FRAME_BYTES], group, _FRAME_BYTES)
    lengths = [int.from_bytes(frame[:_LENGTH_BYTES], "big") for frame in frames]
    rest = max(lengths) - _FRAME_BYTES
    tails = _gather_bytes(packed[_FRAME_BYTES:], group, rest) if rest > 0 else [b""] * len(frames)
    pickled = zip(frames, tails, lengths, strict=True)
    return [pickle.loads((frame[_LENGTH_BYTES:] + tail)[:length]) for frame, tail, length in pickled]


def gather_on_first(value: Any) -> list[Any]:
    """Return the values of all ranks on the first one, [] elsewhere. Collective over all ranks.

    For values that grow with the number of ranks, which `gather_objects` would send to every rank.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None, dst=0)
    return values


def _gather_bytes(content: bytes, group: dist.ProcessGroup | None, size: int) -> list[bytes]:
    """Return every rank's bytes, padded to ``size``, with room for a length before them."""
    mine = torch.zeros(_LENGTH_BYTES + size, dtype=torch.uint8)
    if content:
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [bytes(row.numpy()) for row in everyone]
